"""CUDA graphs of modules and of whole training steps."""
