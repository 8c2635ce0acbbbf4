"""Inspection, verification and comparison of checkpoints."""
