"""The three GEMMs of a linear layer, run at once, compiled, or for many experts together."""
