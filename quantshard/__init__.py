"""quantshard: train PyTorch models whose weights are low-precision numbers, sharded, and resume them bit for bit."""

from quantshard import errors, recipe
from quantshard import ops as _ops  # fills the table of ATen rules
from quantshard.amax import requantize_
from quantshard.modules import Linear, autocast, quantized_model_init
from quantshard.tensor import QuantizedTensor

__all__ = ["Linear", "QuantizedTensor", "autocast", "errors", "quantized_model_init", "recipe", "requantize_"]

del _ops
