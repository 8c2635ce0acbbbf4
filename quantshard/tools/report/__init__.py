"""What a run has written, read while it is trained or afterwards: the page of `report`, the view of `watch`."""
