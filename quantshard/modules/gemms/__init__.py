"""The three GEMMs of a linear layer: eager, compiled, and grouped for many experts."""
