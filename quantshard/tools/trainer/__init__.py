"""The parts of `quantshard train`: settings, data, models, loop and processes."""
