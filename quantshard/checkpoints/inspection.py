"""Inspection and verification of one checkpoint: what `quantshard inspect` and `quantshard verify` show."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, BytesStorageMetadata, TensorStorageMetadata

from quantshard import numerics, sharding
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.store import Path_, expect_transfer, report_transfer
from quantshard.checkpoints.rank_states import RANKS
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.checkpoints.saving import EXTRA
from quantshard.errors import CheckpointError
from quantshard.formats import Component, Encoding, Format, Orientation, Role, stacked
from quantshard.recipe_table import format_of_tag
from quantshard.state_storage import stored_state_spec
from quantshard.tensor.components import FORMAT_SUFFIX, FORMAT_TAG_BYTES, read_format_tag
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY

STATE_MARK = ".state."
"""Substring of the key of every optimizer state."""

WEIGHT, STATE, RANK = "weight", "state", "rank state"
RANDOM, HISTORY = "random state", "amax history"
"""Kinds of rows: a model's tensors, an optimizer's states, the states of single ranks, the RNG states of weights, and
amax histories. Rows of the caller's entries have the kind `EXTRA`."""

_PREFIXES = {"optimizer.": STATE, f"{EXTRA}.": EXTRA, f"{RANKS}.": RANK}
_SUFFIXES = {f"_{RNG_KEY}": RANDOM, f"_{RNG_DRAWS}": RANDOM, f"_{AMAX_HISTORY}": HISTORY}

_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class TensorSummary:
    """A row: one tensor.

    `bytes`: size of all its entries. `chunks`: number of pieces that its codes, or values, are stored in. `codes`,
    `zeros`, `saturated`: number of codes, of zero codes, and of codes with the largest magnitude. `scales`: smallest
    and largest scale. These are None without data. `wrong`: problems, as in `verify`.
    """

    name: str
    kind: str
    format: str
    quantized: bool
    shape: tuple[int, ...] | None
    bytes: int
    chunks: int
    codes: int | None = None
    zeros: int | None = None
    saturated: int | None = None
    scales: tuple[float, float] | None = None
    wrong: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape or (0,))


@dataclass(frozen=True)
class FormatTotal:
    """The sum over all tensors of one kind and format, or over all states of one name and format."""

    kind: str
    format: str
    tensors: int
    numel: int
    bytes: int

    @property
    def bytes_per_element(self) -> float:
        """Average size of an element, including scales and state."""
        return self.bytes / self.numel if self.numel else 0.0


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection: rows, keys of entries that are not tensors, and facts of the manifest, if any."""

    path: str
    rows: tuple[TensorSummary, ...]
    others: tuple[str, ...]
    run: dict[str, Any] | None

    @property
    def totals(self) -> tuple[FormatTotal, ...]:
        rows_by_kind: dict[tuple[str, str], list[TensorSummary]] = {}
        for row in self.rows:
            kind = row.name.rpartition(".")[2] if row.kind == STATE else row.kind
            rows_by_kind.setdefault((kind, row.format), []).append(row)
        order = sorted(rows_by_kind.items(), key=lambda item: (item[0][0] != WEIGHT, item[0]))
        return tuple(
            FormatTotal(*key, len(rows), sum(row.numel for row in rows), sum(row.bytes for row in rows))
            for key, rows in order
        )

    def to_json(self) -> str:
        totals = [asdict(total) | {"bytes_per_element": total.bytes_per_element} for total in self.totals]
        rows = [asdict(row) for row in self.rows]
        whole = {"path": self.path, "run": self.run, "rows": rows, "totals": totals, "others": self.others}
        return json.dumps(whole, indent=1)


def inspect_checkpoint(path: Path_, data: bool = True) -> Inspection:
    """Inspect a checkpoint, one chunk at a time, without running code of its files. Not a collective call.

    Without `data`, only metadata and tags are read.
    """
    reader = SafeReader(path)
    rows = tuple(_row(reader, group, data) for group in groups(reader))
    facts = ("step", "mesh", "recipe", "world_size", "torch", "saved_at")
    run = None if reader.manifest is None else {name: getattr(reader.manifest, name) for name in facts}
    return Inspection(str(path), rows, tuple(_object_keys(reader)), run)


def _row(reader: SafeReader, group: TensorGroup, data: bool) -> TensorSummary:
    name, is_quantized = group.name, group.format is not None
    codes = reader.entries[group.parts.get("codes", name)]
    chunks = len(codes.chunks) if isinstance(codes, TensorStorageMetadata) else 0
    more = figures(reader, group) if data and is_quantized else {"wrong": group.wrong}
    kind, size = kind_of(name, reader.entries), group_bytes(reader, group)
    return TensorSummary(name, kind, group.tag, is_quantized, group.shape, size, chunks, **more)


def kind_of(key: str, keys: Container[str]) -> str:
    """The kind of an entry, or of a tensor with several entries. `keys`: all keys of the checkpoint."""
    for prefix, kind in _PREFIXES.items():
        if key.startswith(prefix):
            return kind
    for suffix, kind in _SUFFIXES.items():
        # the amax history of a module's input belongs to no weight
        if key.endswith(suffix) and (kind == HISTORY or key.removesuffix(suffix) in keys):
            return kind
    return STATE if STATE_MARK in key else WEIGHT


def _object_keys(reader: SafeReader) -> list[str]:
    return sorted(key for key, entry in reader.entries.items() if isinstance(entry, BytesStorageMetadata))


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    `checksums`: whether files were compared with the checksums of a manifest. `tensors`: number of tensors; a quantized
    one counts once. `bytes`: size of their values. `problems`: defects, in words.
    """

    path: str
    checksums: bool
    tensors: int
    quantized: int
    others: int
    bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify(path: Path_) -> Verification:
    """Check one checkpoint. Not a collective call. Every byte is read, one chunk at a time.

    With a manifest, the files must be those it names, with their lengths and checksums. In any case:

    - the chunks of each tensor must cover it exactly once and lie in the files;
    - each entry must be readable and match the metadata;
    - each quantized weight must have a known format, all of its components in the right shapes, and finite scales.

    Defects of the checkpoint never raise: they are listed in `problems`.
    """
    problems = manifest.problems(path)
    checksums = manifest.exists(path)
    try:
        reader = SafeReader(path)
        tensors = groups(reader)
    except CheckpointError as error:
        # the manifest's error can be raised again here
        all_problems = problems if str(error) in problems else [*problems, str(error)]
        return Verification(str(path), checksums, 0, 0, 0, 0, tuple(all_problems))
    sizes = [group_bytes(reader, group) for group in tensors]
    expect_transfer(sum(sizes))
    for group, size in zip(tensors, sizes, strict=True):
        try:
            wrong = figures(reader, group)["wrong"]
        except CheckpointError as error:
            wrong = [*group.wrong, str(error)]
        report_transfer(size)
        problems += [line if line.startswith(group.name) else f"{group.name}: {line}" for line in wrong]
    object_keys = _object_keys(reader)
    for key in object_keys:
        try:
            reader.value(key)
        except CheckpointError as error:
            problems.append(str(error))
    counts = len(tensors), sum(group.format is not None for group in tensors), len(object_keys), sum(sizes)
    return Verification(str(path), checksums, *counts, tuple(problems))


@dataclass(frozen=True)
class TensorGroup:
    """The entries of one tensor.

    `tag`: name of its format, or its dtype. `format`: None for a plain tensor. `shape`: None if the components do not
    determine it. `parts`: key of each component by name (`codes` for a plain tensor). `others`: keys of its state and
    tag. `wrong`: problems, in words.
    """

    name: str
    tag: str
    format: Format | None
    shape: tuple[int, ...] | None
    parts: Mapping[str, str]
    others: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


def groups(reader: SafeReader) -> list[TensorGroup]:
    entries = reader.entries
    group_by_name: dict[str, TensorGroup] = {}
    for key, entry in entries.items():
        weight = key.removesuffix(FORMAT_SUFFIX)
        is_tag = key.endswith(FORMAT_SUFFIX) and getattr(entry, "size", None) == (FORMAT_TAG_BYTES,)
        if is_tag and weight in entries:
            group_by_name[weight] = _weight(weight, reader.value(key), entries)
    for key, entry in entries.items():
        if STATE_MARK in key and isinstance(entry, TensorStorageMetadata):
            if (spec := stored_state_spec(key, entry.properties.dtype, entries)) is not None:
                group_by_name[key] = _with_parts(key, spec.tag, spec.format, tuple(entry.size), entries)
    grouped_keys = {key for group in group_by_name.values() for key in (*group.parts.values(), *group.others)}
    for key, entry in entries.items():
        if key not in grouped_keys and isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            group_by_name[key] = TensorGroup(key, dtype, None, tuple(entry.size), {"codes": key})
    return [group_by_name[name] for name in sorted(group_by_name)]


def _weight(name: str, tag: Tensor, entries: Mapping[str, STORAGE_TYPES]) -> TensorGroup:
    state_keys = [f"{name}{FORMAT_SUFFIX}", *(f"{name}_{state}" for state in (RNG_KEY, RNG_DRAWS, AMAX_HISTORY))]
    stored_keys = tuple(key for key in state_keys if isinstance(entries.get(key), TensorStorageMetadata))

    def unknown(description: str, problem: str) -> TensorGroup:
        parts = {"codes": name} if isinstance(entries[name], TensorStorageMetadata) else {}
        return TensorGroup(name, description, None, None, parts, stored_keys, (problem,))

    try:
        text = read_format_tag(tag)
    except CheckpointError as error:
        return unknown(f"version {int(tag[0])}" if tag.dtype == torch.uint8 else str(tag.dtype), str(error))
    fmt, keeps_amaxes = format_of_tag(text)
    if fmt is None:
        return unknown(repr(text)[:40], f"this quantshard does not know its format {text!r:.40}")
    missing = [key for key in state_keys[: 4 if keeps_amaxes else 3] if key not in stored_keys]
    codes = entries[name]
    size = codes.size if isinstance(codes, TensorStorageMetadata) else torch.Size([])
    packed, padding = fmt.by_name["codes"].block_shape[1], int(tag[-1])
    if len(size) not in (2, 3) or padding > min(size[-1], 1) * (packed - 1):
        return unknown(text, f"its codes have the shape {list(size)}, and its format tag has a padding of {padding}")
    shape = (*size[:-1], size[-1] * packed - padding)
    if len(size) == 3:  # a stack of matrices
        if not size[1] or not fmt.fits_stack(size[1]):
            return unknown(text, f"its blocks would cross from one matrix of {list(size)} into the next")
        fmt = stacked(fmt, size[1])
    group, missing_lines = _with_parts(name, text, fmt, shape, entries), [f"{key} is missing" for key in missing]
    return replace(group, others=stored_keys, wrong=(*missing_lines, *group.wrong))


def _with_parts(
    name: str, tag: str, fmt: Format, shape: tuple[int, ...], entries: Mapping[str, STORAGE_TYPES]
) -> TensorGroup:
    parts: dict[str, str] = {}
    lines: list[str] = []
    for component in fmt.components:
        key = name + component.key_suffix
        entry = entries.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            lines.append(f"{key} is missing")
            continue
        parts[component.name] = key
        expected = _stored_shape(shape, component)
        size, dtype = tuple(entry.size), entry.properties.dtype
        if not expected:  # a state: only matrices have blocks with scales
            lines.append(f"{key} is {dtype} {list(size)}, and {tag} has blocks of matrices, which {list(shape)} is not")
        elif size != expected or dtype != component.encoding.storage:
            fitting = f"{component.encoding.storage} {list(expected)} ({tag} {list(shape)})"
            lines.append(f"{key} is {dtype} {list(size)}, not {fitting}")
    return TensorGroup(name, tag, fmt, shape, parts, wrong=tuple(lines))


def _stored_shape(shape: tuple[int, ...], component: Component) -> tuple[int, ...]:
    """The shape of a component of a matrix, or of a stack of matrices; () if a tensor is neither."""
    if len(shape) not in (2, 3) or 0 in shape[:-2]:
        return ()
    grid = sharding.whole((math.prod(shape[:-1]), shape[-1])).component_shape(component)
    if len(shape) == 2:
        return grid
    rows = shape[1] // min(component.block_shape[0], max(shape[1], 1))
    return (grid[0] // max(rows, 1), rows, grid[1])


def group_bytes(reader: SafeReader, group: TensorGroup) -> int:
    entries = (reader.entries[key] for key in (*group.parts.values(), *group.others))
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    return sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)


def figures(reader: SafeReader, group: TensorGroup) -> dict[str, Any]:
    """The fields of a `TensorSummary` that come from data. A plain tensor is only read, to see whether it can be."""
    components = {} if group.format is None else {key: group.format.by_name[name] for name, key in group.parts.items()}
    codes = zeros = saturated = 0
    low, high, second_scale, wrong = math.inf, 0.0, 1.0, [*group.wrong]
    for key in (*group.others, *group.parts.values()):
        component = components.get(key)
        for _, part in reader.pieces(key):
            if component is None or part.dtype != component.encoding.storage or not part.numel():
                continue
            if component.role is Role.CODES:
                counts = count_codes(part, component.encoding)
                codes, zeros, saturated = codes + counts[0], zeros + counts[1], saturated + counts[2]
                continue
            values = numerics.decode(part, component.encoding)
            if bad := int((~values.isfinite() | (values < 0)).sum()):
                wrong.append(f"{key}: {bad} of {values.numel()} {component.role.value} entries are not finite")
            elif component.role is Role.SCALE:
                low, high = min(low, float(values.min())), max(high, float(values.max()))
            else:
                assert group.format is not None
                rowwise = group.format.copies[Orientation.ROWWISE]  # an amax belongs to the largest scale and code
                second_scale = float(values.max()) / (rowwise.scale.encoding.max * rowwise.codes.encoding.max)
    if not codes:
        return {"wrong": tuple(wrong)}
    if group.format is not None and group.shape is not None and not group.wrong:
        padding = codes - len(group.format.copies) * math.prod(group.shape)
        codes, zeros = codes - padding, zeros - padding  # padding consists of zero codes
    scales = (low * second_scale, high * second_scale) if low <= high else None
    return {"codes": codes, "zeros": zeros, "saturated": saturated, "scales": scales, "wrong": tuple(wrong)}


def count_codes(codes: Tensor, encoding: Encoding) -> tuple[int, int, int]:
    """(number of codes, number of zeros, number of codes with at least the largest magnitude)."""
    per_byte = max(1, 8 // encoding.bits)
    elements = zeros = saturated = 0
    for part in codes.reshape(-1).split(_AT_ONCE):
        if encoding.bits > 8:
            magnitudes = part.float().abs()
            zeros += int((magnitudes == 0).sum())
            saturated += int((magnitudes < encoding.max).logical_not().sum())
        else:
            counts = torch.bincount(part.int(), minlength=256)
            bytes_ = torch.arange(256, dtype=torch.uint8, device="cpu").unsqueeze(1)
            values = numerics.decode(numerics.unpack(bytes_, encoding, per_byte), encoding).abs()
            zeros += int((counts * (values == 0).sum(1)).sum())
            saturated += int((counts * (values < encoding.max).logical_not().sum(1)).sum())
        elements += part.numel() * per_byte
    return elements, zeros, saturated
