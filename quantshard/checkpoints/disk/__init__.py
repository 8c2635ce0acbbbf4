"""Storage of checkpoints, and the commit that makes a save visible."""
