"""The content of a checkpoint as shown by `quantshard inspect`: a row per tensor, and totals by format."""

from __future__ import annotations

import json
import math
from collections.abc import Container
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from quantshard.checkpoints import rank_state
from quantshard.checkpoints.disk.manifest import Manifest
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.extras import EXTRA
from quantshard.checkpoints.inspect import contents
from quantshard.checkpoints.inspect.contents import STATE_MARK, TensorGroup, TensorStatistics
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY

WEIGHT, STATE, RANK = "weight", "state", "rank state"
RANDOM, HISTORY = "random state", "amax history"
"""Kinds of rows: a model's tensors, an optimizer's states, the states of single ranks, the RNG states of weights, and
amax histories. Rows of the caller's entries have the kind `EXTRA`."""

_PREFIXES = {"optimizer.": STATE, f"{EXTRA}.": EXTRA, f"{rank_state.RANKS}.": RANK}
_SUFFIXES = {f"_{KEY}": RANDOM, f"_{DRAWS}": RANDOM, f"_{AMAX_HISTORY}": HISTORY}


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
        """The number of elements."""
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
    """The result of an inspection.

    `others`: keys of entries that are not tensors. `run`: facts of the manifest; None without a manifest.
    """

    path: str
    rows: tuple[TensorSummary, ...]
    others: tuple[str, ...]
    run: dict[str, Any] | None

    @property
    def totals(self) -> tuple[FormatTotal, ...]:
        """Totals of weights by format, then of states by name and format."""
        rows_by_kind: dict[tuple[str, str], list[TensorSummary]] = {}
        for row in self.rows:
            kind = row.name.rpartition(".")[2] if row.kind == STATE else row.kind
            rows_by_kind.setdefault((kind, row.format), []).append(row)
        order = sorted(rows_by_kind, key=lambda key: (key[0] != WEIGHT, key))
        return tuple(
            FormatTotal(
                *key,
                len(rows_by_kind[key]),
                sum(r.numel for r in rows_by_kind[key]),
                sum(r.bytes for r in rows_by_kind[key]),
            )
            for key in order
        )

    def to_json(self) -> str:
        """The inspection with its totals, as JSON."""
        totals = [asdict(total) | {"bytes_per_element": total.bytes_per_element} for total in self.totals]
        rows = [asdict(row) for row in self.rows]
        whole = {"path": self.path, "run": self.run, "rows": rows, "totals": totals, "others": self.others}
        return json.dumps(whole, indent=1)


def inspect_checkpoint(path: Path_, data: bool = True) -> Inspection:
    """Inspect a checkpoint directory. `layouts.inspection.inspect` also accepts safetensors files.

    Not a collective call. No code of the files is executed, and only one chunk is in memory at a time.

    Args:
        data: read scales and codes too, and not only metadata and tags.

    Raises:
        CheckpointError: the directory is not a checkpoint, or is damaged.
    """
    reader = SafeReader(path)
    entries = reader.entries
    rows = [_row(reader, group, kind_of(group.name, entries), data) for group in contents.groups(reader)]
    object_keys = [key for key, entry in entries.items() if isinstance(entry, BytesStorageMetadata)]
    return Inspection(str(path), tuple(rows), tuple(sorted(object_keys)), _run(reader.manifest))


def _run(run_manifest: Manifest | None) -> dict[str, Any] | None:
    if run_manifest is None:
        return None
    names = ("step", "mesh", "recipe", "world_size", "torch", "saved_at")
    return {name: getattr(run_manifest, name) for name in names}


def kind_of(key: str, keys: Container[str]) -> str:
    """The kind of an entry, or of a tensor with several entries.

    Args:
        keys: all keys of the checkpoint.
    """
    for prefix, kind in _PREFIXES.items():
        if key.startswith(prefix):
            return kind
    for suffix, kind in _SUFFIXES.items():
        # the amax history of a module's input belongs to no weight
        if key.endswith(suffix) and (kind == HISTORY or key.removesuffix(suffix) in keys):
            return kind
    return STATE if STATE_MARK in key else WEIGHT


def _row(reader: SafeReader, group: TensorGroup, kind: str, data: bool) -> TensorSummary:
    figures = contents.figures(reader, group) if data and group.format is not None else None
    return TensorSummary(
        group.name,
        kind,
        group.tag,
        group.format is not None,
        group.shape,
        contents.group_bytes(reader, group),
        contents.chunks(reader, group),
        **counted(figures, group.wrong),
    )


def counted(figures: TensorStatistics | None, wrong: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a `TensorSummary` that come from its data."""
    if figures is None or not figures.elements:
        return {"wrong": wrong}
    return {
        "codes": figures.elements,
        "zeros": figures.zeros,
        "saturated": figures.saturated,
        "scales": figures.scales,
        "wrong": (*wrong, *figures.wrong),
    }
