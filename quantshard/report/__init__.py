"""What a run has written, read while it is still written to or afterwards: the page of `report`, the view of `watch`."""
