"""Modules whose forward and backward are CUDA graphs."""
