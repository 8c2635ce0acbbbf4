"""Checkpoints: plain components on disk, readable by stock PyTorch."""

from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.checkpoints.from_rank0 import load_from_rank0
from quantshard.checkpoints.high_precision import high_precision_state_dict, load_high_precision
from quantshard.checkpoints.inspection import verify
from quantshard.checkpoints.loading import load
from quantshard.checkpoints.manager import Manager, Restored, SaveReport
from quantshard.checkpoints.saving import save

__all__ = [
    "Manager",
    "Restored",
    "SaveReport",
    "compare",
    "high_precision_state_dict",
    "is_complete",
    "load",
    "load_from_rank0",
    "load_high_precision",
    "save",
    "verify",
]
