"""Names and paths of other libraries, so that their users' scripts run with one import changed."""
