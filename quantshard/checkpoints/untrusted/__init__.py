"""Readers of untrusted checkpoint files: no code in a file is executed."""
