"""Matrix products of quantized operands, and how operands are quantized."""
