"""What `quantshard inspect` shows of a checkpoint: a row a tensor, and totals by format."""

from __future__ import annotations

import json
import math
from collections.abc import Container
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from quantshard.checkpoints import rank_state
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.inspect import contents
from quantshard.checkpoints.inspect.contents import STATE_MARK, TensorGroup, TensorStatistics
from quantshard.checkpoints.untrusted.extras import EXTRA
from quantshard.checkpoints.untrusted.reader import SafeReader
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY

WEIGHT, STATE, RANK = "weight", "state", "rank state"
RANDOM, HISTORY = "random state", "amax history"
"""Kinds of rows: what a model holds, an optimizer's states, what each rank saved of its own; the random state of
weights, and what modules remember of their inputs. The caller's own entries are `EXTRA`."""

_PREFIXES = {"optimizer.": STATE, f"{EXTRA}.": EXTRA, f"{rank_state.RANKS}.": RANK}
_SUFFIXES = {f"_{KEY}": RANDOM, f"_{DRAWS}": RANDOM, f"_{AMAX_HISTORY}": HISTORY}


@dataclass(frozen=True)
class TensorSummary:
    """One tensor. `bytes`: of all its entries. `chunks`: pieces that its codes, or values, are stored in.

    Of codes: how many (`codes`), how many of them are zero, how many have the largest magnitude. `scales`: the smallest
    and the largest. These are None where data were not read, or there are none. `wrong`: what `verify` would say.
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
        """Elements of the tensor."""
        return math.prod(self.shape or (0,))


@dataclass(frozen=True)
class FormatTotal:
    """The tensors of one kind and format, or the states of one name."""

    kind: str
    format: str
    tensors: int
    numel: int
    bytes: int

    @property
    def bytes_per_element(self) -> float:
        """Scales and state included."""
        return self.bytes / self.numel if self.numel else 0.0


@dataclass(frozen=True)
class Inspection:
    """What was found. `others`: keys of entries that are no tensors; `run`: what the manifest says, if there is one."""

    path: str
    rows: tuple[TensorSummary, ...]
    others: tuple[str, ...]
    run: dict[str, Any] | None

    @property
    def totals(self) -> tuple[FormatTotal, ...]:
        """Weights by format, then states by name and format."""
        found: dict[tuple[str, str], list[TensorSummary]] = {}
        for row in self.rows:
            kind = row.name.rpartition(".")[2] if row.kind == STATE else row.kind
            found.setdefault((kind, row.format), []).append(row)
        order = sorted(found, key=lambda key: (key[0] != WEIGHT, key))
        return tuple(
            FormatTotal(*key, len(found[key]), sum(r.numel for r in found[key]), sum(r.bytes for r in found[key]))
            for key in order
        )

    def to_json(self) -> str:
        """All of it."""
        totals = [asdict(total) | {"bytes_per_element": total.bytes_per_element} for total in self.totals]
        rows = [asdict(row) for row in self.rows]
        whole = {"path": self.path, "run": self.run, "rows": rows, "totals": totals, "others": self.others}
        return json.dumps(whole, indent=1)


def inspect_checkpoint(path: Path_, data: bool = True) -> Inspection:
    """Look into a checkpoint directory; `layouts.inspection.inspect` looks into safetensors files, too.

    Not a collective call; nothing in the files is run, and one chunk is in memory at a time.

    Args:
        data: whether to read scales and codes; else metadata and tags alone are read.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    reader = contents.opened(path)
    entries = reader.read_metadata().state_dict_metadata
    rows = [_row(reader, group, kind_of(group.name, entries), data) for group in contents.groups(reader)]
    others = [key for key, entry in entries.items() if isinstance(entry, BytesStorageMetadata)]
    return Inspection(str(path), tuple(rows), tuple(sorted(others)), _run(path))


def _run(path: Path_) -> dict[str, Any] | None:
    found = manifest.read_manifest(path)
    if found is None:
        return None
    names = ("step", "mesh", "recipe", "world_size", "torch", "saved_at")
    return {name: getattr(found, name) for name in names}


def kind_of(key: str, keys: Container[str]) -> str:
    """The kind of an entry, or of a tensor of several.

    Args:
        keys: of the checkpoint.
    """
    for prefix, kind in _PREFIXES.items():
        if key.startswith(prefix):
            return kind
    for suffix, kind in _SUFFIXES.items():
        # what modules remember of their inputs belongs to no weight of that name
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
    """The entries of a `TensorSummary` that come from its data."""
    if figures is None or not figures.elements:
        return {"wrong": wrong}
    return {
        "codes": figures.elements,
        "zeros": figures.zeros,
        "saturated": figures.saturated,
        "scales": figures.scales,
        "wrong": (*wrong, *figures.wrong),
    }
