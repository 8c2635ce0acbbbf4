"""Matrix products of quantized operands, and the quantization of operands."""
