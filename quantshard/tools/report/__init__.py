"""Readers of a run's files, during or after training, for the page of `report` and the lines of `watch`."""
