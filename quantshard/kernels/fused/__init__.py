"""Kernels that compute what they quantize, and rotary embeddings and sums beside GEMMs."""
