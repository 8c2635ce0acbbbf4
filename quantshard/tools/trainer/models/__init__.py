"""The models of a run: built by sizes or from transformers, initialized, and exported for other programs."""
