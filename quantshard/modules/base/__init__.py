"""Base classes of all modules: initialization, checkpointing, assignment."""
