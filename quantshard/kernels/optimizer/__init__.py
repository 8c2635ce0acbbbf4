"""Adam over many tensors in a few launches."""
