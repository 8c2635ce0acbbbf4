"""Weights of a converted model on the meta device, each filled when its values have been read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantshard.errors import CheckpointError
from quantshard.formats import Orientation
from quantshard.interop.conversion.linear import ConvertedLinear, is_packed, unpack
from quantshard.interop.layouts import conversion, table
from quantshard.interop.layouts.conversion import InexactConversionError
from quantshard.interop.layouts.table import EXACT, Layout
from quantshard.tensor import component_loading, components, moves, requantize
from quantshard.tensor.storage import QuantizedStorage


@dataclass(frozen=True)
class WeightToFill:
    """The weight of a linear layer, or a stack of experts. `leaf`: its name in the module. `name`: in the model."""

    module: Any
    leaf: str
    name: str

    @property
    def param(self) -> Tensor:
        return getattr(self.module, self.leaf)

    @property
    def storage(self) -> QuantizedStorage:
        return components.storage_of(self.param)

    @property
    def awaits_values(self) -> bool:
        is_left = components.quantized_local(self.param) is None or self.param.is_meta
        return is_left or (isinstance(self.module, ConvertedLinear) and self.module.awaits_values)

    def own_keys(self) -> Iterator[str]:
        """Yield the keys of the weight, its scales and histories, which high-precision files do not have."""
        if components.quantized_local(self.param) is not None:
            yield from (self.name + suffix for suffix in components.suffixes(self.param))
        prefix = self.name.removesuffix(self.leaf)
        yield from (prefix + name for name, _ in self.module.named_buffers(recurse=False))

    def fill(self, value: Tensor, keep: bool) -> None:
        """Fill with values, or with a packed weight. `keep`: keep values on the CPU for an optimizer's masters."""
        param = self.param
        if is_packed(value):
            entries = unpack(param, value, self.name)
            self._leave_meta(value.device)
            return component_loading.load_components(self.param, entries, self.name)
        if not value.is_floating_point() or value.shape != param.shape or value.element_size() < 2:
            raise CheckpointError(f"the files have {value.dtype} {list(value.shape)}, not {list(param.shape)}")
        if value.dtype != param.dtype:
            self.module.to(value.dtype)  # transformers keeps some modules in float32
        if isinstance(self.module, ConvertedLinear):
            return self.module.take_values(value, self.name, keep)
        self._leave_meta(value.device)
        matrix = value.detach().flatten(0, -2)
        requantize.requantize_([(self.param, matrix)], names=[self.name])
        if keep:
            self.storage.keep_initial_values(matrix.cpu().clone())

    def _leave_meta(self, device: torch.device) -> None:
        if isinstance(self.module, ConvertedLinear):
            self.module.leave_meta(device)
        elif self.param.is_meta:
            self.module._awaits_values = False
            moves.move_parameter(self.param, lambda stack: torch.empty_like(stack, device=device))

    def take_layout(self, layout: Layout, parts: Mapping[str, Tensor], noted: str | None) -> None:
        """Fill with tensors of a layout, by the name that replaces "weight". `noted`: the amax in our exports."""
        rows, cols = self.param.shape
        expected = conversion.shapes(layout, rows, cols)
        for key, (_, shape) in expected.items():
            if key not in parts or parts[key].numel() != torch.Size(shape).numel():
                actual = "missing" if key not in parts else list(parts[key].shape)
                raise CheckpointError(f"{key} is {actual}; a {layout.name} weight [{rows}, {cols}] has {list(shape)}")
        second = None
        if layout.second is not None:
            fmt = self.storage.spec.format
            second = conversion.amax_of(parts[layout.second.key], fmt, layout.second.divides, noted)
        self.take_rows(layout, parts[layout.codes_key], scales_by_row(layout, parts[layout.scale_key], rows), second)

    def take_rows(self, layout: Layout, codes: Tensor, scales: Tensor, amaxes: Tensor | None) -> None:
        """Fill with codes of a layout. `scales`: a row for each row of codes. `amaxes`: one for each matrix."""
        spec = self.storage.spec
        verdict = table.import_verdict(spec.of_matrix, layout)
        if verdict.kind != EXACT:
            raise CheckpointError(f"it cannot be copied into {spec}: {verdict.why}; {table.advice(layout)}")
        self._leave_meta(codes.device)
        shard = self.storage.shard
        try:
            resident = shard.resident(spec.format.copies[Orientation.ROWWISE].scale)
            grid = conversion.our_grid(scales, layout, spec.format, resident, shard.global_shape[1])
        except InexactConversionError as error:
            raise CheckpointError(f"it cannot be copied into {spec}: {error}; {table.advice(layout)}") from None
        conversion.write_copy(self.param, codes.view(torch.uint8), grid, amaxes)


def scales_by_row(layout: Layout, scale: Tensor, rows: int) -> Tensor:
    """Return the stored scales of each row of an external weight, [rows, blocks along columns]."""
    scales = conversion.stored_scale(layout, scale)
    return scales[torch.arange(rows, device=scales.device) // min(layout.block[0], max(rows, 1))]
