"""Kernels that compute the values they quantize, rotary embeddings, sums, and cross-entropy."""
