"""TransformerEngine's `pytorch.tensor`: one class for all formats, where it has one for each."""

from quantshard.tensor.quantized_tensor import QuantizedTensor

__all__ = ["QuantizedTensor"]
