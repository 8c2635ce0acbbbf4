"""The settings of a training run: one frozen dataclass that also defines the flags of `train` and the keys of its TOML.

`resolved` fills in derived settings. `check` refuses settings that cannot be trained, with a one-line message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from quantshard import recipe
from quantshard.errors import ConfigurationError
from quantshard.modules.activation_storage import ACTIVATION_CELLS
from quantshard.state_storage import ADAMW, ALGORITHMS, StateOptions
from quantshard.tools.trainer.settings import checks, optimizer_states
from quantshard.tools.trainer.settings.mesh import MeshSpec
from quantshard.tools.trainer.settings.optimizer_states import AUTO, MASTER_DTYPES, MOMENT_DTYPES
from quantshard.tools.trainer.settings.recipes import LayerRecipes
from quantshard.tools.trainer.settings.schema import SettingType, check_value, shown_value

_LLAMA_3: Final = {"architecture": "llama", "rope_theta": 500000.0, "norm_eps": 1e-5}

SIZES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama3-8b": {**_LLAMA_3, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336},
        "llama3.2-1b": {
            **_LLAMA_3, "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "tied": True,
        },
        "qwen3-8b": {
            "architecture": "llama", "hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128,
            "ffn": 12288, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True,
        },
        "qwen3-0.6b": {
            "architecture": "llama", "hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128,
            "ffn": 3072, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True, "tied": True,
        },
        "smollm2-135m": {
            "architecture": "llama", "hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "ffn": 1536,
            "rope_theta": 100000.0, "norm_eps": 1e-5, "tied": True,
        },
        "moe-small": {
            "architecture": "llama", "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 768, "experts": 16,
            "experts_per_token": 2, "seq_length": 512, "tied": True,
        },
        "gpt2-small": {
            "architecture": "gpt", "hidden": 768, "layers": 12, "heads": 12, "ffn": 3072, "tied": True,
            "seq_length": 1024, "norm_eps": 1e-5,
        },
    }
)  # fmt: skip
"""Sizes of known models, by the name in `--model NAME`, for the built-in decoder. Flags take precedence.

Sources: config.json of meta-llama/Meta-Llama-3-8B, meta-llama/Llama-3.2-1B (without its rotary scaling, which is for
more than 8192 tokens), Qwen/Qwen3-8B, Qwen/Qwen3-0.6B, HuggingFaceTB/SmolLM2-135M and openai-community/gpt2. moe-small
is not a published model: a mixture of experts for one GPU, with 157 million parameters outside of the embedding and 25
million of them active per token.
"""

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_FLOATS: Final = tuple(_DTYPES)
_MOMENTS: Final = (AUTO, *MOMENT_DTYPES)
_WIDTH_MULTIPLE = 32

COUNT, SIZE, STEPS = 1 << 20, 1 << 24, 10**9
"""Upper limits: of layers, heads and processes; of elements and sequences; of steps."""


def _setting(panel: str, default: Any, help: str, least: float = 0, most: float = 4096, **bounds: Any) -> Any:
    """Define a setting; `least`, `most` and `bounds` are passed to its `SettingType`."""
    kind = SettingType(type(default), least, most, **bounds)
    return field(default=default, metadata={"panel": panel, "help": help, "kind": kind})


_model, _data, _training, _precision, _running, _sharding, _logs = (
    partial(_setting, panel) for panel in ("Model", "Data", "Training", "Precision", "Running", "Sharding", "Logs")
)


@dataclass(frozen=True)
class TrainSettings:
    """Everything that determines a run, except the number of ranks and the content of the data."""

    model: str = _model("", f"a Hugging Face folder or config.json, or sizes: {', '.join(SIZES)}")
    random_weights: bool = _model(False, "begin with random weights though the folder of the model has some")
    architecture: str = _model(
        "llama", "llama (RMSNorm, SwiGLU, rotary) or gpt (LayerNorm, GELU, bias)", choices=("llama", "gpt")
    )
    hidden: int = _model(256, "width of the model", 1, SIZE)
    layers: int = _model(4, "number of transformer layers", 1, COUNT)
    heads: int = _model(4, "attention heads", 1, COUNT)
    kv_heads: int = _model(0, "heads of keys and values (grouped-query attention); 0: as many as heads", 0, COUNT)
    ffn: int = _model(0, "width of the feed-forward part; 0: 8/3 (llama) or 4 (gpt) times hidden", 0, SIZE)
    seq_length: int = _model(128, "tokens of one sequence", 2, SIZE)
    experts: int = _model(0, "experts of each layer of a llama, of width ffn; 0: one MLP", 0, COUNT)
    experts_per_token: int = _model(2, "experts that a token goes to", 1, COUNT)
    head_dim: int = _model(0, "features of a head; 0: hidden over heads", 0, SIZE)
    rope_theta: float = _model(10000.0, "base of the rotary positions of a llama", 1, 1e12)
    norm_eps: float = _model(1e-5, "epsilon of the normalizations", 0, 1, more=True)
    qk_norm: bool = _model(False, "normalize the heads of queries and keys, before they are rotated")
    tied: bool = _model(False, "use the embedding as the output head too")
    dropout: float = _model(0.0, "probability of dropout", 0, 1, less=True)
    init_from: str = _model("", "weights to begin with, of a checkpoint or of safetensors")

    data: tuple[str, ...] = _data(
        (), "file or folder of text, .jsonl, .parquet, .bin; repeatable. Default: the source of Python's library", 1
    )
    data_weights: str = _data("", "share of the sequences that each --data gives, as 0.7,0.3. Default: by length")
    tokenizer: str = _data("", "folder with tokenizer.json, or the file. Default: tokens are bytes")
    end_of_document: str = _data("", "token that ends a document. Default: the tokenizer's eos_token")
    vocabulary: int = _data(0, "tokens of the model; 0: those of the tokenizer, up to a multiple of 128", 0, SIZE)
    text_field: str = _data("text", "key or column of texts in .jsonl, .parquet and datasets", 1)
    data_split: str = _data("train", "split of a dataset's folder", 1, 200)
    data_format: str = _data("auto", "auto: by name; or text: the bytes of every file", choices=("auto", "text"))
    token_cache: str = _data("", "folder for the tokens that are made of data. Default: in the run's")
    heldout: float = _data(0.02, "share of the text, at its end, that is kept to evaluate on", 0, 1, less=True)
    heldout_data: tuple[str, ...] = _data((), "file or folder to evaluate on, instead of a share; repeatable", 1)
    eval_sequences: int = _data(32, "sequences of the held-out text that an evaluation reads", 1, SIZE)

    steps: int = _training(200, "optimizer steps", 1, STEPS)
    global_batch: int = _training(16, "sequences of a step, of all processes", 1, SIZE)
    micro_batches: int = _training(1, "parts in which a process takes its share of a step, one by one", 1, SIZE)
    micro_batch: int = _training(0, "sequences that a process takes at once, instead of micro_batches", 0, SIZE)
    optimizer: str = _training(
        ADAMW, "adamw; lion; or muon, of hidden matrices, at AdamW's rate, and AdamW of the rest", choices=ALGORITHMS
    )
    lr: float = _training(1e-3, "highest learning rate", 0, 1e6, more=True)
    schedule: str = _training(
        "cosine", "cosine, linear, wsd or constant, after the warmup", choices=("cosine", "linear", "wsd", "constant")
    )
    warmup: int = _training(20, "steps in which lr is reached", 0, STEPS)
    decay_steps: int = _training(0, "step at which the schedule ends; 0: steps, as the run was started with", 0, STEPS)
    decay_share: float = _training(0.2, "share of decay_steps, at their end, in which wsd falls", 0, 1)
    lr_floor: float = _training(0.1, "share of lr at which the schedule ends", 0, 1)
    beta1: float = _training(0.9, "Adam's decay of the first moment; Lion's of its update", 0, 1, less=True)
    beta2: float = _training(0.95, "Adam's decay of the second moment; Lion's of its first", 0, 1, less=True)
    eps: float = _training(1e-8, "Adam's epsilon", 0, 1e6, more=True)
    momentum: float = _training(0.95, "Muon's decay of its momentum", 0, 1, less=True)
    weight_decay: float = _training(0.1, "decoupled weight decay of matrices", 0, 1e6)
    balance_loss: float = _training(0.01, "weight of the loss that spreads tokens over experts", 0, 1e6)
    z_loss: float = _training(0.0, "weight of the squared logarithm of the softmax's denominator, as 1e-4", 0, 1e6)
    ema: float = _training(0.0, "decay of an average of the weights (EMA), as 0.999; 0: none", 0, 1, less=True)
    clip: float = _training(1.0, "highest norm of the gradient; 0: no clipping", 0, 1e12)
    seed: int = _training(0, "seed of the weights and of the order of the data", 0, (1 << 63) - 1)

    recipe: str = _precision(
        recipe.AUTO,
        f"{', '.join(recipe.CHOICES)} ({recipe.AUTO_HELP}); by GEMM: nvfp4/wgrad:bf16; by layer: layers.0=bf16,*=mxfp8",
        1,
    )
    params_dtype: str = _precision(
        "bfloat16", "dtype of activations and of weights that stay unquantized", choices=_FLOATS
    )
    preset: str = _precision("", optimizer_states.HELP, 0, 200)
    master_weights: bool = _precision(True, "high-precision copies of the weights, which the optimizer trains")
    master_dtype: str = _precision(
        AUTO, f"of these copies: {', '.join(MASTER_DTYPES)}; auto: float32", choices=(AUTO, *MASTER_DTYPES)
    )
    master_remainders: str = _precision(
        AUTO,
        "on: keep of these copies only what BF16 weights and, if float16, FP8 ones lack; auto: off",
        choices=(AUTO, *optimizer_states.SWITCH),
    )
    exp_avg_dtype: str = _precision(
        AUTO, f"first moment of Adam or Lion: {', '.join(MOMENT_DTYPES)}; auto: float32", choices=_MOMENTS
    )
    exp_avg_sq_dtype: str = _precision(
        AUTO, f"Adam's second moment: {', '.join(MOMENT_DTYPES)}; auto: float32", choices=_MOMENTS
    )
    momentum_dtype: str = _precision(
        AUTO, f"Muon's momentum: {', '.join(MOMENT_DTYPES)}; auto: float32", choices=_MOMENTS
    )
    activation_storage: str = _precision(
        "high_precision",
        "what the MLP's activation reads, for backward: high_precision, or fp8",
        choices=tuple(ACTIVATION_CELLS),
    )

    save_every: int = _running(50, "steps between checkpoints; 0: only at the end", 0, STEPS)
    keep_last: int = _running(0, "newest checkpoints that are kept; 0: all", 0, STEPS)
    keep_every: int = _running(0, "with keep_last: keep checkpoints of steps that this divides too", 0, STEPS)
    checkpoints: str = _running("", "where checkpoints go instead of RUN/checkpoints: a folder, or s3://bucket/run")
    async_save: bool = _running(False, "save in the background, from a copy of the state in memory")
    eval_every: int = _running(50, "steps between evaluations; 0: only at the end", 0, STEPS)
    log_every: int = _running(1, "steps between printed lines", 1, STEPS)
    sample_every: int = _running(0, "steps between generated texts, besides the first and last", 0, STEPS)
    sample_tokens: int = _running(0, "print a generated text of this many tokens at the start and the end", 0, SIZE)
    sample_prompt: str = _running("", "what the generated text goes on from")
    peak_tflops: float = _running(0.0, "peak of a device, for MFU; 0: of BF16, where the GPU is known", 0, 1e9)
    recompute: str = _running(
        "none",
        "what is computed again in backward: none, activation or layer",
        choices=("none", "activation", "layer"),
    )
    recompute_every: int = _running(1, "every how many layers, where recompute is layer", 1, COUNT)
    compile: bool = _running(False, "torch.compile of each layer")
    cuda_graphs: bool = _running(False, "replay each step from a CUDA graph, for models that wait for the host")
    profile: int = _running(0, "steps that torch.profiler traces after the third, into RUN/profile", 0, 1000)
    device: str = _running("auto", "cpu, cuda, or auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    deterministic: bool = _running(True, "the same bits in every run on the same hardware and software")
    threads: int = _running(0, "CPU threads of a process; 0: OMP_NUM_THREADS, or 1 of several processes", 0)

    mesh: str = _sharding(
        "", "processes by axis: dp_replicate, dp_shard (default), ep (experts) and tp: dp_shard=2,tp=2"
    )
    dp_replicate: int = _sharding(1, "copies of the model (HSDP), where no mesh is given", 1, COUNT)
    sequence_parallel: str = _sharding(
        "auto",
        "divide sequences over tp between GEMMs: on, off, or auto: where a micro-batch can be divided",
        choices=("auto", "on", "off"),
    )
    reshard_after_forward: bool = _sharding(True, "free gathered weights between forward and backward")
    reduce_dtype: str = _sharding(
        "float32", "dtype of gradients' sums over processes; bfloat16 sends half the bytes", choices=_FLOATS
    )

    tensorboard: bool = _logs(False, "write for TensorBoard too, into the run's folder tensorboard")
    wandb: str = _logs("", "project of Weights & Biases to log to; WANDB_MODE=offline needs no account", 0, 128)
    statistics_every: int = _logs(
        0, "steps between statistics of quantization, by layer and operand; 0: none", 0, STEPS
    )
    alarm_loss_spike: float = _logs(
        10.0, "alarm if the loss is so many deviations above the median of the last 50; 0: none", 0, 1e6
    )
    alarm_saturation: float = _logs(
        0.01, "alarm above this share of saturated values, in a step with statistics; 1: none", 0, 1, more=True
    )
    log_level: str = _logs(
        "auto",
        "of logs/rank-N.log: debug, info, warning, error, or auto: QUANTSHARD_LOG, else info",
        choices=("auto", "debug", "info", "warning", "error"),
    )

    @property
    def head_size(self) -> int:
        """Features per head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def is_by_sizes(self) -> bool:
        """Whether the model is the built-in decoder, not a transformers model."""
        return not self.model or self.model in SIZES

    @property
    def torch_params_dtype(self) -> torch.dtype:
        """`params_dtype` as a torch dtype."""
        return _DTYPES[self.params_dtype]

    @property
    def torch_reduce_dtype(self) -> torch.dtype:
        """`reduce_dtype` as a torch dtype."""
        return _DTYPES[self.reduce_dtype]

    @property
    def state_options(self) -> StateOptions:
        """Storage options of the optimizer's masters and moments."""
        settings = {name: getattr(self, name) for name in optimizer_states.STATE_SETTINGS}
        return optimizer_states.state_options(self.preset, settings)

    def resolved(self) -> TrainSettings:
        """Return these settings with derived settings filled in and absolute paths."""
        factor = 8 / 3 if self.architecture == "llama" else 4.0
        ffn = -int(-self.hidden * factor // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        axes = MeshSpec.parse(self.mesh) if self.mesh else None
        return replace(
            self,
            recipe=LayerRecipes.parse(self.recipe).text,
            mesh=str(axes) if axes else "",
            dp_replicate=1 if axes else self.dp_replicate,  # part of the mesh
            kv_heads=self.kv_heads or self.heads,
            ffn=self.ffn or ffn,
            decay_steps=self.decay_steps or self.steps,
            data=tuple(map(_absolute, self.data)),
            heldout=0.0 if self.heldout_data else self.heldout,
            heldout_data=tuple(map(_absolute, self.heldout_data)),
            tokenizer=_absolute(self.tokenizer),
            token_cache=_absolute(self.token_cache),
            init_from=_absolute(self.init_from),
            checkpoints=_absolute(self.checkpoints),
            model=self.model if self.is_by_sizes else _absolute(self.model),
            preset=optimizer_states.named_preset(self.preset),
            **optimizer_states.as_settings(self.state_options),
        )

    def check(self, where: str = "") -> None:
        """Refuse settings that cannot be trained on any number of ranks."""
        try:
            for name, kind in KINDS.items():
                check_value(name, getattr(self, name), kind)
            _ = LayerRecipes.parse(self.recipe), self.state_options, self.weights
            checks.check(self)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}" if where else str(error)) from None

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that these settings cannot be divided over."""
        checks.check_ranks(self, ranks)

    @property
    def weights(self) -> tuple[float, ...]:
        """Share of each path of `data`, normalized to sum 1; empty if not set."""
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

    def axes(self, processes: int) -> MeshSpec:
        """Return the mesh for a number of ranks; `check_ranks` validates the number."""
        return MeshSpec.parse(self.mesh) if self.mesh else MeshSpec(self.dp_replicate, processes // self.dp_replicate)

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


def setting_fields() -> tuple[Field[Any], ...]:
    """Return the fields of `TrainSettings`, with `panel`, `help` and `kind` in their metadata."""
    return fields(TrainSettings)


KINDS: dict[str, SettingType] = {setting.name: setting.metadata["kind"] for setting in setting_fields()}
"""The valid values of each setting."""
