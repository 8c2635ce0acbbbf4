"""A model of anybody's becomes one whose linear layers are quantized, in place, and back."""
