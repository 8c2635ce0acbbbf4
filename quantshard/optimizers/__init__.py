"""Optimizers for models with quantized weights."""

from quantshard.optimizers.fused_adam import FusedAdam

__all__ = ["FusedAdam"]
