"""Interoperability with other programs: their models, frameworks, checkpoints and weight names."""
