"""Kernels that quantize, measure, dequantize and transpose a matrix."""
