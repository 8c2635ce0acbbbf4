"""The settings of a run: what they are, may be, and follow from, and the files that say them."""
