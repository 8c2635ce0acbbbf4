"""Types and ranges of settings from untrusted files, sizes of models, and the texts of meshes, recipes, presets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quantshard import recipe
from quantshard.errors import ConfigurationError, meant, shown
from quantshard.modules.contexts.layer_recipes import matches
from quantshard.recipe import HighPrecision, Recipe
from quantshard.state_storage import PRESETS, StateOptions

_TYPE_NAMES: dict[type, str] = {
    tuple: "a list of paths", dict: "a table", list: "a list of strings", bool: "true or false",
}  # fmt: skip


@dataclass(frozen=True)
class SettingType:
    """The type and range of a value.

    Args:
        type: type; a tuple or list consists of strings.
        least, most: bounds of a number, of the length of a string, or of the length of each string in a list.
        more, less: exclude the lower or the upper bound.
        choices: valid strings; empty for any.
    """

    type: type
    least: float = 0
    most: float = 4096
    more: bool = False
    less: bool = False
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.choices:
            return f"one of: {', '.join(self.choices)}"
        if self.type in (tuple, list):
            return f"{_TYPE_NAMES[self.type]}, each of {self.least} to {self.most} characters"
        if self.type is bool:
            return _TYPE_NAMES[bool]
        if self.type is str:
            return f"text of {f'{self.least} to' if self.least else 'at most'} {self.most} characters"
        low = f"more than {self.least:,}" if self.more else f"{self.least:,} or more"
        return f"{low}, and {f'less than {self.most:,}' if self.less else f'at most {self.most:,}'}"

    def read(self, value: Any) -> Any:
        """Convert a value from a file or another process: an int can stand for a float, a list for a tuple."""
        if self.type is float and type(value) is int:
            return float(value)
        if self.type in (tuple, list) and type(value) in (tuple, list) and all(type(entry) is str for entry in value):
            return self.type(value)
        if type(value) is not self.type or self.type in (tuple, list):
            raise TypeError
        return value

    def holds(self, value: Any) -> bool:
        """Return True if a value of the type is in range; NaN never is."""
        if self.choices:
            return value in self.choices
        if self.type in (tuple, list):
            return all(self.least <= len(entry) <= self.most and "\0" not in entry for entry in value)
        if self.type is str:
            return self.least <= len(value) <= self.most
        low = self.least < value if self.more else self.least <= value
        return low and (value < self.most if self.less else value <= self.most)


def check_value(name: str, value: object, kind: SettingType, where: str = "") -> None:
    """Refuse a value out of range. `where`: the file of the value."""
    if not kind.holds(value):
        requirement = f"{meant(value, kind.choices)}choose {kind}" if kind.choices else f"must be {kind}"
        raise ConfigurationError(f"{where}{name} = {shown(value)}: {requirement}")


def read_table(values: Mapping[str, Any], kinds: Mapping[str, SettingType], where: str, hint: str) -> dict[str, Any]:
    """Check and convert the values of a table of a file. `hint`: advice for unknown keys."""
    result = {}
    for name, value in values.items():
        if name not in kinds:
            raise ConfigurationError(f"{where}: there is no setting {shown(name)}; {meant(name, kinds)}{hint}")
        kind = kinds[name]
        try:
            result[name] = kind.read(value)
        except (TypeError, OverflowError):
            type_name = _TYPE_NAMES.get(kind.type, kind.type.__name__)
            range_ = "" if type_name in str(kind) else f": {kind}"
            raise ConfigurationError(f"{where}: {name} = {shown(value)} must be {type_name}{range_}") from None
        check_value(name, result[name], kind, f"{where}: ")
    return result


STREAM, DOCUMENTS, BEST_FIT = PACKINGS = ("stream", "documents", "best-fit")
"""Ways to make sequences of documents; see `data.packing`."""

NO_BALANCE, AUXILIARY, SEQUENCE, BIAS, BIAS_SEQUENCE = BALANCES = ("none", "aux", "sequence", "bias", "bias+sequence")
"""Ways to balance the load of experts; see `models.mixture`."""


EP, CP, TP = "ep", "cp", "tp"

_SIZE = re.compile(r"0*[1-9][0-9]{0,5}", re.ASCII)


@dataclass(frozen=True)
class MeshSpec:
    """The sizes of the axes of a mesh, written as `--mesh dp_replicate=1,dp_shard=2,tp=2`.

        dp_replicate   copies of the model (HSDP)
        dp_shard       shards of each copy (FSDP2)
        ep             parts of the experts (expert parallelism); all other parameters are sharded over it too
        cp             ranks that share the tokens of sequences (context parallelism), and shards of each copy
        tp             ranks that compute the same sequences together (tensor parallelism)

    The order is fixed, so that the ranks of a tensor-parallel group are neighbours and share a machine if possible.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Parse a text such as "dp_shard=2,tp=2", in any order; omitted axes have size 1."""
        axes, sizes = [field.name for field in fields(cls)], dict[str, int]()
        for entry in text.split(","):
            name, _, size = (part.strip() for part in entry.partition("="))
            problem = ""
            if name not in axes:
                problem = f"there is no axis {shown(name)}; {meant(name, axes)}write AXIS=SIZE with {', '.join(axes)}"
            elif name in sizes or not _SIZE.fullmatch(size):
                problem = f"{shown(entry.strip())} must be AXIS=SIZE, with each axis once"
            if problem:
                raise ConfigurationError(f"mesh = {shown(text)}: {problem}")
            sizes[name] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.present.items())

    @property
    def present(self) -> dict[str, int]:
        """Axes of the DeviceMesh: those of size > 1, and dp_shard."""
        return {name: size for name, size in asdict(self).items() if size > 1 or name == "dp_shard"}

    @property
    def processes(self) -> int:
        return self.data_parallel * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """The number of parts that the sequences of a step are divided into."""
        return self.dp_replicate * self.dp_shard * self.ep

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Create the DeviceMesh over all ranks, with cp as a part of dp_shard. Collective."""
        axes = replace(self, dp_shard=self.dp_shard * self.cp, cp=1).present
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def sequence_mesh(self, device_type: str) -> DeviceMesh | None:
        """Create the DeviceMesh of the axis cp; None if its size is 1. Collective."""
        shape, names = (self.data_parallel, self.cp, self.tp), ("dp", CP, TP)
        return init_device_mesh(device_type, shape, mesh_dim_names=names)[CP] if self.cp > 1 else None


_ALL = "*"


def recipe_text(table: Mapping[str, object], where: str) -> str:
    """Convert a TOML table pattern -> recipe to the text that `LayerRecipes.parse` reads."""
    for pattern, name in (table or {"": ""}).items():
        if not isinstance(name, str) or not pattern or "=" in pattern or "," in pattern:
            entry = f"{shown(pattern)} = {shown(name)}"
            raise ConfigurationError(f"{where}: recipe has {entry}; write PATTERN = RECIPE, without ',' and '='")
    return ",".join(f"{pattern}={name}" for pattern, name in table.items())


@dataclass(frozen=True)
class LayerRecipes:
    """Name patterns of layers and their recipe names; the first match counts."""

    patterns: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "LayerRecipes":
        """Parse a recipe name, or entries `layers.0=bf16,*.proj=block,*=mxfp8`; resolve "auto"."""
        patterns: dict[str, str] = {}
        for entry in text.split(",") if "=" in text else [f"{_ALL}={text}"]:
            pattern, _, name = (part.strip() for part in entry.partition("="))
            if not (pattern and name) or pattern in patterns:
                problem = "is there twice" if pattern in patterns else "must be PATTERN=RECIPE"
                raise ConfigurationError(f"recipe = {shown(text)}: {shown(entry.strip())} {problem}")
            recipe.resolve(name)
            patterns[pattern] = recipe.concrete_name(name)
        return cls(patterns)

    @property
    def text(self) -> str:
        """The text that `parse` reads, with "auto" resolved."""
        if list(self.patterns) == [_ALL]:
            return self.patterns[_ALL]
        return ",".join(f"{pattern}={name}" for pattern, name in self.patterns.items())

    @property
    def recipes(self) -> dict[str, Recipe]:
        return {pattern: recipe.resolve(name) for pattern, name in self.patterns.items()}

    def of_parts(self, names: Sequence[str]) -> "LayerRecipes":
        """Return patterns for linear layers of these names. A pattern for a layer also matches those inside it."""
        patterns, unmatched = dict[str, str](), list(names)
        for pattern, recipe_name in self.patterns.items():
            is_reached = pattern == _ALL
            for spelling in (pattern, f"{pattern}.*"):
                rest = [name for name in unmatched if not matches(spelling, name)]
                if len(rest) < len(unmatched):
                    patterns[spelling], unmatched, is_reached = recipe_name, rest, True
            if not is_reached:
                raise ConfigurationError(
                    f"recipe: {shown(pattern)} matches no layer, or only those of an earlier pattern; the linear "
                    f"layers are {names[0]} to {names[-1]}"
                )
        return LayerRecipes(patterns)

    def of_layer(self, name: str) -> Recipe:
        recipe_name = next((value for pattern, value in self.patterns.items() if matches(pattern, name)), None)
        return HighPrecision() if recipe_name is None else recipe.resolve(recipe_name)


AUTO: Final = "auto"
"""Use the preset's value, or float32 without a preset."""

MASTER_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

MOMENT_DTYPES: Final = {**MASTER_DTYPES, "fp8": torch.uint8}

STATE_SETTINGS: Final = {
    "master_weights": "master_weights",
    "master_dtype": "master_weight_dtype",
    "master_remainders": "store_param_remainders",
    "exp_avg_dtype": "exp_avg_dtype",
    "exp_avg_sq_dtype": "exp_avg_sq_dtype",
    "momentum_dtype": "momentum_buffer_dtype",
}
"""Settings that a preset determines, and the matching options of the optimizers."""

FLOAT32_STATES: Final = "none"
"""Value of `--preset` for float32 masters and moments, to override the preset of a file or run."""

SWITCH: Final = {"on": True, "off": False}
"""Whether to store only the remainders of masters, by the words of settings and options."""

_VALUES: Final = {**MOMENT_DTYPES, **SWITCH}


def state_options(preset: str, settings: Mapping[str, Any]) -> StateOptions:
    """Combine a preset ("" or `FLOAT32_STATES` for none) with individual settings.

    `settings`: values by the names of `STATE_SETTINGS`. The preset decides settings that are missing or `AUTO`, and
    `master_weights` unless it is False.
    """
    preset = named_preset(preset)
    options = PRESETS[preset] if preset else StateOptions()
    explicit: dict[str, Any] = {
        name: _VALUES.get(value, value)
        for name, value in settings.items()
        if value not in (AUTO, None) and not (preset and name == "master_weights" and value)
    }
    of_preset = as_settings(options)
    for name, value in explicit.items() if preset else ():
        if value != getattr(options, STATE_SETTINGS[name]):
            raise ConfigurationError(
                f"preset = {preset!r} has {name} = {of_preset[name]!r}, but {name} = {settings[name]!r} is given; "
                f"leave one of the two out, or give preset = {FLOAT32_STATES!r}"
            )
    return replace(options, **{STATE_SETTINGS[name]: value for name, value in explicit.items()})


def named_preset(preset: str) -> str:
    """Return the preset's name, after checking it; "" for `FLOAT32_STATES`."""
    names = [*PRESETS, FLOAT32_STATES]
    if preset and preset not in names:
        problem = f"there is no such preset; {meant(preset, names)}choose one of {', '.join(names)}"
        raise ConfigurationError(f"preset = {shown(preset)}: {problem}")
    return "" if preset == FLOAT32_STATES else preset


def as_settings(options: StateOptions) -> dict[str, Any]:
    values = {name: getattr(options, option) for name, option in STATE_SETTINGS.items()}
    words = {name: next((word for word, of in _VALUES.items() if of is value), value) for name, value in values.items()}
    return words | {"master_weights": options.master_weights}


_LLAMA_3: Final = {"architecture": "llama", "rope_theta": 500000.0, "norm_eps": 1e-5}
_QWEN_3: Final = {"architecture": "llama", "rope_theta": 1e6, "norm_eps": 1e-6, "head_dim": 128, "qk_norm": True}

SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama3-8b": {**_LLAMA_3, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336},
    "llama3.2-1b": {**_LLAMA_3, "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "tied": True},
    "qwen3-8b": {**_QWEN_3, "hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "ffn": 12288},
    "qwen3-0.6b": {**_QWEN_3, "hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "ffn": 3072, "tied": True},
    "smollm2-135m": {
        "architecture": "llama", "hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "ffn": 1536, "tied": True,
        "rope_theta": 100000.0, "norm_eps": 1e-5,
    },
    "moe-small": {
        "architecture": "llama", "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 768, "tied": True,
        "experts": 16, "experts_per_token": 2, "seq_length": 512,
    },
    "gpt2-small": {
        "architecture": "gpt", "hidden": 768, "layers": 12, "heads": 12, "ffn": 3072, "tied": True,
        "seq_length": 1024, "norm_eps": 1e-5,
    },
}  # fmt: skip
"""Sizes of models, by the name in `--model NAME`, for the built-in decoder. Flags take precedence.

Sources: config.json of meta-llama/Meta-Llama-3-8B, meta-llama/Llama-3.2-1B (without its rotary scaling, which is for
more than 8192 tokens), Qwen/Qwen3-8B, Qwen/Qwen3-0.6B, HuggingFaceTB/SmolLM2-135M and openai-community/gpt2.
"""
