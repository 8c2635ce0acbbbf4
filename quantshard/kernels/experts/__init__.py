"""Kernels of many experts at once."""
