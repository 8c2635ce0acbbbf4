"""quantshard: train PyTorch models whose weights are low-precision numbers, sharded, and resume them bit for bit."""

from quantshard import errors

__all__ = ["errors"]
