"""Statistics of a model's numbers during training, alarms, and the origin of infinite and NaN values."""
