"""Quantized data, the tensor class around it, and what may be done to it."""
