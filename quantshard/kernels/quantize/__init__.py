"""Kernels that quantize, measure, dequantize and transpose one matrix."""
