"""TransformerEngine's `pytorch.tensor`, with one class for all formats."""

from quantshard.tensor.quantized_tensor import QuantizedTensor

__all__ = ["QuantizedTensor"]
