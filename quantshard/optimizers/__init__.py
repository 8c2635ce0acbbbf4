"""Optimizers for models with quantized weights."""

from quantshard.optimizers.clipping import clip_grad_norm_
from quantshard.optimizers.fused_adam import FusedAdam
from quantshard.optimizers.master_weights import MasterWeights

__all__ = ["FusedAdam", "MasterWeights", "clip_grad_norm_"]
