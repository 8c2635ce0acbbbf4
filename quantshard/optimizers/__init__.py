"""Optimizers for models with quantized weights."""

from quantshard.numerics.states import StateSpec
from quantshard.optimizers.clipping import clip_grad_norm_
from quantshard.optimizers.elementwise import ElementwiseOptimizer
from quantshard.optimizers.fused_adam import FusedAdam
from quantshard.optimizers.master_weights import MasterWeights

__all__ = ["ElementwiseOptimizer", "FusedAdam", "MasterWeights", "StateSpec", "clip_grad_norm_"]
