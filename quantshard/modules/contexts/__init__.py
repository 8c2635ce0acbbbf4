"""Contexts in which modules are built and run: autocast, activation recomputation."""
