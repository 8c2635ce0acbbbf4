"""What is told of a run while it trains: lines and the live view, logs, statistics, traces, other trackers."""
