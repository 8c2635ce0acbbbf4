"""What commands show and write: the one place that prints, and the one that writes files."""
