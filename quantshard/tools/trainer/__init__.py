"""The parts of `quantshard train`: settings, data, models, loop and processes.

User errors raise a ConfigurationError, or a CheckpointError about a checkpoint, whose message is one line.
"""
