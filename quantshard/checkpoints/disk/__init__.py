"""Where checkpoints lie, and how a save becomes visible."""
