"""Quantized data, the tensor class around it, and the operations on it."""
