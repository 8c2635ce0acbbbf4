"""Import a model's weights from safetensors of any layout. Each rank reads only the slices of its shards.

Codes and scales are copied bit for bit if the layout's blocks and encodings match. Values in high precision are
quantized. Quantized values that do not fit raise an error or, with `lossy`, are dequantized and requantized in batches.
Nothing is unpickled.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from quantshard import numerics, private_torch
from quantshard.checkpoints.conversions import in_batches
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.store import expect_transfer, local
from quantshard.errors import CheckpointError
from quantshard.formats import Orientation
from quantshard.interop.layouts import conversion, files, table
from quantshard.interop.layouts.conversion import InexactConversionError, RowRun
from quantshard.interop.layouts.files import CONFIGURATION, SafetensorsFiles, files_center_gamma, heads_of, is_tied
from quantshard.interop.layouts.names import IDENTITY, Names, default_names, matrix_shape, names_in_files
from quantshard.interop.layouts.table import EXACT, Layout, SecondScale
from quantshard.interop.layouts.writing import EMBEDDING, HEAD, NOTED_AMAX
from quantshard.optimizers import averaging
from quantshard.sharding import ceil_div
from quantshard.tensor import components, requantize
from quantshard.tensor.storage import QuantizedStorage

BATCH_BYTES: Final = 2**28
"""Size in float32 of the weights that all ranks quantize together. A batch has at least one weight."""

_SKIPPED: Final = ("rotary_emb.inv_freq", "input_scale", "input_global_scale", "k_scale", "v_scale")
"""Suffixes of tensors that are ignored: rotary embedding tables, and scales of activations and the KV cache."""


@dataclass
class Import:
    """The result of an import, by our names.

    `copied`: tensors copied bit for bit, as codes and scales or as values. `quantized`: weights quantized from high
    precision. `requantized`: name -> reason why codes could not be copied. `rounded`: float32 values rounded to a
    narrower parameter dtype, or values of gamma - 1 that have more bits than a parameter with `zero_centered_gamma`.
    """

    path: Path
    layout: Layout | None
    copied: list[str] = field(default_factory=list)
    quantized: list[str] = field(default_factory=list)
    requantized: dict[str, str] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Format the report, one string per line."""
        lines = [
            f"{self.path}: {self.layout.name if self.layout else 'high precision'}; {len(self.copied)} tensors copied "
            f"bit for bit, {len(self.quantized)} weights quantized, {len(self.requantized)} requantized"
        ]
        lines += table.lossy_lines(self.requantized)
        if self.rounded:
            lines.append(f"rounded {len(self.rounded)} tensors to the parameters' dtype (first: {self.rounded[0]})")
        return lines


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    names: Names | None = None,
    config: Mapping[str, Any] | None = None,
    lossy: bool = False,
) -> Import:
    """Load weights of any layout, or in high precision, into a model. A collective call on all processes.

    Build the optimizer afterwards: its masters start from the file's values if these are in high precision. Trainable
    weights keep these values on the CPU until the first step.

    Args:
        path: a folder of safetensors with config.json, which specifies the layout; see `LAYOUTS`.
        model: an unsharded or sharded model (FSDP2, tensor parallelism), not on the meta device.
        names: map from our names to the external names. Default: as in `export`.
        config: configuration to use instead of config.json.
        lossy: requantize weights that cannot be copied.
    """
    components.check_offsets(model.named_parameters())
    averaging.reshard(model)
    loader = agreement.run_on_all_ranks(lambda: _LayoutLoader(local(path, "safetensors files"), model, names, config))
    loader.judge(lossy)
    with agreement.writing_into("the model"):
        loader.write()
    return loader.report


@dataclass
class _ParameterSlices:
    """A parameter or buffer, its rows in the files (external name -> runs), and its layout; None: high precision."""

    name: str
    param: Tensor
    pieces: dict[str, list[RowRun]]
    layout: Layout | None
    grid: Tensor | None = None
    amax: Tensor | None = None

    @property
    def storage(self) -> QuantizedStorage | None:
        return components.quantized_storage(self.param)

    def extents(self) -> list[tuple[int, int]]:
        if self.storage is not None:
            return list(self.storage.shard.extents)
        first, local = private_torch.global_offset(self.param), private_torch.local_tensor(self.param)
        return [(start, start + size) for start, size in zip(first, local.shape, strict=True)]

    def runs(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield our rows start...stop - 1 in order, as (external name, first external row, count)."""
        all_runs = sorted((run.ours, name, run) for name, runs in self.pieces.items() for run in runs)
        for first, name, run in all_runs:
            low, high = max(start, first), min(stop, first + run.length)
            if low < high:
                yield name, run.theirs + low - first, high - low


class _LayoutLoader:
    """Locates each parameter in the headers of the files, alike on all ranks, then reads and writes them."""

    def __init__(self, path: Path, model: nn.Module, names: Names | None, config: Mapping[str, Any] | None) -> None:
        has_config = config is not None
        # a broken link counts as existing, so that reading it raises
        has_file = os.path.lexists(path / CONFIGURATION)
        self.config = dict(config or {}) if has_config or not has_file else files.read_layout_json(path / CONFIGURATION)
        self.tied = is_tied(self.config)
        self.files = SafetensorsFiles(path)
        self.layout = table.detect(self.config.get("quantization_config"), self.files.tensors, str(path))
        self.report = Import(path, self.layout)
        self.zero_centered = set() if files_center_gamma(self.config) else set(components.zero_centered_gammas(model))
        self.taken: set[str] = set()
        params = dict(model.named_parameters())
        name_map = names or _names(model, params)
        self.items = [self._item(name, param, name_map) for name, param in params.items()]
        for name, buffer in model.named_buffers():
            # such as the biases of a router; scales of quantized weights have been taken
            if name in self.files and name not in self.taken and buffer.is_floating_point() and buffer.ndim:
                self.items.append(self._item(name, buffer, IDENTITY))
        unknown = sorted(n for n in self.files.tensors if n not in self.taken and not n.endswith(_SKIPPED))
        if self.tied:
            unknown = [name for name in unknown if name != f"{HEAD}.weight"]
        if unknown:
            problem = f"the model lacks {len(unknown)} tensors (first: {unknown[0]})"
            raise CheckpointError(f"{path}: {problem}; pass names= (--names)")

    def _item(self, name: str, param: Tensor, names: Names) -> _ParameterSlices:
        if param.is_meta:
            raise CheckpointError(f"{name} is on the meta device; call reset_parameters() on the modules first")
        pieces = names.theirs(name, _matrix(param)[0], heads_of(self.config))
        if not pieces:
            raise CheckpointError(f"{self.report.path}: {name} has no external name; pass a map (--names)")
        if self.tied and f"{HEAD}.weight" in pieces and f"{HEAD}.weight" not in self.files:
            pieces = {EMBEDDING: pieces[f"{HEAD}.weight"]}
        kinds = {self._check(name, param, theirs, runs) for theirs, runs in pieces.items()}
        if len(kinds) != 1:
            raise CheckpointError(f"{self.report.path}: only some parts of {name} are quantized")
        return _ParameterSlices(name, param, pieces, self.layout if kinds.pop() else None)

    def _check(self, ours: str, param: Tensor, theirs: str, runs: list[RowRun]) -> bool:
        """Check that the tensors of an external weight match the layout. Returns whether it is quantized."""
        rows, layout = sum(run.length for run in runs), self.layout
        expected: dict[str, tuple[Any, tuple[int, ...]]] = {theirs: (None, (rows, *_matrix(param)[1:]))}
        stem = theirs.removesuffix("weight")
        is_quantized = layout is not None and theirs != stem and stem + layout.scale_key in self.files
        if is_quantized and layout is not None:
            expected = {stem + k: v for k, v in conversion.shapes(layout, rows, _matrix(param)[1]).items()}
        for key, (dtype, shape) in expected.items():
            if key not in self.files:
                raise CheckpointError(f"{self.report.path} has no {key}" + (f" ({ours})" if key != ours else ""))
            dtype_, size = self.files.tensors[key]
            # some programs write scales in half precision
            is_half_scale = dtype == torch.float32 and dtype_ in (torch.bfloat16, torch.float16)
            is_value = dtype is None and dtype_.is_floating_point and dtype_.itemsize > 1  # float8 would need scales
            is_scale = dtype is not None and layout is not None and key != stem + layout.codes_key
            shape_matches = size == shape or (is_scale and _flat(size) == _flat(shape))
            if not shape_matches or not (dtype_ == dtype or is_half_scale or is_value):
                actual = f"{str(dtype_).removeprefix('torch.')} {list(size)}"
                expected_text = f"{str(dtype or 'high precision').removeprefix('torch.')} {list(shape)}"
                raise CheckpointError(f"{self.report.path}: {key} is {actual}, but {ours} must be {expected_text}")
        self.taken |= expected.keys()
        return is_quantized

    def judge(self, lossy: bool) -> None:
        """Determine which weights cannot be copied, from the scales of the local shards; all ranks agree."""
        reasons = agreement.run_on_all_ranks(lambda: {item.name: self._why_not(item) for item in self.items})
        self.report.requantized = _united({name: why for name, why in reasons.items() if why is not None})
        if self.report.requantized and not lossy:
            name, why = next(iter(self.report.requantized.items()))
            problem = f"{len(self.report.requantized)} weights cannot be copied (first: {name}): {why}"
            remedy = f"{table.advice(self.layout)}, or pass lossy=True (--lossy)"
            raise CheckpointError(f"{self.report.path}: {problem}; {remedy}")

    def _why_not(self, item: _ParameterSlices) -> str | None:
        layout, storage = item.layout, item.storage
        if layout is None:
            return None
        verdict = table.import_verdict(None if storage is None else storage.spec.of_matrix, layout)
        if storage is None or verdict.kind != EXACT:
            return verdict.why
        fmt = storage.spec.format
        scale = fmt.copies[Orientation.ROWWISE].scale
        extents = storage.shard.resident(scale)
        rows, cols = storage.shard.global_shape
        start, stop = (min(entry * scale.block_shape[0], rows) for entry in extents[0])  # block_shape can be ALL
        try:
            grid = conversion.our_grid(self._scales(item, layout, start, stop), layout, fmt, extents, cols)
            item.amax = None if layout.second is None else self._amax(item, layout.second, storage)
            item.grid = grid
        except InexactConversionError as error:
            return str(error)
        return None

    def _scales(self, item: _ParameterSlices, layout: Layout, start: int, stop: int) -> Tensor:
        """Read the scales of our rows start...stop - 1, as stored: [rows, external blocks per row]."""
        scales, height = [], layout.block[0]
        for name, first, length in item.runs(start, stop):
            key = name.removesuffix("weight") + layout.scale_key
            low, high = first // height, ceil_div(first + length, height)
            # a scale of shape [] has no rows to slice
            entries = self.files.read(key, slice(low, high)) if self.files.tensors[key][1] else self.files.read(key)
            grid = conversion.stored_scale(layout, entries)
            scales.append(grid[torch.arange(first, first + length, device="cpu") // height - low])
        if scales:
            return torch.cat(scales)
        cols = item.param.shape[-1]
        blocks = ceil_div(cols, min(layout.block[1], max(cols, 1)))
        return torch.empty(0, blocks, dtype=layout.scale.storage, device="cpu")

    def _amax(self, item: _ParameterSlices, second: SecondScale, storage: QuantizedStorage) -> Tensor:
        fmt = storage.spec.format
        amax = fmt.copies[Orientation.ROWWISE].amax
        assert amax is not None
        amaxes: dict[int, Tensor] = {}
        for name, runs in item.pieces.items():
            recorded = self.files.metadata.get(NOTED_AMAX + name)
            scale = self.files.read(name.removesuffix("weight") + second.key)
            value = conversion.amax_of(scale, fmt, second.divides, recorded)
            for matrix in {run.ours // amax.block_shape[0] for run in runs}:
                if not torch.equal(amaxes.setdefault(matrix, value), value):
                    raise InexactConversionError("its parts have different second scales")
        (first, last), _ = storage.shard.resident(amax)
        empty = torch.empty(0, 1, dtype=torch.float32, device="cpu")
        return torch.cat([empty, *(amaxes[matrix] for matrix in range(first, last))])

    def write(self) -> None:
        """Copy weights, then quantize the others in batches. A collective call."""
        expect_transfer(self.files.nbytes())
        remaining = agreement.run_on_all_ranks(self._copy_what_may_be)
        # numel of a DTensor is global, so all ranks form the same batches
        for batch in in_batches(remaining, lambda item: 4 * item.param.numel(), BATCH_BYTES):
            self._quantize(batch)

    def _copy_what_may_be(self) -> list[_ParameterSlices]:
        remaining = []
        for item in self.items:
            storage = item.storage
            if storage is None:
                self._fill(item)
            elif item.layout is None or item.grid is None or item.name in self.report.requantized:
                remaining.append(item)
            else:
                rows, cols = storage.shard.resident(storage.spec.format.copies[Orientation.ROWWISE].codes)
                codes = self._rows(item, item.layout.codes_key, rows, cols, torch.uint8)
                conversion.write_copy(item.param, codes, item.grid, item.amax)
                self.report.copied.append(item.name)
        return remaining

    def _rows(
        self,
        item: _ParameterSlices,
        key: str,
        rows: tuple[int, int],
        cols: tuple[int, int] | None,
        viewed: torch.dtype | None,
    ) -> Tensor:
        """Read a rectangle of our weight from the external tensors `key`. `cols`: columns in entries of the file."""
        across = () if cols is None else (slice(*cols),)
        parts = []
        for name, first, length in item.runs(*rows):
            tensor_name = name if key == "weight" else name.removesuffix("weight") + key
            part = self.files.read(tensor_name, slice(first, first + length), *across)
            parts.append(part if viewed is None else part.view(viewed))
        if parts:
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        shape = (0,) if cols is None else (0, cols[1] - cols[0])
        return torch.empty(shape, dtype=viewed or torch.float32, device="cpu")

    def _values(self, item: _ParameterSlices) -> Tensor:
        """Return the local shard's values: float32 if stored quantized, otherwise in the stored dtype."""
        extents, layout = item.extents(), item.layout
        if layout is None:
            return self._rows(item, "weight", extents[0], extents[1] if len(extents) > 1 else None, None)
        assert layout.element is not None
        (r0, r1), (c0, c1) = extents
        codes_per_byte = 8 // layout.element.bits
        # a shard can begin or end inside a byte of two codes: read whole bytes and drop the extra codes
        whole = c0 // codes_per_byte, ceil_div(c1, codes_per_byte)
        codes = self._rows(item, layout.codes_key, (r0, r1), whole, torch.uint8)
        first = c0 % codes_per_byte
        numbers = numerics.unpack(codes, layout.element, first + c1 - c0)[:, first:]
        scale = numerics.decode(self._scales(item, layout, r0, r1), layout.scale)
        second = layout.second
        if second is not None and r1 > r0:
            # q, k and v form one weight in this model, but each has its own second scale
            row_scales = [
                self.files.read(name.removesuffix("weight") + second.key).reshape(1).expand(length)
                for name, _, length in item.runs(r0, r1)
            ]
            factor = torch.cat(row_scales)[:, None]
            scale = scale / factor if second.divides else scale * factor
        block_of_column = torch.arange(c0, c1, device="cpu") // layout.block[1]
        return numerics.decode(numbers, layout.element) * scale[:, block_of_column]

    def _finite_values(self, item: _ParameterSlices) -> Tensor:
        values = self._values(item)
        if problem := requantize.non_finite(values, components.storage_of(item.param).shard.origin):
            raise CheckpointError(f"{self.report.path}: {item.name}: {problem}")
        return values

    def _fill(self, item: _ParameterSlices) -> None:
        values, local = self._values(item), private_torch.local_tensor(item.param)
        is_rounded = values.dtype.itemsize > local.dtype.itemsize
        if components.canonical_name(item.name) in self.zero_centered:
            values = values.double() - 1
            is_rounded = not torch.equal(values.to(local.dtype).double(), values)
        if item.name not in self.report.requantized:
            (self.report.rounded if is_rounded else self.report.copied).append(item.name)
        local.copy_(values.reshape(local.shape))

    def _quantize(self, batch: Sequence[_ParameterSlices]) -> None:
        values = agreement.run_on_all_ranks(lambda: [self._finite_values(item) for item in batch])
        initial_values: list[tuple[QuantizedStorage, Tensor]] = []
        for item, value in zip(batch, values, strict=True):
            storage = components.storage_of(item.param)
            if item.param.requires_grad and item.layout is None:
                initial_values.append((storage, value.to("cpu", copy=True)))
            if item.name not in self.report.requantized:
                self.report.quantized.append(item.name)
        pairs = zip(batch, values, strict=True)
        # `_finite_values` checked the values; requantize_ drops stored initial values, so store the file's afterwards
        requantize.requantize_([(item.param, value.to(item.param.device)) for item, value in pairs], assume_finite=True)
        for storage, value in initial_values:
            storage.keep_initial_values(value)


def _names(model: nn.Module, params: Mapping[str, nn.Parameter]) -> Names:
    """Choose the map of names: the default one; for a converted mixture, the names that transformers saves."""
    stacks = {n for n, param in params.items() if param.ndim == 3 and components.quantized_local(param) is not None}
    if not stacks:
        return default_names(params)
    names = names_in_files(model, {name: tuple(param.shape) for name, param in params.items()})
    for name, param in params.items():
        is_split = any(not theirs.endswith(name.rpartition(".")[2]) for theirs in names.files[name])
        if param.ndim == 3 and is_split != (name in stacks):
            raise CheckpointError(f"{name}: these experts cannot be loaded; use from_pretrained")
    return names


def _matrix(param: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter; a quantized stack of experts counts as one matrix."""
    shape = tuple(param.shape)
    return shape if components.quantized_local(param) is None else matrix_shape(shape)


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strip trailing dims of size 1: programs store a scalar scale as [] or [1, 1], and row scales as [N] or [N, 1]."""
    return _flat(shape[:-1]) if shape and shape[-1] == 1 else shape


def _united(found: dict[str, str]) -> dict[str, str]:
    """Merge the reasons of all ranks in an order common to all. For each weight, the lowest rank's reason wins."""
    return {name: why for reasons in reversed(agreement.all_gather_object(found)) for name, why in reasons.items()}
