"""Checkpoints: plain components on disk, readable by stock PyTorch."""

from quantshard.checkpoints.commit import is_complete
from quantshard.checkpoints.from_rank0 import load_from_rank0
from quantshard.checkpoints.high_precision import load_high_precision
from quantshard.checkpoints.io import load, save
from quantshard.checkpoints.manager import Manager, Restored, SaveReport

__all__ = ["Manager", "Restored", "SaveReport", "is_complete", "load", "load_from_rank0", "load_high_precision", "save"]
