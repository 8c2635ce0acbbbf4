"""The models of a run: built by sizes or of transformers, filled with values, and described to other programs."""
