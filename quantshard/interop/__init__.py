"""Other programs: their models, frameworks, checkpoints and names."""
