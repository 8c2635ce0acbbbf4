"""Modules: drop-in layers whose weights may be low-precision numbers."""

from quantshard.modules.context import autocast, quantized_model_init
from quantshard.modules.linear import Linear

__all__ = ["Linear", "autocast", "quantized_model_init"]
