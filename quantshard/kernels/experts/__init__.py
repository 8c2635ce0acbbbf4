"""Kernels that process many experts in one launch."""
