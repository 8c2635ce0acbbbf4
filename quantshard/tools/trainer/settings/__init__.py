"""The settings of a run: definitions, checks, derived values, and the files that store them."""
