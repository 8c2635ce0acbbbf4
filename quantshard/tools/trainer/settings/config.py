"""The settings of a training run: one frozen dataclass that also defines the flags of `train` and the keys of its TOML.

A setting comes from its flag, then from `--config FILE`, then from the default. `resolved` fills in derived settings.
`check` refuses settings that cannot be trained, with a one-line message.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch

from quantshard import foreign, recipe
from quantshard.errors import ConfigurationError, shown
from quantshard.modules.activation_storage import ACTIVATION_SPECS
from quantshard.modules.grouped_linear import block_together
from quantshard.state_storage import ADAMW, ALGORITHMS, PRESETS, StateOptions
from quantshard.tools.trainer.settings import values
from quantshard.tools.trainer.settings.values import AUTO, MOMENT_DTYPES, LayerRecipes, MeshSpec, SettingType

_FLOATS: Final = ("bfloat16", "float32")
_PRESETS = ", ".join((*PRESETS, values.FLOAT32_STATES))
_WIDTH_MULTIPLE = 32

COUNT, SIZE, STEPS = 1 << 20, 1 << 24, 10**9
"""Upper limits: of layers, heads and processes; of elements and sequences; of steps."""


def _setting(panel: str, default: Any, help: str, least: float = 0, most: float = 4096, **bounds: Any) -> Any:
    """Define a setting; `least`, `most` and `bounds` are passed to its `SettingType`."""
    kind = SettingType(type(default), least, most, **bounds)
    return field(default=default, metadata={"panel": panel, "help": help, "kind": kind})


_model, _data, _train, _precision, _run, _shard, _logs = (
    partial(_setting, panel) for panel in ("Model", "Data", "Training", "Precision", "Running", "Sharding", "Logs")
)


def _moment(name: str) -> Any:
    help = f"dtype of the {name}: {', '.join(MOMENT_DTYPES)}; auto: float32"
    return _precision(AUTO, help, choices=(AUTO, *MOMENT_DTYPES))


@dataclass(frozen=True)
class TrainSettings:
    """Everything that determines a run, except the number of ranks and the content of the data."""

    model: str = _model("", f"a Hugging Face folder or config.json, or sizes: {', '.join(values.SIZES)}")
    random_weights: bool = _model(False, "start from random weights even if the model folder has weights")
    architecture: str = _model(
        "llama", "llama (RMSNorm, SwiGLU, rotary) or gpt (LayerNorm, GELU, bias)", choices=("llama", "gpt")
    )
    hidden: int = _model(256, "hidden size", 1, SIZE)
    layers: int = _model(4, "number of transformer layers", 1, COUNT)
    heads: int = _model(4, "attention heads", 1, COUNT)
    kv_heads: int = _model(0, "key and value heads (grouped-query attention); 0: same as heads", 0, COUNT)
    ffn: int = _model(0, "size of the MLP; 0: 8/3 (llama) or 4 (gpt) times hidden", 0, SIZE)
    seq_length: int = _model(128, "tokens per sequence", 2, SIZE)
    experts: int = _model(0, "experts per llama layer, each of size ffn; 0: one MLP", 0, COUNT)
    experts_per_token: int = _model(2, "experts that process each token", 1, COUNT)
    capacity_factor: float = _model(0.0, "most rows of an expert, over an even share; 0: no limit", 0, 1e6)
    head_dim: int = _model(0, "size of a head; 0: hidden / heads", 0, SIZE)
    rope_theta: float = _model(10000.0, "base of the rotary position embedding (llama)", 1, 1e12)
    norm_eps: float = _model(1e-5, "epsilon of the normalizations", 0, 1, more=True)
    qk_norm: bool = _model(False, "normalize query and key heads before the rotary embedding")
    tied: bool = _model(False, "tie the output head to the embedding")
    dropout: float = _model(0.0, "dropout probability", 0, 1, less=True)
    init_from: str = _model("", "initial weights: a checkpoint or safetensors")

    data: tuple[str, ...] = _data(
        (), "file or folder of text, .jsonl, .parquet, .bin; repeatable. Default: the source of Python's library", 1
    )
    data_weights: str = _data(
        "", "share of sequences from each --data, such as 0.7,0.3. Default: proportional to length"
    )
    tokenizer: str = _data("", "tokenizer.json or its folder. Default: bytes")
    end_of_document: str = _data("", "token at the end of a document. Default: the tokenizer's eos_token")
    vocabulary: int = _data(0, "vocabulary size; 0: the tokenizer's, rounded up to a multiple of 128", 0, SIZE)
    text_field: str = _data("text", "key or column with the text in .jsonl, .parquet and datasets", 1)
    data_split: str = _data("train", "split to use from a dataset folder", 1, 200)
    data_format: str = _data("auto", "auto: by file name; text: read every file as text", choices=("auto", "text"))
    token_cache: str = _data("", "folder for tokenized data. Default: in the run folder")
    heldout: float = _data(0.02, "share of the text, at its end, held out for evaluation", 0, 1, less=True)
    heldout_data: tuple[str, ...] = _data(
        (), "file or folder for evaluation instead of a held-out share; repeatable", 1
    )
    packing: str = _data(
        values.DOCUMENTS,
        "documents: attention stays within a document; best-fit: also pack whole documents; stream: no boundaries",
        choices=values.PACKINGS,
    )
    eval_sequences: int = _data(32, "sequences per evaluation", 1, SIZE)

    steps: int = _train(200, "optimizer steps", 1, STEPS)
    global_batch: int = _train(16, "sequences per step over all processes", 1, SIZE)
    micro_batches: int = _train(1, "gradient accumulation: passes per step", 1, SIZE)
    micro_batch: int = _train(0, "sequences per pass and process; sets micro_batches", 0, SIZE)
    optimizer: str = _train(ADAMW, "adamw, lion, or muon (hidden matrices; AdamW trains the rest)", choices=ALGORITHMS)
    lr: float = _train(1e-3, "peak learning rate", 0, 1e6, more=True)
    schedule: str = _train(
        "cosine", "after warmup: cosine, linear, wsd or constant", choices=("cosine", "linear", "wsd", "constant")
    )
    warmup: int = _train(20, "warmup steps", 0, STEPS)
    decay_steps: int = _train(0, "step at which the schedule ends; 0: the steps of the run's first start", 0, STEPS)
    decay_share: float = _train(0.2, "final share of decay_steps in which wsd decays", 0, 1)
    lr_floor: float = _train(0.1, "final learning rate as a share of lr", 0, 1)
    beta1: float = _train(0.9, "Adam: decay of the first moment; Lion: interpolation of the update", 0, 1, less=True)
    beta2: float = _train(0.95, "Adam: decay of the second moment; Lion: decay of the moment", 0, 1, less=True)
    eps: float = _train(1e-8, "Adam's epsilon", 0, 1e6, more=True)
    momentum: float = _train(0.95, "Muon: decay of the momentum", 0, 1, less=True)
    weight_decay: float = _train(0.1, "decoupled weight decay, applied to matrices", 0, 1e6)
    router_balance: str = _train(
        values.AUXILIARY, f"what balances experts: {', '.join(values.BALANCES)}", choices=values.BALANCES
    )
    balance_loss: float = _train(0.01, "weight of the load-balancing loss of experts", 0, 1e6)
    router_bias_rate: float = _train(1e-3, "change of the biases of experts per step", 0, 1, more=True)
    router_z_loss: float = _train(0.0, "weight of the z-loss of routers, such as 1e-3", 0, 1e6)
    z_loss: float = _train(0.0, "weight of the z-loss (squared logsumexp of the logits), such as 1e-4", 0, 1e6)
    ema: float = _train(
        0.0, "decay of an exponential moving average of the weights, such as 0.999; 0: none", 0, 1, less=True
    )
    clip: float = _train(1.0, "maximum gradient norm; 0: no clipping", 0, 1e12)
    seed: int = _train(0, "seed for weights and data order", 0, (1 << 63) - 1)

    recipe: str = _precision(
        recipe.AUTO,
        f"{', '.join(recipe.CHOICES)} ({recipe.AUTO_HELP}); by GEMM: nvfp4/wgrad:bf16; by layer: layers.0=bf16,*=mxfp8",
        1,
    )
    params_dtype: str = _precision("bfloat16", "dtype of activations and unquantized weights", choices=_FLOATS)
    preset: str = _precision("", f"storage of masters and moments, instead of the settings below: {_PRESETS}", 0, 200)
    master_weights: bool = _precision(True, "keep master weights")
    master_dtype: str = _precision(
        AUTO,
        f"dtype of master weights: {', '.join(values.MASTER_DTYPES)}; auto: float32",
        choices=(AUTO, *values.MASTER_DTYPES),
    )
    master_remainders: str = _precision(
        AUTO, "on: store only the bits that the weight lacks; auto: off", choices=(AUTO, *values.SWITCH)
    )
    exp_avg_dtype: str = _moment("first moment (Adam, Lion)")
    exp_avg_sq_dtype: str = _moment("second moment (Adam)")
    momentum_dtype: str = _moment("momentum (Muon)")
    release_gradients: bool = _precision(
        False, "update weights during backward and free their gradients; clips by the norm of the step before"
    )
    activation_storage: str = _precision(
        "high_precision",
        "how the activation's input is kept for backward: high_precision or fp8",
        choices=tuple(ACTIVATION_SPECS),
    )

    save_every: int = _run(50, "steps between checkpoints; 0: only the last step", 0, STEPS)
    keep_last: int = _run(0, "number of newest checkpoints to keep; 0: all", 0, STEPS)
    keep_every: int = _run(0, "with keep_last: also keep checkpoints of multiples of this step", 0, STEPS)
    checkpoints: str = _run("", "folder or URL (s3://bucket/run) for checkpoints. Default: RUN/checkpoints")
    async_save: bool = _run(False, "save in the background from a copy in memory")
    eval_every: int = _run(50, "steps between evaluations; 0: only the last step", 0, STEPS)
    sample_tokens: int = _run(0, "tokens of a text generated before and after training; 0: none", 0, SIZE)
    sample_prompt: str = _run("", "prompt of the samples")
    recompute: str = _run(
        "none", "recomputed in backward: none, activation or layer", choices=("none", "activation", "layer")
    )
    compile: bool = _run(False, "compile each layer with torch.compile")
    cuda_graphs: bool = _run(False, "replay each step from a CUDA graph; helps models limited by the host")
    profile: int = _run(0, "steps to trace with torch.profiler after the third, into RUN/profile", 0, 1000)
    device: str = _run("auto", "cpu, cuda, or auto: cuda if available", choices=("auto", "cpu", "cuda"))
    deterministic: bool = _run(True, "same bits in every run on the same hardware and software")
    threads: int = _run(0, "CPU threads per process; 0: OMP_NUM_THREADS, or 1 if there are several processes", 0)

    mesh: str = _shard("", "sizes of the axes dp_replicate, dp_shard, ep, cp and tp, such as dp_shard=2,tp=2")
    sequence_parallel: str = _shard(
        "auto",
        "sequence parallelism over tp: on, off, or auto: if a micro-batch is divisible",
        choices=("auto", "on", "off"),
    )
    rotate_method: str = _shard("allgather", "keys of cp: allgather or alltoall", choices=("allgather", "alltoall"))
    reduce_dtype: str = _shard("float32", "dtype of gradient reduction; bfloat16 halves the traffic", choices=_FLOATS)

    tensorboard: bool = _logs(False, "also write TensorBoard logs, into RUN/tensorboard")
    wandb: str = _logs("", "Weights & Biases project; WANDB_MODE=offline needs no account", 0, 128)
    statistics_every: int = _logs(0, "steps between quantization statistics per layer and operand; 0: none", 0, STEPS)
    alarm_loss_spike: float = _logs(
        10.0, "alarm if the loss is this many deviations above the median of 50 steps; 0: off", 0, 1e6
    )
    alarm_saturation: float = _logs(
        0.01, "alarm above this share of saturated values, in steps with statistics; 1: off", 0, 1, more=True
    )
    alarm_dead_experts: float = _logs(0.1, "alarm for experts below this share of the mean load; 0: off", 0, 1)
    log_level: str = _logs(
        "auto",
        "level of logs/rank-N.log; auto: QUANTSHARD_LOG or info",
        choices=("auto", "debug", "info", "warning", "error"),
    )

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def is_by_sizes(self) -> bool:
        """Whether the model is the built-in decoder, not a transformers model."""
        return not self.model or self.model in values.SIZES

    @property
    def torch_params_dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.params_dtype))

    @property
    def torch_reduce_dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.reduce_dtype))

    @property
    def state_options(self) -> StateOptions:
        return values.state_options(self.preset, {name: getattr(self, name) for name in values.STATE_SETTINGS})

    @property
    def weights(self) -> tuple[float, ...]:
        """Share of each path of `data`, normalized to sum 1; empty if not set."""
        if not self.data_weights:
            return ()
        try:
            weights = [float(part) for part in self.data_weights.split(",")]
        except ValueError:
            weights = [0.0]
        if len(weights) != len(self.data) or not all(0 < weight < 1e9 for weight in weights):
            given = f"data_weights = {shown(self.data_weights)}"
            raise ConfigurationError(f"{given}: give a number above 0 for each of the {len(self.data)} --data")
        return tuple(weight / math.fsum(weights) for weight in weights)

    def resolved(self) -> "TrainSettings":
        """Return these settings with derived settings filled in and absolute paths."""
        factor = 8 / 3 if self.architecture == "llama" else 4.0
        ffn = -int(-self.hidden * factor // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        names = ("tokenizer", "token_cache", "init_from", "checkpoints")
        paths: dict[str, Any] = {name: _absolute(getattr(self, name)) for name in names}
        return replace(
            self,
            recipe=LayerRecipes.parse(self.recipe).text,
            mesh=str(MeshSpec.parse(self.mesh)) if self.mesh else "",
            kv_heads=self.kv_heads or self.heads,
            ffn=self.ffn or ffn,
            decay_steps=self.decay_steps or self.steps,
            data=tuple(map(_absolute, self.data)),
            heldout=0.0 if self.heldout_data else self.heldout,
            heldout_data=tuple(map(_absolute, self.heldout_data)),
            model=self.model if self.is_by_sizes else _absolute(self.model),
            preset=values.named_preset(self.preset),
            **paths,
            **values.as_settings(self.state_options),
        )

    def check(self, where: str = "") -> None:
        """Refuse settings that cannot be trained on any number of ranks."""
        try:
            for name, kind in KINDS.items():
                values.check_value(name, getattr(self, name), kind)
            _ = LayerRecipes.parse(self.recipe), self.state_options, self.weights
            for conflict in _conflicts(self):
                raise ConfigurationError(conflict)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}" if where else str(error)) from None

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that these settings cannot be divided over."""
        for conflict in _conflicts_of_ranks(self, ranks):
            raise ConfigurationError(conflict)

    def axes(self, processes: int) -> MeshSpec:
        """Return the mesh for a number of ranks; `check_ranks` validates the number."""
        return MeshSpec.parse(self.mesh) if self.mesh else MeshSpec(dp_shard=processes)

    def parts(self, axes: MeshSpec) -> int:
        """Return the number of micro-batches in a rank's share of a step."""
        if not self.micro_batch:
            return self.micro_batches
        return max(1, self.global_batch // (axes.data_parallel * self.micro_batch))

    def sequences_at_once(self, axes: MeshSpec) -> int:
        """Return the number of sequences in a micro-batch of one rank."""
        return self.global_batch // (axes.data_parallel * self.parts(axes))

    def divides_sequences(self, axes: MeshSpec) -> bool:
        """Return True if micro-batches are divided over tp between GEMMs (sequence parallelism)."""
        return axes.tp > 1 and self.sequence_parallel != "off" and self.sequences_at_once(axes) % axes.tp == 0


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path and "://" not in path else path


KINDS: dict[str, SettingType] = {setting.name: setting.metadata["kind"] for setting in fields(TrainSettings)}
"""The valid values of each setting."""


def _conflicts(settings: TrainSettings) -> Iterator[str]:
    """Yield a message for each combination of settings that cannot be trained."""
    if settings.micro_batch and settings.micro_batches > 1:
        yield "micro_batch sets the number of passes; give micro_batch or micro_batches, not both"
    if settings.heldout_data and settings.heldout not in (0.0, TrainSettings.heldout):
        yield "heldout_data replaces the held-out share of the text; give heldout or heldout_data, not both"
    if settings.head_size % 2 or (not settings.head_dim and settings.hidden % settings.heads):
        yield (
            f"hidden = {settings.hidden} over heads = {settings.heads}: each head must get the same even number of "
            "elements; change one, or give an even head_dim"
        )
    if settings.experts and settings.experts_per_token > settings.experts:
        yield f"experts_per_token = {settings.experts_per_token}, but there are experts = {settings.experts}"
    axes = settings.axes(1)
    if axes.ep > 1 and settings.is_by_sizes and (not settings.experts or settings.experts % axes.ep):
        yield f"experts = {settings.experts} cannot be divided over ep = {axes.ep}; take a multiple of {axes.ep}"
    if axes.cp > 1 and settings.seq_length % (2 * axes.cp):
        yield f"seq_length = {settings.seq_length} is not divisible by 2 x cp = {2 * axes.cp}; choose a multiple"
    if axes.cp > 1 and settings.packing != values.STREAM and settings.rotate_method == "alltoall":
        yield f"packing = {settings.packing!r} needs rotate_method = 'allgather'; change one"
    yield from _unsupported_features(settings, axes)


def _unsupported_features(settings: TrainSettings, axes: MeshSpec) -> Iterator[str]:
    """Yield a message for each feature that the model, the mesh, the compiler or a CUDA graph lacks."""
    layer_features = {
        "recompute = 'activation'": settings.recompute == "activation",
        "activation_storage = 'fp8'": settings.activation_storage == "fp8",
        "tp in the mesh": axes.tp > 1,
    }
    lacking: list[tuple[str, dict[str, bool]]] = []
    if not settings.is_by_sizes:
        lacking.append(("a transformers model", {"dropout": settings.dropout > 0, **layer_features}))
    elif settings.experts:
        is_gpt = settings.architecture == "gpt"
        lacking.append(("experts", {**layer_features, "architecture = 'gpt'": is_gpt, "compile": settings.compile}))
    if settings.cuda_graphs:
        recipes = LayerRecipes.parse(settings.recipe).recipes.values() if settings.experts else ()
        one_by_one = [recipe.name for recipe in recipes if recipe.table and block_together(recipe) is None]
        eager = {
            "dropout": settings.dropout > 0,
            "master_weights = false": not settings.master_weights,
            "statistics_every = 1": settings.statistics_every == 1,
            "ep in the mesh": axes.ep > 1,
            **{f"experts by {name!r}, which run one at a time": True for name in one_by_one},
        }
        lacking.append(("cuda_graphs", eager))
    if axes.cp > 1:
        unsplit = {"a transformers model": not settings.is_by_sizes, "ep in the mesh": axes.ep > 1}
        unsplit["a balance loss per sequence"] = values.SEQUENCE in settings.router_balance
        unsplit |= {name: getattr(settings, name) > 0 for name in ("compile", "cuda_graphs", "capacity_factor")}
        lacking.append(("cp in the mesh", unsplit))
    if settings.release_gradients:
        lacking.append(("release_gradients", {"statistics_every": settings.statistics_every > 0}))
    if settings.compile and settings.recipe != "bf16":
        lacking.append(("compile with quantized layers", {"tp in the mesh": axes.tp > 1}))
    for what, features in lacking:
        for name in [name for name, enabled in features.items() if enabled]:
            yield f"{what} cannot be combined with {name}; leave one out"


def _conflicts_of_ranks(settings: TrainSettings, ranks: int) -> Iterator[str]:
    """Yield a message for each size that a number of ranks does not divide."""
    axes = settings.axes(ranks)
    if axes.processes != ranks:
        yield f"mesh = {axes} is of {axes.processes} processes, but {ranks} are started; make them equal"
    name = "micro_batch" if settings.micro_batch else "micro_batches"
    parts = axes.data_parallel * (times := getattr(settings, name))
    if settings.global_batch % parts:
        yield (
            f"global_batch = {settings.global_batch} cannot be split evenly over {axes.data_parallel} data-parallel "
            f"processes x {name} = {times}; make it a multiple of {parts}"
        )
    if settings.sequence_parallel == "on" and axes.tp > 1 and not settings.divides_sequences(axes):
        yield (
            f"sequence_parallel = 'on' cannot divide the {settings.sequences_at_once(axes)} sequences of a micro-batch "
            f"over tp = {axes.tp}; make global_batch a multiple of {parts * axes.tp}, or take 'auto'"
        )


TABLES = ("launch", "corpus")
"""Tables of a run's `config.toml` in addition to the settings; `--config` skips them."""


def from_mapping(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check names, types and ranges of settings from a file or another process; `TABLES` are left out."""
    settings = {name: value for name, value in content.items() if name not in TABLES}
    if "corpus" in content:
        # a run of a release without this setting
        settings.setdefault("packing", values.STREAM)
    if isinstance(table := settings.get("recipe"), dict):
        settings["recipe"] = values.recipe_text(table, where)
    return values.read_table(settings, KINDS, where, "`quantshard train --help` lists them")


def read_settings_file(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Read a TOML file. `follow`: accept a link, if the user named the file."""
    return foreign.read_toml(path, foreign.FILE_BYTES["run"], follow=follow)


def merged_values(flags: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings of explicit flags and of a file. A flag `preset` replaces all of the file's `STATE_SETTINGS`."""
    replaced = values.STATE_SETTINGS if flags.get("preset") else ()
    return {name: value for name, value in config.items() if name not in replaced} | dict(flags)
