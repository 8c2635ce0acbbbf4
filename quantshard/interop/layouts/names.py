"""Maps from our weight names to the names in external files, including how a fused weight is split.

A map is a table from our name to the external name ("theirs"), in which `{n}` stands for a number. `LLAMA` is the map
for models of `TransformerLayer` as the command line builds them. A TOML file defines another map:

    [names]
    "layers.{n}.self_attention.proj.weight" = "model.layers.{n}.self_attn.o_proj.weight"
    [fused]
    "layers.{n}.self_attention.layernorm_qkv.weight" = { rows = "interleaved", into = ["...", "...", "..."] }

transformers splits the stacks of experts when it saves a model. Its conversion runs on row numbers instead of values
(`names_in_files`), which shows the rows of our weights in each tensor of a file.
"""

import importlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from quantshard.errors import ConfigurationError, shown
from quantshard.foreign import FILE_BYTES, FieldReader, read_toml
from quantshard.interop.layouts.conversion import RowRun

ORDERS: Final = ("interleaved", "stacked")
"""Row orders of a fused weight of queries, keys and values: interleaved by group, or stacked one after the other."""

_LAYER, _ATTENTION, _MLP = "layers.{n}.", "self_attention.", "layernorm_mlp."


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Number of query heads and number of key/value heads."""

    queries: int
    groups: int


@dataclass(frozen=True)
class Names:
    """A name map. `plain`: our name -> external name. `fused`: our name -> (row order, external names of q, k and v).
    `identity`: names in neither table stay the same."""

    plain: Mapping[str, str]
    fused: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    identity: bool = False

    def theirs(self, ours: str, rows: int, heads: HeadCounts | None) -> dict[str, list[RowRun]]:
        """Return the external weights in one of our weights: external name -> its rows. Empty: not mapped."""
        general, number = _general(ours)
        if general in self.plain:
            return {self.plain[general].replace("{n}", number): [RowRun(0, 0, rows)]}
        if general not in self.fused:
            return {ours: [RowRun(0, 0, rows)]} if self.identity else {}
        order, into = self.fused[general]
        if heads is None:
            raise ConfigurationError(f"{ours} holds queries, keys and values; pass --config with numbers of heads")
        runs = fused_runs(ours, order, rows, heads)
        return {name.replace("{n}", number): part for name, part in zip(into, runs, strict=True)}


def _general(name: str) -> tuple[str, str]:
    match = re.search(r"(?<=\.)\d{1,19}(?=\.)", name)
    if match is None:
        return name, ""
    return name[: match.start()] + "{n}" + name[match.end() :], match[0]


def fused_runs(name: str, order: str, rows: int, heads: HeadCounts) -> list[list[RowRun]]:
    size, remainder = divmod(rows, heads.queries + 2 * heads.groups)
    if remainder or heads.queries % heads.groups:
        raise ConfigurationError(f"{name}: {rows} rows for {heads.queries} query, {heads.groups} key/value heads")
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
"""Names of Llama, Qwen3 and similar models in transformers, for `TransformerLayer` with RMSNorm and swiglu."""

IDENTITY: Final = Names({}, identity=True)
"""Map for a model that uses the files' own names, such as a transformers model after `quantshard.convert`."""


def default_names(ours: Iterable[str]) -> Names:
    """Choose the default map: `LLAMA` for a model of `TransformerLayer`, otherwise the model's own names."""
    all_names = list(ours)
    is_llama = all(_general(name)[0] in LLAMA.plain or _general(name)[0] in LLAMA.fused for name in all_names)
    # only our modules with several weights have names with this suffix
    return LLAMA if is_llama or any(name.endswith("_weight") for name in all_names) else IDENTITY


def read_names(path: Path) -> Names:
    content = read_toml(path, FILE_BYTES["settings"], follow=True)
    plain, fused = content.get("names", {}), content.get("fused", {})
    if set(content) - {"names", "fused"} or not isinstance(plain, dict) or not isinstance(fused, dict):
        raise ConfigurationError(f"{path}: a map of names has only the tables [names] and [fused]")
    for name, value in plain.items():
        if not isinstance(value, str):
            raise ConfigurationError(f"{path}: {name!r} must be a name, not {shown(value)}")
    return Names(plain, {name: _fused(path, name, value) for name, value in fused.items()})


def _fused(path: Path, name: str, value: Any) -> tuple[str, tuple[str, ...]]:
    into = value.get("into") if isinstance(value, dict) else None
    is_list = isinstance(into, list) and len(into) == 3 and all(isinstance(part, str) for part in into)
    if into is None or not is_list or value.get("rows") not in ORDERS:
        raise ConfigurationError(f'{path}: {name!r} needs rows="interleaved" or "stacked", into=[query, key, value]')
    return value["rows"], tuple(into)


@dataclass(frozen=True)
class FileNames(Names):
    """The map of a transformers mixture. `files`: our name -> name in files -> rows of our weight, in which a stack
    counts the rows of all its matrices, one after the other."""

    files: Mapping[str, Mapping[str, list[RowRun]]] = field(default_factory=dict)

    def theirs(self, ours: str, rows: int, heads: HeadCounts | None) -> dict[str, list[RowRun]]:
        return dict(self.files.get(ours, {}))


def is_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a weight of a model stacks matrices: weights of convolutions have the last name "weight"."""
    return len(shape) == 3 and not name.endswith(".weight")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a stack [matrices, rows, columns] as one matrix; other shapes are returned as they are."""
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


def empty_model(config: Mapping[str, Any], most_layers: int) -> Any:
    """Build the transformers model of a config.json on the meta device. `most_layers`: largest plausible number."""
    FieldReader(config, "config.json").integer("num_hidden_layers", 1, most_layers)
    try:
        transformers = importlib.import_module("transformers")
        kind: Any = getattr(transformers, config["architectures"][0])
        if not issubclass(kind, transformers.PreTrainedModel):
            raise TypeError(f"{kind.__name__} is no model")
        with torch.device("meta"):
            return kind(kind.config_class.from_dict({**config, "quantization_config": None}))
    except (ImportError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigurationError(f"the model of config.json with split experts cannot be built: {text}") from None


def names_in_files(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> FileNames:
    """Return where files of a transformers model have the rows of these weights, which must be whole."""
    owners: list[tuple[str, int]] = []
    numbers, sizes = {}, {}
    for name, shape in shapes.items():
        count = math.prod(matrix_shape(shape)[:1])
        first = len(owners)
        owners += [(name, row) for row in range(count)]
        numbers[name] = torch.arange(first, first + count, device="cpu").reshape(_narrow(shape))
        sizes[name] = torch.empty(shape, device="meta", dtype=torch.float32)
    try:
        revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
        parts, sizes = revert(model, numbers), revert(model, sizes)
    # transformers' operations can raise any exception
    except Exception as error:
        raise ConfigurationError(f"transformers cannot split the experts of this model: {error}") from error
    result: dict[str, dict[str, list[RowRun]]] = {name: {} for name in shapes}
    for name, part in parts.items():
        names, rows = zip(*(owners[number] for number in part.flatten().tolist()), strict=True)
        ours = names[0]
        size = tuple(sizes[name].shape) if name in sizes else ()
        has_all_columns = matrix_shape(size)[1:] == matrix_shape(shapes[ours])[1:] and part.shape == _narrow(size)
        if set(names) != {ours} or not has_all_columns:
            raise ConfigurationError(f"{ours}: its rows are not in files as they are, but {list(size)} in {name}")
        result[ours][name] = _runs(rows)
    if sorted(int(n) for part in parts.values() for n in part.flatten()) != list(range(len(owners))):
        raise ConfigurationError("transformers leaves out rows of this model's experts; choose the native form")
    return FileNames({}, files=result)


def _narrow(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of row numbers: one column."""
    return (*shape[:2], 1) if len(shape) == 3 else (*shape[:1], *(1 for _ in shape[1:]))


def _runs(rows: tuple[int, ...]) -> list[RowRun]:
    starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
    return [RowRun(rows[i], i, stop - i) for i, stop in zip(starts, [*starts[1:], len(rows)], strict=True)]
