"""Checkpoints: plain components on disk, readable by stock PyTorch."""

from quantshard.checkpoints.high_precision import load_high_precision
from quantshard.checkpoints.io import is_complete, load, save

__all__ = ["is_complete", "load", "load_high_precision", "save"]
