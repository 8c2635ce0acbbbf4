"""Optimizers for models with quantized weights."""

from quantshard.optimizers.fused_adam import FusedAdam
from quantshard.optimizers.master_weights import MasterWeights

__all__ = ["FusedAdam", "MasterWeights"]
