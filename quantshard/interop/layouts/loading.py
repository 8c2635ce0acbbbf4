"""Import: a model's weights from safetensors of any layout, each rank reading the slices that it holds.

Codes and scales are copied bit for bit where the grids agree. Values in high precision are quantized, which is what
they are loaded for; quantized ones that do not fit are refused, or, with `lossy`, dequantized and quantized anew, a few
weights at a time. Nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from quantshard import numerics, private_torch
from quantshard.argument_kinds import MODULE, PATH, check_kinds, suggests_names
from quantshard.checkpoints.disk import agreement, transfer
from quantshard.checkpoints.disk.store import local
from quantshard.checkpoints.partial_load import covers_buffers, loading
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.formats import Orientation, Role
from quantshard.interop.layouts import conversion, files, table
from quantshard.interop.layouts.conversion import InexactConversionError, RowRun
from quantshard.interop.layouts.files import SafetensorsFiles
from quantshard.interop.layouts.names import Names, default_names
from quantshard.interop.layouts.table import EXACT, Layout
from quantshard.interop.layouts.writing import CONFIGURATION, HEAD, NOTED_AMAX, files_center_gamma, heads_of, is_tied
from quantshard.recipe import resolve
from quantshard.sharding import ceil_div
from quantshard.tensor import components, requantize, state_keys
from quantshard.tensor.storage import QuantizedStorage

BATCH_BYTES: Final = 2**28
"""Float32 values that are quantized together, on all ranks: as many weights as fit, or one larger one."""

_SKIPPED: Final = ("rotary_emb.inv_freq", "input_scale", "input_global_scale", "k_scale", "v_scale")
"""Endings of the names of tensors that are no part of a weight: tables of rotary embeddings, scales of activations and
of the KV cache. A load passes over them."""


@dataclass
class Import:
    """What an import did, by our names.

    `copied`: codes and scales bit for bit, or values as they were. `quantized`: from high precision. `requantized`:
    name -> why codes could not be copied. `rounded`: float32 values in a parameter of fewer bits, or gamma - 1 that has
    more bits than a parameter with `zero_centered_gamma`.
    """

    path: Path
    layout: Layout | None
    copied: list[str] = field(default_factory=list)
    quantized: list[str] = field(default_factory=list)
    requantized: dict[str, str] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """A report."""
        found = [
            f"{self.path}: {self.layout.name if self.layout else 'high precision'}; {len(self.copied)} tensors copied "
            f"bit for bit, {len(self.quantized)} weights quantized, {len(self.requantized)} requantized"
        ]
        found += table.lossy_lines(self.requantized)
        if self.rounded:
            found.append(f"rounded {len(self.rounded)} tensors to the parameters' dtype (first: {self.rounded[0]})")
        return found


@suggests_names
@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    names: Names | None = None,
    config: Mapping[str, Any] | None = None,
    lossy: bool = False,
) -> Import:
    """Load weights of any layout, or in high precision, into a model. A collective call of all processes.

    Build the optimizer afterwards: its masters start from the file's values where these are in high precision.
    Trainable weights keep them on the CPU until the first step.

    Args:
        path: a folder of safetensors with config.json, which says the layout; see `LAYOUTS`.
        model: whole or sharded (FSDP2, tensor parallelism), not on the meta device.
        names: our names -> theirs. Default: as for an export.
        config: instead of config.json.
        lossy: quantize anew what cannot be copied.

    Raises:
        CheckpointError: a file is damaged or missing, a tensor is missing, unknown or of another shape, or cannot be
            copied, or what is to be quantized is infinite or NaN; on every rank, if so on one. Nothing was written,
            unless it is that, or a file cannot be read any more.
        ConfigurationError: the pieces of a parameter are not where their offsets say.
    """
    agreement.alike(lambda: check_kinds("load", path=(PATH, path), model=(MODULE, model)))
    components.check_offsets(model.named_parameters())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # else a forward without backward may have left the gathered copies in place
    with loading(f"the load of {path}", model) as load:
        loader = agreement.alike(lambda: _filled(_LayoutLoader(local(path, "safetensors files"), model, names, config)))
        loader.judge(lossy)
        load.writes = True
        loader.write()
        # it wrote all parameters; what an earlier, failed load may have left in buffers it has not, as files have none
        load.mends = not load.is_mixed or covers_buffers(model)
    return loader.report


def check(path: str | os.PathLike[str], model: nn.Module, *, names: Names | None = None) -> None:
    """See that the files have the weights of a model, which may be on the meta device; only headers are read.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape.
        ConfigurationError: the layout of the files is not that of the model's recipe.
    """
    loader = _LayoutLoader(local(path, "safetensors files"), model, names, None)
    for item in loader.items:
        if item.is_stored_quantized and loader.layout is not None:
            found = table.import_verdict(None if item.storage is None else item.storage.cell, loader.layout)
            if item.storage is None or found.kind != EXACT:
                raise ConfigurationError(
                    f"{path}: {item.name} cannot be copied: {found.why}; take a recipe of the same codes and blocks, "
                    "or import it first, with --lossy"
                )


def _filled(loader: _LayoutLoader) -> _LayoutLoader:
    for item in loader.items:
        if item.param.is_meta:
            raise CheckpointError(f"{item.name} is on the meta device; call reset_parameters() on the modules first")
    return loader


@dataclass
class _ParameterSlices:
    """A parameter and where its rows are: their name -> runs of rows."""

    name: str
    param: nn.Parameter
    pieces: dict[str, list[RowRun]]
    is_stored_quantized: bool
    grid: Tensor | None = None
    amax: Tensor | None = None

    @property
    def storage(self) -> QuantizedStorage | None:
        quantized = components.quantized_local(self.param)
        return None if quantized is None else quantized.quantized_storage

    def extents(self) -> list[tuple[int, int]]:
        """The local part, along each dim."""
        if self.storage is not None:
            return list(self.storage.shard.extents)
        first, local = private_torch.global_offset(self.param), private_torch.local_tensor(self.param)
        return [(start, start + size) for start, size in zip(first, local.shape, strict=True)]

    def runs(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Our rows start...stop - 1 in order, as (their name, their first row, how many)."""
        every = sorted((run.ours, name, run) for name, runs in self.pieces.items() for run in runs)
        for first, name, run in every:
            low, high = max(start, first), min(stop, first + run.length)
            if low < high:
                yield name, run.theirs + low - first, high - low


class _LayoutLoader:
    """Finds in the headers of the files where each parameter comes from, alike on all ranks; then reads and writes."""

    def __init__(self, path: Path, model: nn.Module, names: Names | None, config: Mapping[str, Any] | None) -> None:
        given = config is not None
        has_file = os.path.lexists(path / CONFIGURATION)  # a broken link too: it is refused, and no missing file
        self.config = dict(config or {}) if given or not has_file else files.read_layout_json(path / CONFIGURATION)
        self.tied = is_tied(self.config)
        self.files = SafetensorsFiles(path)
        self.layout = table.detect(self.config.get("quantization_config"), self.files.names(), str(path))
        self.report = Import(path, self.layout)
        self.zero_centered = set() if files_center_gamma(self.config) else set(state_keys.zero_centered_gammas(model))
        self.taken: set[str] = set()
        named = dict(model.named_parameters())
        chosen = names or default_names(named)
        self.items = [self._item(name, param, chosen) for name, param in named.items()]
        unknown = sorted(n for n in self.files.names() if n not in self.taken and not n.endswith(_SKIPPED))
        if self.tied:
            unknown = [name for name in unknown if name != f"{HEAD}.weight"]
        if unknown:
            raise CheckpointError(
                f"{path} has {len(unknown)} tensors that this model lacks (first: {unknown[0]}); build the model that "
                "it is of, or give another map of names"
            )

    def _item(self, name: str, param: nn.Parameter, names: Names) -> _ParameterSlices:
        pieces = names.theirs(name, param.shape[0], heads_of(self.config))
        if not pieces:
            raise CheckpointError(f"{name} has no name in {self.report.path}; give a map of names (--names)")
        pieces = {self._tied(theirs): runs for theirs, runs in pieces.items()}
        kinds = {self._check(name, param, theirs, runs) for theirs, runs in pieces.items()}
        if len(kinds) != 1:
            raise CheckpointError(f"{self.report.path}: of the parts of {name} some are quantized and some are not")
        return _ParameterSlices(name, param, pieces, kinds.pop())

    def _tied(self, name: str) -> str:
        tied = name == f"{HEAD}.weight" and name not in self.files and self.tied
        return "model.embed_tokens.weight" if tied else name

    def _check(self, ours: str, param: nn.Parameter, theirs: str, runs: list[RowRun]) -> bool:
        """Check that the tensors of a weight of theirs are as the layout says. Returns whether it is quantized."""
        rows, layout = sum(run.length for run in runs), self.layout
        wanted: dict[str, tuple[Any, tuple[int, ...]]] = {theirs: (None, (rows, *param.shape[1:]))}
        stem = theirs.removesuffix("weight")
        is_quantized = layout is not None and theirs != stem and stem + layout.scale_key in self.files
        if is_quantized and layout is not None:
            wanted = {stem + k: v for k, v in conversion.shapes(layout, rows, param.shape[1]).items()}
        for key, (dtype, shape) in wanted.items():
            if key not in self.files:
                what = "which this model has" if key == ours else f"which is {ours} of this model"
                raise CheckpointError(f"{self.report.path} lacks {key}, {what}")
            held, found = self.files.tensors[key]
            of_scale = dtype == torch.float32 and held in (torch.bfloat16, torch.float16)  # some write these instead
            is_value = dtype is None and held.is_floating_point and held.itemsize > 1  # float8 has scales
            is_scale = dtype is not None and layout is not None and key != stem + layout.codes_key
            same = found == shape or (is_scale and _flat(found) == _flat(shape))
            if not same or not (held == dtype or of_scale or is_value):
                raise CheckpointError(
                    f"{self.report.path}: {key} is {str(held).removeprefix('torch.')} {list(found)}, but as {ours} of "
                    f"this model it must be {str(dtype or 'high precision').removeprefix('torch.')} {list(shape)}"
                )
        self.taken |= wanted.keys()
        return is_quantized

    # Which are copied ------------------------------------------------------------------------------------------------

    def judge(self, lossy: bool) -> None:
        """Find what cannot be copied, by the scales of the local parts; all ranks get one answer.

        Raises:
            CheckpointError: there is such a weight, and `lossy` is not given.
        """
        reasons = agreement.alike(lambda: {item.name: self._why_not(item) for item in self.items})
        self.report.requantized = _united({name: why for name, why in reasons.items() if why is not None})
        for name, why in list(self.report.requantized.items())[:1]:
            if not lossy:
                raise CheckpointError(
                    f"{self.report.path}: {len(self.report.requantized)} weights cannot be copied (first: {name}): "
                    f"{why}; {self._other_recipe()}allow requantization (lossy=True, or quantshard import --lossy)"
                )

    def _other_recipe(self) -> str:
        """Which recipe would take the codes as they are, where the model is not of it already."""
        own = None if self.layout is None else table.recipe_of(self.layout)
        if own is None:
            return "build the model with a recipe of the same blocks, or "
        cell = resolve(own).weight
        if all(item.storage is None or item.storage.cell == cell for item in self.items):
            return ""
        return f"build the model with recipe {own!r}, whose weights these are, or "

    def _why_not(self, item: _ParameterSlices) -> str | None:
        if not item.is_stored_quantized:
            return None
        assert self.layout is not None
        storage = item.storage
        found = table.import_verdict(None if storage is None else storage.cell, self.layout)
        if storage is None or found.kind != EXACT:
            return found.why
        fmt = storage.cell.format
        scale = fmt.copies[Orientation.ROWWISE].scale
        extents = storage.shard.resident(scale)
        rows, cols = storage.shard.global_shape
        start, stop = (min(entry * scale.block_shape[0], rows) for entry in extents[0])  # covers may be ALL
        try:
            item.grid = conversion.our_grid(self._scales(item, start, stop), self.layout, fmt, extents, cols)
            item.amax = self._amax(item)
        except InexactConversionError as error:
            return str(error)
        return None

    def _scales(self, item: _ParameterSlices, start: int, stop: int) -> Tensor:
        """Their scales of our rows start...stop - 1: [rows, their blocks along a row], in the encoding's storage."""
        assert self.layout is not None
        layout, found = self.layout, []
        height = layout.block[0]
        for name, first, length in item.runs(start, stop):
            key = name.removesuffix("weight") + layout.scale_key
            low, high = first // height, ceil_div(first + length, height)
            # a scale of shape [] has no rows to slice
            read = self.files.read(key, slice(low, high)) if self.files.tensors[key][1] else self.files.read(key)
            grid = conversion.stored_scale(layout, read)
            found.append(grid[torch.arange(first, first + length, device="cpu") // height - low])
        if found:
            return torch.cat(found)
        blocks = ceil_div(item.param.shape[1], min(layout.block[1], max(item.param.shape[1], 1)))
        return torch.empty(0, blocks, dtype=layout.scale.storage, device="cpu")

    def _amax(self, item: _ParameterSlices) -> Tensor | None:
        assert self.layout is not None
        second = self.layout.second
        if second is None:
            return None
        assert item.storage is not None
        found = []
        for name in item.pieces:
            noted = self.files.metadata.get(NOTED_AMAX + name)
            stored = self.files.read(name.removesuffix("weight") + second.key)
            found.append(conversion.amax_of(stored, item.storage.cell.format, second.divides, _float(noted)))
        if not all(torch.equal(one, found[0]) for one in found):
            raise InexactConversionError("its parts have different second scales, and it is one weight here")
        return found[0]

    # Writing ---------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Copy, and quantize in batches; a collective call."""
        transfer.expect(self.files.nbytes())
        batch: list[_ParameterSlices] = []
        for item in agreement.alike(self._copy_what_may_be):
            # numel of a DTensor is that of the whole, so all ranks make the same batches: each is a collective call
            if batch and sum(4 * one.param.numel() for one in (*batch, item)) > BATCH_BYTES:
                self._quantize(batch)
                batch = []
            batch.append(item)
        if batch:
            self._quantize(batch)

    def _copy_what_may_be(self) -> list[_ParameterSlices]:
        """Write all that needs no quantization, and return the rest."""
        anew = []
        for item in self.items:
            storage = item.storage
            if storage is None:
                self._fill(item)
            elif not item.is_stored_quantized or item.name in self.report.requantized:
                anew.append(item)
            else:
                self._copy(item, storage)
        return anew

    def _copy(self, item: _ParameterSlices, storage: QuantizedStorage) -> None:
        assert self.layout is not None
        live = storage.components
        pairs = []
        for component in storage.cell.format.components:
            if component.role is Role.CODES:
                rows, cols = storage.shard.resident(component)
                value = self._rows(item, self.layout.codes_key, rows, cols, torch.uint8)
            else:
                found = item.grid if component.role is Role.SCALE else item.amax
                assert found is not None
                value = found
            pairs.append((live[component.name], value))
        components.write_components(item.param, pairs)
        storage.forget_amaxes()
        self.report.copied.append(item.name)

    def _rows(
        self,
        item: _ParameterSlices,
        key: str,
        rows: tuple[int, int],
        cols: tuple[int, int] | None,
        viewed: torch.dtype | None,
    ) -> Tensor:
        """A rectangle of a weight of ours, read from the tensors `key` of theirs; `cols`: in entries of the file."""
        across = () if cols is None else (slice(*cols),)
        found = []
        for name, first, length in item.runs(*rows):
            whole = name if key == "weight" else name.removesuffix("weight") + key
            part = self.files.read(whole, slice(first, first + length), *across)
            found.append(part if viewed is None else part.view(viewed))
        if found:
            return torch.cat(found) if len(found) > 1 else found[0]
        shape = (0,) if cols is None else (0, cols[1] - cols[0])
        return torch.empty(shape, dtype=viewed or torch.float32, device="cpu")

    def _values(self, item: _ParameterSlices) -> Tensor:
        """The local part's values: float32 of a quantized weight, else as they are stored."""
        extents = item.extents()
        if not item.is_stored_quantized:
            return self._rows(item, "weight", extents[0], extents[1] if len(extents) > 1 else None, None)
        assert self.layout is not None
        assert self.layout.element is not None
        (r0, r1), (c0, c1) = extents
        packed, element = 8 // self.layout.element.bits, self.layout.element
        # a piece may begin or end inside a byte of two codes: whole bytes are read, and the other codes dropped
        codes = self._rows(item, self.layout.codes_key, (r0, r1), (c0 // packed, ceil_div(c1, packed)), torch.uint8)
        numbers = numerics.unpack(codes, element, codes.shape[1] * packed)[:, c0 % packed :][:, : c1 - c0]
        scale = numerics.decode(self._scales(item, r0, r1), self.layout.scale)
        second = self.layout.second
        if second is not None and r1 > r0:  # q, k and v, one weight here, have second scales of their own
            of_rows = [
                self.files.read(name.removesuffix("weight") + second.key).reshape(1).expand(length)
                for name, _, length in item.runs(r0, r1)
            ]
            factor = torch.cat(of_rows)[:, None]
            scale = scale / factor if second.divides else scale * factor
        return numerics.decode(numbers, element) * scale[:, torch.arange(c0, c1, device="cpu") // self.layout.block[1]]

    def _finite_values(self, item: _ParameterSlices) -> Tensor:
        """The local values of a weight that is to be quantized.

        Raises:
            CheckpointError: one is infinite or NaN.
        """
        values = self._values(item)
        told = requantize.non_finite(values, components.storage_of(item.param).shard.origin)
        if told:
            raise CheckpointError(f"{item.name}: {told}; codes saturate, which would hide it")
        return values

    def _fill(self, item: _ParameterSlices) -> None:
        """Write a parameter in high precision, and report whether its values were copied or rounded."""
        values, local = self._values(item), private_torch.local_tensor(item.param)
        is_rounded = values.dtype.itemsize > local.dtype.itemsize
        if components.canonical_name(item.name) in self.zero_centered:
            values = values.double() - 1
            is_rounded = not torch.equal(values.to(local.dtype).double(), values)
        if item.name not in self.report.requantized:
            (self.report.rounded if is_rounded else self.report.copied).append(item.name)
        local.copy_(values.reshape(local.shape))

    def _quantize(self, batch: Sequence[_ParameterSlices]) -> None:
        values = agreement.alike(lambda: [self._finite_values(item) for item in batch])
        kept: list[tuple[QuantizedStorage, Tensor]] = []
        for item, value in zip(batch, values, strict=True):
            storage = components.storage_of(item.param)
            if item.param.requires_grad and not item.is_stored_quantized:
                kept.append((storage, value.to("cpu", copy=True)))
            if item.name not in self.report.requantized:
                self.report.quantized.append(item.name)
        pairs = zip(batch, values, strict=True)
        # judged by `_finite_values`; it drops the initial values that were kept, so those of the file come afterwards
        requantize.requantize_([(item.param, value.to(item.param.device)) for item, value in pairs], assume_finite=True)
        for storage, value in kept:
            storage.keep_initial_values(value)


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its last dims of size 1: programs store one scale as [] or [1, 1], a row's as [N] or [N, 1]."""
    return _flat(shape[:-1]) if shape and shape[-1] == 1 else shape


def _float(noted: str | None) -> float | None:
    # a damaged note is as good as none: `conversion.amax_of` then takes the nearest float32
    try:
        return None if noted is None else float.fromhex(noted)
    except (ValueError, OverflowError):
        return None


def _united(found: dict[str, str]) -> dict[str, str]:
    """What any rank found, in one order on all of them; of several reasons for a weight the lowest rank's."""
    return {name: why for one in reversed(agreement.gathered(found)) for name, why in one.items()}
