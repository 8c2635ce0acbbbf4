"""The settings of a training run: one frozen dataclass, which is also the flags of `train` and the keys of its TOML.

A setting comes from its flag if it was given, else from `--config FILE`, else from the default below; `resolved` then
fills in what follows from other settings, and `check_value` refuses what cannot be trained, one line a mistake. The
result is written to `config.toml` in the run's folder: `--config` of another run can read it, and `resume` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch

from quantshard import foreign, recipe
from quantshard.errors import ConfigurationError
from quantshard.formats import Role
from quantshard.trainer.mesh import MeshSpec
from quantshard.trainer.schema import SettingType, check_value, read_table, shown_value

MOST_BYTES = 32 << 20
"""The most bytes of a configuration; that of a run lists its data, about 150 bytes a file."""

TABLES = ("launch", "corpus")
"""Tables that a run's `config.toml` has beside the settings; `--config` skips them."""

MOMENT_DTYPES = {"float32": torch.float32, "fp8": torch.uint8}
"""How Adam's moments may be stored, by the words of settings and options."""

CHOICES = {
    "architecture": ("llama", "gpt"),
    "schedule": ("cosine", "constant"),
    "params_dtype": ("bfloat16", "float32"),
    "reduce_dtype": ("bfloat16", "float32"),
    "exp_avg_dtype": tuple(MOMENT_DTYPES),
    "exp_avg_sq_dtype": tuple(MOMENT_DTYPES),
    "sequence_parallel": ("auto", "on", "off"),
    "device": ("auto", "cpu", "cuda"),
    "data_format": ("auto", "text"),
}
"""Settings that are one of a few words."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_WIDTH_MULTIPLE = 32


_COUNT, _SIZE, _STEPS = 1 << 20, 1 << 24, 10**9
"""The most of what is counted: layers, heads and processes; elements and sequences; steps."""


def _setting(default: Any, panel: str, help: str, least: float = 0, most: float = 4096, **bounds: Any) -> Any:
    """A setting; `least`, `most` and `bounds` are those of its `SettingType`."""
    kind = partial(SettingType, least=least, most=most, **bounds)
    return field(default=default, metadata={"panel": panel, "help": help, "kind": kind})


@dataclass(frozen=True)
class TrainSettings:
    """Everything that determines a run but the number of its processes and the bytes of its data."""

    architecture: str = _setting("llama", "Model", "llama (RMSNorm, SwiGLU, rotary) or gpt (LayerNorm, GELU, bias)")
    hidden: int = _setting(256, "Model", "width of the model", 1, _SIZE)
    layers: int = _setting(4, "Model", "number of transformer layers", 1, _COUNT)
    heads: int = _setting(4, "Model", "attention heads", 1, _COUNT)
    kv_heads: int = _setting(
        0, "Model", "heads of keys and values (grouped-query attention); 0: as many as heads", 0, _COUNT
    )
    ffn: int = _setting(0, "Model", "width of the feed-forward part; 0: 8/3 (llama) or 4 (gpt) times hidden", 0, _SIZE)
    seq_length: int = _setting(128, "Model", "tokens of one sequence", 2, _SIZE)
    tied: bool = _setting(False, "Model", "use the embedding as the output head too")
    dropout: float = _setting(0.0, "Model", "probability of dropout", 0, 1, less=True)

    init_from: str = _setting(
        "", "Model", "weights to begin with: a checkpoint, or a folder of safetensors; sizes not given are its"
    )

    data: tuple[str, ...] = _setting(
        (),
        "Data",
        "file or folder of text, .jsonl, .parquet, .bin; repeatable. Default: the source of Python's library",
        1,
    )
    data_weights: str = _setting(
        "", "Data", "share of the sequences that each --data gives, in order, as 0.7,0.3. Default: by length"
    )
    tokenizer: str = _setting("", "Data", "folder with tokenizer.json, or the file. Default: tokens are bytes")
    end_of_document: str = _setting("", "Data", "token that ends a document. Default: the tokenizer's eos_token")
    vocabulary: int = _setting(0, "Data", "tokens that the model has; 0: as many as the tokenizer", 0, _SIZE)
    text_field: str = _setting("text", "Data", "key or column of texts in .jsonl, .parquet and datasets", 1)
    data_split: str = _setting("train", "Data", "split of a dataset's folder", 1, 200)
    data_format: str = _setting("auto", "Data", "auto: by name; or text: the bytes of every file")
    token_cache: str = _setting("", "Data", "folder for the tokens that are made of data. Default: in the run's")
    heldout: float = _setting(
        0.02, "Data", "share of the text, at its end, that is kept to evaluate on", 0, 1, less=True
    )
    heldout_data: tuple[str, ...] = _setting(
        (), "Data", "file or folder to evaluate on, instead of a share; repeatable", 1
    )
    eval_sequences: int = _setting(32, "Data", "sequences of the held-out text that an evaluation reads", 1, _SIZE)

    steps: int = _setting(200, "Training", "optimizer steps", 1, _STEPS)
    global_batch: int = _setting(16, "Training", "sequences of one step, over all processes", 1, _SIZE)
    micro_batches: int = _setting(
        1, "Training", "parts in which a process takes its share of a step, one by one", 1, _SIZE
    )
    lr: float = _setting(1e-3, "Training", "highest learning rate", 0, 1e6, more=True)
    schedule: str = _setting("cosine", "Training", "cosine or constant, after the warmup")
    warmup: int = _setting(20, "Training", "steps in which the learning rate rises to lr", 0, _STEPS)
    decay_steps: int = _setting(
        0, "Training", "step at which the cosine ends; 0: steps, as the run was started with", 0, _STEPS
    )
    lr_floor: float = _setting(0.1, "Training", "share of lr at which the cosine ends", 0, 1)
    beta1: float = _setting(0.9, "Training", "Adam's decay of the first moment", 0, 1, less=True)
    beta2: float = _setting(0.95, "Training", "Adam's decay of the second moment", 0, 1, less=True)
    eps: float = _setting(1e-8, "Training", "Adam's epsilon", 0, 1e6, more=True)
    weight_decay: float = _setting(0.1, "Training", "decoupled weight decay of matrices", 0, 1e6)
    clip: float = _setting(1.0, "Training", "highest norm of the gradient; 0: no clipping", 0, 1e12)
    seed: int = _setting(0, "Training", "seed of the weights and of the order of the data", 0, (1 << 63) - 1)

    recipe: str = _setting("mxfp8", "Precision", f"one of {', '.join(recipe.NAMES)}", 1, 80)
    params_dtype: str = _setting("bfloat16", "Precision", "dtype of activations and of weights that stay unquantized")
    exp_avg_dtype: str = _setting("float32", "Precision", "Adam's first moment: float32 or fp8")
    exp_avg_sq_dtype: str = _setting("float32", "Precision", "Adam's second moment: float32 or fp8")

    save_every: int = _setting(50, "Running", "steps between checkpoints; 0: only at the end", 0, _STEPS)
    keep_last: int = _setting(0, "Running", "newest checkpoints that are kept; 0: all", 0, _STEPS)
    keep_every: int = _setting(
        0, "Running", "keep checkpoints of steps that this divides too, where keep_last is set", 0, _STEPS
    )
    async_save: bool = _setting(False, "Running", "save in the background, from a copy of the state in memory")
    eval_every: int = _setting(50, "Running", "steps between evaluations; 0: only at the end", 0, _STEPS)
    log_every: int = _setting(1, "Running", "steps between printed lines", 1, _STEPS)
    sample_tokens: int = _setting(
        0, "Running", "print a generated text of this many tokens when training starts and ends", 0, _SIZE
    )
    sample_prompt: str = _setting("", "Running", "what the generated text goes on from")
    device: str = _setting("auto", "Running", "cpu, cuda, or auto: cuda where there is one")
    deterministic: bool = _setting(True, "Running", "the same bits in every run on the same hardware and software")
    threads: int = _setting(
        0, "Running", "CPU threads of a process; 0: OMP_NUM_THREADS, or 1 of several processes", 0, 4096
    )

    mesh: str = _setting(
        "",
        "Sharding",
        "processes along dp_replicate, dp_shard and tp (tensor parallelism), as dp_shard=2,tp=2. Default: dp_shard",
    )
    dp_replicate: int = _setting(1, "Sharding", "copies of the model (HSDP), where no mesh is given", 1, _COUNT)
    sequence_parallel: str = _setting(
        "auto",
        "Sharding",
        "divide sequences over tp between GEMMs: on, off, or auto: where a micro-batch can be divided",
        0,
        200,
    )
    reshard_after_forward: bool = _setting(True, "Sharding", "free gathered weights between forward and backward")
    reduce_dtype: str = _setting(
        "float32", "Sharding", "dtype of gradients' sums over processes; bfloat16 sends half the bytes", 0, 200
    )

    @property
    def torch_params_dtype(self) -> torch.dtype:
        """`params_dtype` as torch has it."""
        return _DTYPES[self.params_dtype]

    @property
    def torch_reduce_dtype(self) -> torch.dtype:
        """`reduce_dtype` as torch has it."""
        return _DTYPES[self.reduce_dtype]

    @property
    def torch_moment_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """`exp_avg_dtype` and `exp_avg_sq_dtype` as `FusedAdam` takes them."""
        return MOMENT_DTYPES[self.exp_avg_dtype], MOMENT_DTYPES[self.exp_avg_sq_dtype]

    def resolved(self) -> TrainSettings:
        """These settings with what follows from others filled in, and with absolute paths."""
        factor = 8 / 3 if self.architecture == "llama" else 4.0
        ffn = -int(-self.hidden * factor // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        axes = MeshSpec.parse(self.mesh) if self.mesh else None
        return replace(
            self,
            mesh=str(axes) if axes else "",
            dp_replicate=1 if axes else self.dp_replicate,  # the mesh says it
            kv_heads=self.kv_heads or self.heads,
            ffn=self.ffn or ffn,
            decay_steps=self.decay_steps or self.steps,
            data=tuple(map(_absolute, self.data)),
            heldout=0.0 if self.heldout_data else self.heldout,
            heldout_data=tuple(map(_absolute, self.heldout_data)),
            tokenizer=_absolute(self.tokenizer),
            token_cache=_absolute(self.token_cache),
            init_from=_absolute(self.init_from),
        )

    def check(self, where: str = "") -> None:
        """Refuse settings that cannot be trained, whatever the number of processes.

        Raises:
            ConfigurationError: naming the setting, its value, and what it must be; and the file that says so, `where`.
        """
        try:
            self._check()
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}" if where else str(error)) from None

    def _check(self) -> None:
        for name, kind in KINDS.items():
            check_value(name, getattr(self, name), kind)
        recipe.resolve(self.recipe)
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ConfigurationError(
                f"hidden = {self.hidden} over heads = {self.heads}: each head must get the same even number of elements"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigurationError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}")
        if self.mesh:
            self._check_mesh(MeshSpec.parse(self.mesh))
        self._check_data()

    def _check_data(self) -> None:
        weights = self.weights
        if weights and len(weights) != len(self.data):
            raise ConfigurationError(
                f"data_weights = {self.data_weights!r} are {len(weights)} shares, but --data names {len(self.data)} "
                "sources; give one for each, in order"
            )
        if self.heldout_data and self.heldout not in (0.0, type(self).heldout):
            raise ConfigurationError(
                f"heldout = {self.heldout} keeps a share of the data to evaluate on, and heldout_data names others; "
                "give one of them"
            )

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each path of `data`, normalised; empty where none are given."""
        if not self.data_weights:
            return ()
        try:
            weights = [float(part) for part in self.data_weights.split(",")]
        except ValueError:
            weights = [0.0]
        if not all(0 < weight < 1e9 for weight in weights):
            raise ConfigurationError(
                f"data_weights = {shown_value(self.data_weights)}: must be numbers of more than 0, one for each "
                "--data, as 0.7,0.3"
            )
        return tuple(weight / math.fsum(weights) for weight in weights)

    def _check_mesh(self, axes: MeshSpec) -> None:
        if self.dp_replicate not in (1, axes.dp_replicate):
            raise ConfigurationError(
                f"dp_replicate = {self.dp_replicate}, but mesh = {axes} has dp_replicate = {axes.dp_replicate}; give "
                "it in the mesh alone"
            )
        full, tp = self.resolved(), axes.tp
        if tp == 1:
            return
        if self.heads < tp:
            raise ConfigurationError(
                f"heads = {self.heads}, but mesh = {axes} divides them over tp = {tp} processes; each needs one at "
                "least, so take a smaller tp or more heads"
            )
        for name in ("hidden", "heads", "kv_heads", "ffn"):
            size = getattr(full, name)
            if size % tp:
                raise ConfigurationError(
                    f"{name} = {size} cannot be divided evenly over tp = {tp} processes (mesh = {axes}); make it a "
                    f"multiple of {tp}, or take another tp"
                )
        weight = recipe.resolve(self.recipe).weight
        parts = weight.format.components if weight else ()
        packed = max((max(part.covers) for part in parts if part.role is Role.CODES), default=1)
        if full.ffn // tp % packed:
            raise ConfigurationError(
                f"ffn = {full.ffn} over tp = {tp} processes (mesh = {axes}) is {full.ffn // tp} each, but recipe = "
                f"{self.recipe!r} stores {packed} elements in a byte; make ffn a multiple of {tp * packed}"
            )

    def axes(self, processes: int) -> MeshSpec:
        """How that many processes are arranged; `check_ranks` says if they cannot be."""
        return MeshSpec.parse(self.mesh) if self.mesh else MeshSpec(self.dp_replicate, processes // self.dp_replicate)

    def sequences_at_once(self, axes: MeshSpec) -> int:
        """Sequences of a micro-batch of one process."""
        return self.global_batch // (axes.data_parallel * self.micro_batches)

    def divides_sequences(self, axes: MeshSpec) -> bool:
        """Whether a micro-batch is divided over tp between the GEMMs (sequence parallelism)."""
        return axes.tp > 1 and self.sequence_parallel != "off" and self.sequences_at_once(axes) % axes.tp == 0

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of processes that these settings cannot be split over.

        Raises:
            ConfigurationError: with the numbers, and what would fit.
        """
        if not self.mesh and ranks % self.dp_replicate:
            raise ConfigurationError(f"dp_replicate = {self.dp_replicate} must divide the {ranks} processes")
        axes = self.axes(ranks)
        if axes.processes != ranks:
            raise ConfigurationError(
                f"mesh = {axes} is of {axes.processes} processes, but --nproc-per-node, or the launcher, says {ranks}; "
                "make them equal, or leave --nproc-per-node out"
            )
        parts = axes.data_parallel * self.micro_batches
        if self.global_batch % parts:
            over = f"{ranks} processes" if axes.tp == 1 else f"{axes.data_parallel} data-parallel parts (mesh = {axes})"
            raise ConfigurationError(
                f"global_batch = {self.global_batch} sequences cannot be split evenly over {over} x micro_batches = "
                f"{self.micro_batches}; make it a multiple of {parts}, or take another --nproc-per-node or --mesh"
            )
        if self.sequence_parallel == "on" and axes.tp > 1 and not self.divides_sequences(axes):
            raise ConfigurationError(
                f"sequence_parallel = 'on' divides the {self.sequences_at_once(axes)} sequences of a micro-batch over "
                f"tp = {axes.tp} processes, which does not come out even; make global_batch a multiple of "
                f"{parts * axes.tp}, or take sequence_parallel = 'auto'"
            )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path and "://" not in path else path


TYPES: dict[str, type] = {f.name: type(f.default) for f in fields(TrainSettings)}
"""The type of each setting."""

KINDS: dict[str, SettingType] = {
    f.name: f.metadata["kind"](TYPES[f.name], choices=CHOICES.get(f.name, ())) for f in fields(TrainSettings)
}
"""What each setting may be."""

_LAUNCH = {
    "processes": SettingType(int, 1, _COUNT),
    "mesh": KINDS["mesh"],
    "threads": SettingType(int, 1, 4096),
    "python": SettingType(str, most=200),
    "torch": SettingType(str, most=200),
}
_CORPUS = {
    "sha256": SettingType(str, 64, 64),
    "bytes": SettingType(int, 0, (1 << 63) - 1),
    "files": SettingType(list, 68, 4200),
    "sources": SettingType(list, 1, 100),
    "heldout_files": SettingType(int, 0, _STEPS),
    "tokenizer": SettingType(str, 64, 64),
    "vocabulary": SettingType(int, 1, _SIZE),
    "end_of_document": SettingType(int, 0, _SIZE),
}
_NEEDED = {"launch": ("processes",), "corpus": ("sha256", "bytes", "files")}

_FORMER_NAMES = {"sample_bytes": "sample_tokens"}
"""Keys of earlier releases, and what they are now."""


def setting_fields() -> tuple[Field[Any], ...]:
    """The fields of `TrainSettings`, each with `panel` and `help` in its metadata."""
    return fields(TrainSettings)


def defaults() -> dict[str, Any]:
    """The default of each setting."""
    return {f.name: f.default for f in fields(TrainSettings) if f.default is not MISSING}


def from_mapping(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check names, types and ranges of settings read from a file or handed on; `TABLES` are left out.

    Raises:
        ConfigurationError: naming the key.
    """
    settings = {_FORMER_NAMES.get(name, name): value for name, value in values.items() if name not in TABLES}
    return read_table(settings, KINDS, where, "`quantshard train --help` lists them")


def launch_table(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table [launch] of a run's `config.toml`.

    Raises:
        ConfigurationError: it is missing, or naming the key.
    """
    return _table("launch", _LAUNCH, content, where)


def corpus_table(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table [corpus] of a run's `config.toml`.

    Raises:
        ConfigurationError: it is missing, or naming the key.
    """
    return _table("corpus", _CORPUS, content, where)


def _table(name: str, kinds: Mapping[str, SettingType], content: Mapping[str, Any], where: str) -> dict[str, Any]:
    table = content.get(name)
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where} is not the configuration of a run: it lacks [launch] or [corpus]")
    for key in _NEEDED[name]:
        if key not in table:
            raise ConfigurationError(f"{where} is not the configuration of a run: [{name}] lacks {key}")
    return read_table(table, kinds, f"{where}: [{name}]", f"it has {', '.join(kinds)}")


def read_settings_file(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """A TOML file as a mapping. `follow`: whether it may be a link, as one that the user has named.

    Raises:
        ConfigurationError: the file is missing, no regular file, too long, or not TOML.
    """
    return foreign.read_toml(path, MOST_BYTES, follow=follow)


def merge(flags: Mapping[str, Any], config: Path | None, known: Mapping[str, Any] | None = None) -> TrainSettings:
    """Settings from the flags that were given, over the file, over those that are `known`, over the defaults."""
    values = from_mapping(read_settings_file(config, follow=True), str(config)) if config is not None else {}
    given = {name: value for name, value in flags.items() if value is not None}
    return TrainSettings(**{**(known or {}), **values, **given})


def to_toml(settings: TrainSettings, tables: Mapping[str, Any]) -> str:
    """The text of `config.toml`: the settings, then the tables."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    return tomli_w.dumps(values) + "\n" + tomli_w.dumps(dict(tables), multiline_strings=False)
