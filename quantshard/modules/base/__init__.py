"""What all modules share: birth, checkpointing, assignment."""
