"""The storage that FSDP2's padding of a shard passes through, without building the padding."""

from __future__ import annotations

import torch

from quantshard.tensor.storage import QuantizedStorage


class Placeholder(QuantizedStorage):
    """A storage without components until a quantized tensor is copied into it: the result of `new_zeros`.

    `fully_shard` pads a chunk of the weight by `new_zeros`, `copy_` into a narrow of the zeros, and another narrow,
    which becomes the sharded parameter. The padding is never built.
    """

    def __init__(self, parent: QuantizedStorage, device: torch.device) -> None:
        super().__init__(parent.spec, parent.shard, {}, parent.state)
        self.parent = parent
        self.target = device

    @property
    def device(self) -> torch.device:
        return self.target

    def to(self, device: torch.device | None, *, non_blocking: bool = False) -> Placeholder:
        """A placeholder on another device, for CPU offload of a rank without rows."""
        return Placeholder(self.parent, self.target if device is None else torch.device(device))

    def fill(self, source: QuantizedStorage) -> None:
        """Become a real storage: the source itself if the placeholder was made from it, otherwise a copy."""
        # fully_shard pads a chunk, which is a view of the whole weight: a copy lets the whole be freed. At the first
        # forward and after loads reset_sharded_param pads the shard, whose tensors optimizers and state dicts have.
        filled = source if source is self.parent else source.map(lambda part: part.to(self.target, copy=True))
        if filled is not source and filled.high_precision is not None:
            filled.high_precision = filled.high_precision.clone()  # not a view of the whole
        self.__class__ = QuantizedStorage  # type: ignore[assignment]  # so that existing handles see it
        del self.parent, self.target
        self.take(filled)
