"""Collectives over the ranks that share something, and what is noted until one is made."""
