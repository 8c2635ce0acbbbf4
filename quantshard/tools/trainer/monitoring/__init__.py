"""Monitoring of a training run: progress lines and live view, logs, statistics, traces, external trackers."""
