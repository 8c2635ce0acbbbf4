"""Collectives over the ranks that share values, and the values that wait for the next collective."""
