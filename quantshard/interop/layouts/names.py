"""Names: which weight of another program's model each of ours is, and how a fused one is cut into theirs.

A map is a table, our name -> theirs, in which `{n}` stands for a number. `LLAMA` is that of models made of
`TransformerLayer` as the command line builds them; a TOML file gives another:

    [names]
    "layers.{n}.self_attention.proj.weight" = "model.layers.{n}.self_attn.o_proj.weight"
    [fused]
    "layers.{n}.self_attention.layernorm_qkv.weight" = { rows = "interleaved", into = ["...", "...", "..."] }
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quantshard.errors import ConfigurationError
from quantshard.foreign import read_toml, shown
from quantshard.interop.layouts.conversion import RowRun, whole_run
from quantshard.read_limits import FILE_BYTES

ORDERS: Final = ("interleaved", "stacked")
"""Orders of the rows of a fused weight of queries, keys and values: group by group, or one behind the other."""

_LAYER, _ATTENTION, _MLP = "layers.{n}.", "self_attention.", "layernorm_mlp."


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Heads of the queries, heads of keys and values."""

    queries: int
    groups: int


@dataclass(frozen=True)
class Names:
    """A map: `plain`, our name -> theirs; `fused`, our name -> (order of its rows, their names of q, k and v).
    `identity`: all other names stay as they are."""

    plain: Mapping[str, str]
    fused: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    identity: bool = False

    def theirs(self, ours: str, rows: int, heads: HeadCounts | None) -> dict[str, list[RowRun]]:
        """The weights of theirs that one of ours, of so many rows, holds: their name -> its rows. Empty: not mapped.

        Raises:
            ConfigurationError: a fused weight, without the numbers of heads or not of so many rows.
        """
        general, numbers = _general(ours)
        if general in self.plain:
            return {_numbered(self.plain[general], numbers): whole_run(rows)}
        if general not in self.fused:
            return {ours: whole_run(rows)} if self.identity else {}
        order, into = self.fused[general]
        if heads is None:
            raise ConfigurationError(
                f"{ours} holds queries, keys and values; how many heads each has must come with the model's "
                "configuration (num_attention_heads, num_key_value_heads): pass --config"
            )
        runs = fused_runs(ours, order, rows, heads)
        return {_numbered(name, numbers): part for name, part in zip(into, runs, strict=True)}


def _numbered(name: str, number: str) -> str:
    """A name of theirs with its number; nothing else in braces means anything, as it would to `str.format`."""
    return name.replace("{n}", number)


def _general(name: str) -> tuple[str, str]:
    """A name with its first number as {n}, and that number."""
    found = re.search(r"(?<=\.)\d{1,19}(?=\.)", name)
    if found is None:
        return name, ""
    return name[: found.start()] + "{n}" + name[found.end() :], found[0]


def fused_runs(name: str, order: str, rows: int, heads: HeadCounts) -> list[list[RowRun]]:
    """The rows of queries, of keys and of values in a fused weight.

    Raises:
        ConfigurationError: the rows are not those of so many heads.
    """
    size, rest = divmod(rows, heads.queries + 2 * heads.groups)
    if rest or heads.queries % heads.groups:
        raise ConfigurationError(
            f"{name} has {rows} rows, which are not {heads.queries} heads of queries and {heads.groups} each of keys "
            "and values; check num_attention_heads and num_key_value_heads"
        )
    sizes = [heads.queries * size, heads.groups * size, heads.groups * size]
    if order == "stacked":
        starts = [0, sizes[0], sizes[0] + sizes[1]]
        return [[RowRun(start, 0, length)] for start, length in zip(starts, sizes, strict=True)]
    parts: list[list[RowRun]] = [[], [], []]
    per_group = [length // heads.groups for length in sizes]
    for group in range(heads.groups):
        start = group * sum(per_group)
        for part, length in zip(parts, per_group, strict=True):
            part.append(RowRun(start, group * length, length))
            start += length
    return parts


def _llama() -> Names:
    theirs = "model.layers.{n}."
    qkv = _LAYER + _ATTENTION + "layernorm_qkv."
    plain = {
        "embedding.weight": "model.embed_tokens.weight",
        qkv + "layer_norm_weight": theirs + "input_layernorm.weight",
        _LAYER + _MLP + "layer_norm_weight": theirs + "post_attention_layernorm.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
        **{f"{_LAYER}{_ATTENTION}{norm}.weight": f"{theirs}self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")},
    }
    short = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    for kind in ("weight", "bias"):
        plain |= {f"{qkv}{ours}_{kind}": f"{theirs}self_attn.{name}.{kind}" for ours, name in short.items()}
        plain[f"{_LAYER}{_ATTENTION}proj.{kind}"] = f"{theirs}self_attn.o_proj.{kind}"
        for ours, name in {"fc1_gate": "gate_proj", "fc1_up": "up_proj", "fc2": "down_proj"}.items():
            plain[f"{_LAYER}{_MLP}{ours}_{kind}"] = f"{theirs}mlp.{name}.{kind}"
    into = {kind: tuple(f"{theirs}self_attn.{name}.{kind}" for name in short.values()) for kind in ("weight", "bias")}
    return Names(plain, {qkv + kind: ("interleaved", names) for kind, names in into.items()})


LLAMA: Final = _llama()
"""Llama, Qwen3 and their like in transformers, from models of `TransformerLayer` with RMSNorm and swiglu."""

IDENTITY: Final = Names({}, identity=True)
"""Of a model that has the names of its files, as one of transformers after `quantshard.convert`."""

_OURS: Final = "_weight"
"""How names end that modules of several weights give them, and no model of another library."""


def default_names(ours: Iterable[str]) -> Names:
    """The map where none was asked for: Llama's for a model of `TransformerLayer`, else the model's own names."""
    held = list(ours)
    is_llama = all(_general(name)[0] in LLAMA.plain or _general(name)[0] in LLAMA.fused for name in held)
    return LLAMA if is_llama or any(name.endswith(_OURS) for name in held) else IDENTITY


def read_names(path: Path) -> Names:
    """A map from a TOML file; see above.

    Raises:
        ConfigurationError: the file is missing, longer than `FILE_BYTES` says, not TOML, or not a map.
    """
    content = read_toml(path, FILE_BYTES["settings"], follow=True)
    plain, fused = content.get("names", {}), content.get("fused", {})
    if set(content) - {"names", "fused"} or not isinstance(plain, dict) or not isinstance(fused, dict):
        raise ConfigurationError(f"{path}: a map of names has the tables [names] and [fused] alone")
    for name, value in plain.items():
        if not isinstance(value, str):
            raise ConfigurationError(f"{path}: {name!r} must be a name, not {shown(value)}")
    return Names(plain, {name: _fused(path, name, value) for name, value in fused.items()})


def _fused(path: Path, name: str, value: Any) -> tuple[str, tuple[str, ...]]:
    into = value.get("into") if isinstance(value, dict) else None
    is_list = isinstance(into, list) and len(into) == 3 and all(isinstance(part, str) for part in into)
    if into is None or not is_list or value.get("rows") not in ORDERS:
        raise ConfigurationError(
            f'{path}: {name!r} must be {{ rows = "interleaved" or "stacked", into = [query, key, value] }}, '
            f"not {shown(value)}"
        )
    return value["rows"], tuple(into)


def check_distinct(found: Iterable[str]) -> None:
    """Raise if two weights of ours would have one name.

    Raises:
        ConfigurationError: naming it.
    """
    seen: set[str] = set()
    for name in found:
        if name in seen:
            raise ConfigurationError(f"two weights would be named {name}; correct the map of names")
        seen.add(name)
