"""How the inputs of an MLP's activation, the outputs of its first linear layer, are kept for backward.

As they are ("high_precision"), or as E4M3 codes with a float32 scale for each 128 features of a token ("fp8"):

    scale = 1 / 2**e,  2**e the largest power of two that is at most 448 / amax of the block
    code  = x * 2**e to nearest even
    x'    = code * scale                                          what backward reads in place of x
    |x' - x| <= max(2**-4 |x|, 2**-10 / 224 amax of the block)

The first bound is of normal codes, with 3 bits behind the leading one; the second half of the distance of subnormal
ones, for 2**e > 224 / amax. What forward gives has no error of this. Codes saturate, so a flag (poison) is kept with
those of each input: it makes all of x' NaN where any of x was infinite or NaN. In float16 x' may be infinite where
|x| > 63488, and then the step is bad.

Under tensor parallelism each rank keeps the features that it has. Where the cut crosses a block of 128, the ranks that
hold pieces of it agree on its amax, in one collective for each input: so codes are those of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, private_torch, sharding
from quantshard.errors import ConfigurationError
from quantshard.formats import Orientation
from quantshard.gemm import operands
from quantshard.gemm.operands import OperandSplit
from quantshard.kernels import workspace
from quantshard.recipe import QuantSpec
from quantshard.sharding import Shard
from quantshard.state_cells import ACTIVATION_CELLS
from quantshard.tensor.storage import QuantizedStorage

if kernels.USABLE:
    from quantshard.gemm.producers import TensorSource
    from quantshard.kernels.quantize.targets import KernelOutputs, QuantizeRequest, QuantizeSpec

HIGH_PRECISION: Final = "high_precision"
_PARTS = 3  # codes, scales and poison of an input


def check_storage(owner: str, name: object) -> None:
    """Raise unless inputs of activations can be kept so.

    Raises:
        ConfigurationError: naming the argument of `owner`.
    """
    if name not in tuple(ACTIVATION_CELLS):  # it may be of any type
        raise ConfigurationError(f"{owner}(activation_storage={name!r}): use one of: {', '.join(ACTIVATION_CELLS)}")


class ActivationStorage(NamedTuple):
    """One of `STORAGES`. `cell`: how inputs are quantized; None if they are kept as they are. `split`: how features are
    cut over ranks, if they are."""

    name: str
    cell: QuantSpec | None
    split: OperandSplit | None = None

    def for_backward(self, *tensors: Any) -> ActivationStorage:
        """This one if a backward comes that an activation between these tensors, or None, is part of; else nothing is
        quantized."""
        differentiates = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
        return self if differentiates else AS_IS

    def keep(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """What is kept of some inputs [..., features] of one shape and dtype: these, None too; or of each the codes
        uint8 [tokens, features], scales float32 [tokens, features / 128, rounded up] and poison float32 [1, 1].

        A collective call where ranks share blocks.
        """
        if self.cell is None:
            return [*inputs]  # type: ignore[list-item]
        rows = [private_torch.plain(x.detach()).reshape(-1, x.shape[-1]) for x in inputs if x is not None]
        if private_torch.is_traced(*rows):
            assert self.split is None, "tensor parallelism is not compiled"
            found: list[Tensor] = torch.ops.quantshard.store_activation(rows, self.name)
            return found
        return self._quantized(self.cell, rows)

    def values(self, kept: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The inputs as backward reads them: [tokens, features] of `dtype` where codes were kept.

        `kept` is emptied then, as its codes are read.
        """
        if self.cell is None:
            return kept
        if private_torch.is_traced(*kept):
            found: list[Tensor] = torch.ops.quantshard.stored_activation(kept, self.name, dtype)
            return found
        return self._dequantized(self.cell, kept, dtype)

    def empty(self, like: Tensor) -> list[Tensor]:
        """Tensors as `keep` gives of one input [tokens, features], which is like `like`."""
        if self.cell is None:
            return [like]
        copy, (tokens, features) = self.cell.format.copies[Orientation.ROWWISE], like.shape
        blocks = sharding.ceil_div(features, copy.block[1])
        return [
            like.new_empty((tokens, features), dtype=copy.codes.encoding.storage),
            like.new_empty((tokens, blocks), dtype=copy.scale.encoding.storage),
            like.new_empty((1, 1), dtype=torch.float32),
        ]

    def _quantized(self, cell: QuantSpec, rows: Sequence[Tensor]) -> list[Tensor]:
        split = self._across(cell, rows[0].shape[1])
        if split is None and kernel_dispatch.has_float_kernels(*rows):
            return _by_kernels(cell, rows)
        found = []
        for x in rows:
            storage = operands.quantize_operand(x, cell, split=split)
            zero = torch.zeros((1, 1), dtype=torch.float32, device=x.device)
            nan_flag = torch.where(torch.isfinite(x).all(), zero, torch.nan)
            found += [*(storage.components[part.name] for part in cell.format.components), nan_flag]
        return found

    def _dequantized(self, cell: QuantSpec, kept: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        found = []
        while kept:
            *parts, nan_flag = kept[:_PARTS]
            del kept[:_PARTS]
            components = dict(zip((part.name for part in cell.format.components), parts, strict=True))
            storage = QuantizedStorage(cell, self._shard(cell, parts[0]), components)
            found.append(storage.dequantize(Orientation.ROWWISE, dtype, nan_flag))
            del parts, components, storage  # the codes of one go before the values of the next are made
        return found

    def _across(self, cell: QuantSpec, features: int) -> OperandSplit | None:
        """The split, if a block has pieces on several ranks."""
        covered = cell.format.copies[Orientation.ROWWISE].block[1]
        return None if self.split is None or features % covered == 0 else self.split

    def _shard(self, cell: QuantSpec, codes: Tensor) -> Shard:
        shape = (codes.shape[0], codes.shape[1])
        return operands.operand_shard(shape, cell, self._across(cell, shape[1]))


STORAGES: Final = {name: ActivationStorage(name, cell) for name, cell in ACTIVATION_CELLS.items()}
"""By the value of `activation_storage`."""
AS_IS: Final = STORAGES[HIGH_PRECISION]


def _by_kernels(cell: QuantSpec, rows: Sequence[Tensor]) -> list[Tensor]:
    """By one kernel for all that lie alike in memory."""
    if any(x.stride() != rows[0].stride() for x in rows):
        return [part for x in rows for part in _by_kernels(cell, [x])]
    spec = QuantizeSpec(cell.format.copies[Orientation.ROWWISE], cell.scaling)
    asked = [KernelOutputs(QuantizeRequest(spec), nan_flag=workspace.zero(x.device)) for x in rows]
    found: list[Tensor] = []
    for (output, _), each in zip(TensorSource.emit_all(list(map(TensorSource, rows)), asked), asked, strict=True):
        assert output is not None and each.nan_flag is not None
        found += [output.codes, output.scale, each.nan_flag]
    return found


# As operators, of which graphs of torch.compile are made -------------------------------------------------------------

torch.library.define("quantshard::store_activation", "(Tensor[] inputs, str storage) -> Tensor[]")
torch.library.define("quantshard::stored_activation", "(Tensor[] kept, str storage, ScalarType dtype) -> Tensor[]")


@workspace.separate_allocations()
def _store(inputs: list[Tensor], storage: str) -> list[Tensor]:
    return STORAGES[storage].keep(inputs)


def _stored(kept: list[Tensor], storage: str, dtype: torch.dtype) -> list[Tensor]:
    return STORAGES[storage].values(list(kept), dtype)


torch.library.impl("quantshard::store_activation", "default")(_store)
torch.library.impl("quantshard::stored_activation", "default")(_stored)


@torch.library.register_fake("quantshard::store_activation")
def _(inputs: list[Tensor], storage: str) -> list[Tensor]:
    return [part for x in inputs for part in STORAGES[storage].empty(x)]


@torch.library.register_fake("quantshard::stored_activation")
def _(kept: list[Any], storage: str, dtype: torch.dtype) -> list[Tensor]:
    return [codes.new_empty(codes.shape, dtype=dtype) for codes in kept[::_PARTS]]
