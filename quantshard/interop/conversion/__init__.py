"""In-place conversion of a model's linear layers to quantized ones, and back."""
