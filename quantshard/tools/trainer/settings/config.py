"""The settings of a training run: one frozen dataclass that also defines the flags of `train` and the keys of its TOML.

`resolved` fills in derived settings. `check` refuses settings that cannot be trained, with a one-line message.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantshard import recipe
from quantshard.errors import ConfigurationError
from quantshard.formats import Role
from quantshard.modules.activation_storage import ACTIVATION_CELLS
from quantshard.state_storage import ADAMW, ALGORITHMS, StateOptions
from quantshard.tools.trainer.settings import optimizer_states
from quantshard.tools.trainer.settings.combinations import check_combinations
from quantshard.tools.trainer.settings.mesh import MeshSpec
from quantshard.tools.trainer.settings.optimizer_states import AUTO, MASTER_DTYPES, MOMENT_DTYPES
from quantshard.tools.trainer.settings.recipes import LayerRecipes
from quantshard.tools.trainer.settings.schema import SettingType, check_value, shown_value
from quantshard.tools.trainer.settings.sizes import SIZES

CHOICES = {
    "architecture": ("llama", "gpt"),
    "optimizer": ALGORITHMS,
    "schedule": ("cosine", "linear", "wsd", "constant"),
    "recompute": ("none", "activation", "layer"),
    "activation_storage": tuple(ACTIVATION_CELLS),
    "params_dtype": ("bfloat16", "float32"),
    "reduce_dtype": ("bfloat16", "float32"),
    "master_dtype": (AUTO, *MASTER_DTYPES),
    "master_remainders": (AUTO, *optimizer_states.SWITCH),
    "exp_avg_dtype": (AUTO, *MOMENT_DTYPES),
    "exp_avg_sq_dtype": (AUTO, *MOMENT_DTYPES),
    "momentum_dtype": (AUTO, *MOMENT_DTYPES),
    "sequence_parallel": ("auto", "on", "off"),
    "device": ("auto", "cpu", "cuda"),
    "data_format": ("auto", "text"),
    "log_level": ("auto", "debug", "info", "warning", "error"),
}
"""Settings with a fixed set of values."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_WIDTH_MULTIPLE = 32


COUNT, SIZE, STEPS = 1 << 20, 1 << 24, 10**9
"""Upper limits: of layers, heads and processes; of elements and sequences; of steps."""


def _setting(default: Any, panel: str, help: str, least: float = 0, most: float = 4096, **bounds: Any) -> Any:
    """Define a setting; `least`, `most` and `bounds` are passed to its `SettingType`."""
    kind = partial(SettingType, least=least, most=most, **bounds)
    return field(default=default, metadata={"panel": panel, "help": help, "kind": kind})


@dataclass(frozen=True)
class TrainSettings:
    """Everything that determines a run, except the number of ranks and the content of the data."""

    model: str = _setting(
        "",
        "Model",
        f"a Hugging Face folder or config.json, or sizes: {', '.join(SIZES)}",
    )
    random_weights: bool = _setting(False, "Model", "begin with random weights though the folder of the model has some")
    architecture: str = _setting("llama", "Model", "llama (RMSNorm, SwiGLU, rotary) or gpt (LayerNorm, GELU, bias)")
    hidden: int = _setting(256, "Model", "width of the model", 1, SIZE)
    layers: int = _setting(4, "Model", "number of transformer layers", 1, COUNT)
    heads: int = _setting(4, "Model", "attention heads", 1, COUNT)
    kv_heads: int = _setting(
        0, "Model", "heads of keys and values (grouped-query attention); 0: as many as heads", 0, COUNT
    )
    ffn: int = _setting(0, "Model", "width of the feed-forward part; 0: 8/3 (llama) or 4 (gpt) times hidden", 0, SIZE)
    seq_length: int = _setting(128, "Model", "tokens of one sequence", 2, SIZE)
    experts: int = _setting(0, "Model", "experts of each layer of a llama, of width ffn; 0: one MLP", 0, COUNT)
    experts_per_token: int = _setting(2, "Model", "experts that a token goes to", 1, COUNT)
    head_dim: int = _setting(0, "Model", "features of a head; 0: hidden over heads", 0, SIZE)
    rope_theta: float = _setting(10000.0, "Model", "base of the rotary positions of a llama", 1, 1e12)
    norm_eps: float = _setting(1e-5, "Model", "epsilon of the normalizations", 0, 1, more=True)
    qk_norm: bool = _setting(False, "Model", "normalize the heads of queries and keys, before they are rotated")
    tied: bool = _setting(False, "Model", "use the embedding as the output head too")
    dropout: float = _setting(0.0, "Model", "probability of dropout", 0, 1, less=True)

    init_from: str = _setting("", "Model", "weights to begin with, of a checkpoint or of safetensors")

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
    vocabulary: int = _setting(
        0, "Data", "tokens that the model has; 0: as many as the tokenizer, rounded up to a multiple of 128", 0, SIZE
    )
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
    eval_sequences: int = _setting(32, "Data", "sequences of the held-out text that an evaluation reads", 1, SIZE)

    steps: int = _setting(200, "Training", "optimizer steps", 1, STEPS)
    global_batch: int = _setting(16, "Training", "sequences of a step, of all processes", 1, SIZE)
    micro_batches: int = _setting(
        1, "Training", "parts in which a process takes its share of a step, one by one", 1, SIZE
    )
    micro_batch: int = _setting(
        0,
        "Training",
        "sequences that a process takes at once, from which micro_batches follows; 0: not given",
        0,
        SIZE,
    )
    optimizer: str = _setting(
        ADAMW, "Training", "adamw; lion; or muon, of hidden matrices, at AdamW's rate, and AdamW of the rest"
    )
    lr: float = _setting(1e-3, "Training", "highest learning rate", 0, 1e6, more=True)
    schedule: str = _setting("cosine", "Training", "cosine, linear, wsd or constant, after the warmup")
    warmup: int = _setting(20, "Training", "steps in which lr is reached", 0, STEPS)
    decay_steps: int = _setting(
        0, "Training", "step at which the schedule ends; 0: steps, as the run was started with", 0, STEPS
    )
    decay_share: float = _setting(0.2, "Training", "share of decay_steps, at their end, in which wsd falls", 0, 1)
    lr_floor: float = _setting(0.1, "Training", "share of lr at which the schedule ends", 0, 1)
    beta1: float = _setting(0.9, "Training", "Adam's decay of the first moment; Lion's of its update", 0, 1, less=True)
    beta2: float = _setting(0.95, "Training", "Adam's decay of the second moment; Lion's of its first", 0, 1, less=True)
    eps: float = _setting(1e-8, "Training", "Adam's epsilon", 0, 1e6, more=True)
    momentum: float = _setting(0.95, "Training", "Muon's decay of its momentum", 0, 1, less=True)
    weight_decay: float = _setting(0.1, "Training", "decoupled weight decay of matrices", 0, 1e6)
    balance_loss: float = _setting(
        0.01, "Training", "weight of the loss that spreads tokens over experts, where there are any", 0, 1e6
    )
    z_loss: float = _setting(
        0.0, "Training", "weight of the squared logarithm of the softmax's denominator, as 1e-4", 0, 1e6
    )
    ema: float = _setting(
        0.0, "Training", "decay of an average of the weights (EMA), as 0.999; evaluated too; 0: none", 0, 1, less=True
    )
    clip: float = _setting(1.0, "Training", "highest norm of the gradient; 0: no clipping", 0, 1e12)
    seed: int = _setting(0, "Training", "seed of the weights and of the order of the data", 0, (1 << 63) - 1)

    recipe: str = _setting(
        recipe.AUTO,
        "Precision",
        f"{', '.join(recipe.CHOICES)} ({recipe.AUTO_HELP}); by GEMM: nvfp4/wgrad:bf16; by layer: layers.0=bf16,*=mxfp8",
        1,
        4096,
    )
    params_dtype: str = _setting("bfloat16", "Precision", "dtype of activations and of weights that stay unquantized")
    preset: str = _setting("", "Precision", optimizer_states.HELP, 0, 200)
    master_weights: bool = _setting(
        True, "Precision", "high-precision copies of the weights, which the optimizer trains"
    )
    master_dtype: str = _setting(AUTO, "Precision", f"of these copies: {', '.join(MASTER_DTYPES)}; auto: float32")
    master_remainders: str = _setting(
        AUTO, "Precision", "on: keep of these copies only what BF16 weights and, if float16, FP8 ones lack; auto: off"
    )
    exp_avg_dtype: str = _setting(
        AUTO, "Precision", f"first moment of Adam or Lion: {', '.join(MOMENT_DTYPES)}; auto: float32"
    )
    exp_avg_sq_dtype: str = _setting(
        AUTO, "Precision", f"Adam's second moment: {', '.join(MOMENT_DTYPES)}; auto: float32"
    )
    momentum_dtype: str = _setting(AUTO, "Precision", f"Muon's momentum: {', '.join(MOMENT_DTYPES)}; auto: float32")

    save_every: int = _setting(50, "Running", "steps between checkpoints; 0: only at the end", 0, STEPS)
    keep_last: int = _setting(0, "Running", "newest checkpoints that are kept; 0: all", 0, STEPS)
    keep_every: int = _setting(
        0, "Running", "keep checkpoints of steps that this divides too, where keep_last is set", 0, STEPS
    )
    checkpoints: str = _setting(
        "", "Running", "where checkpoints go instead of RUN/checkpoints: a folder, or a URL such as s3://bucket/run"
    )
    async_save: bool = _setting(False, "Running", "save in the background, from a copy of the state in memory")
    eval_every: int = _setting(50, "Running", "steps between evaluations; 0: only at the end", 0, STEPS)
    log_every: int = _setting(1, "Running", "steps between printed lines", 1, STEPS)
    sample_every: int = _setting(0, "Running", "steps between generated texts, besides the first and last", 0, STEPS)
    peak_tflops: float = _setting(
        0.0, "Running", "peak of a device, of which MFU is a share; 0: of BF16, where the GPU is known", 0, 1e9
    )
    sample_tokens: int = _setting(
        0, "Running", "print a generated text of this many tokens when training starts and ends", 0, SIZE
    )
    sample_prompt: str = _setting("", "Running", "what the generated text goes on from")
    recompute: str = _setting("none", "Running", "what is computed again in backward: none, activation or layer")
    recompute_every: int = _setting(1, "Running", "every how many layers, where recompute is layer", 1, COUNT)
    activation_storage: str = _setting(
        "high_precision", "Precision", "what the MLP's activation reads, for backward: high_precision, or fp8"
    )
    compile: bool = _setting(False, "Running", "torch.compile of each layer")
    cuda_graphs: bool = _setting(
        False,
        "Running",
        "replay each step from a CUDA graph, with the bits of an eager one; for models that wait for the host",
    )
    profile: int = _setting(
        0, "Running", "steps that are traced by torch.profiler after the third, into RUN/profile; 0: none", 0, 1000
    )
    statistics_every: int = _setting(
        0, "Logs", "steps between statistics of quantization, by layer and operand; 0: none", 0, STEPS
    )
    alarm_loss_spike: float = _setting(
        10.0, "Logs", "alarm if the loss is so many deviations above the median of the last 50; 0: none", 0, 1e6
    )
    alarm_saturation: float = _setting(
        0.01, "Logs", "alarm above this share of saturated values, in a step with statistics; 1: none", 0, 1, more=True
    )
    device: str = _setting("auto", "Running", "cpu, cuda, or auto: cuda where there is one")
    deterministic: bool = _setting(True, "Running", "the same bits in every run on the same hardware and software")
    threads: int = _setting(
        0, "Running", "CPU threads of a process; 0: OMP_NUM_THREADS, or 1 of several processes", 0, 4096
    )

    mesh: str = _setting(
        "",
        "Sharding",
        "processes by axis: dp_replicate, dp_shard (default), ep (experts) and tp, as dp_shard=2,tp=2",
    )
    dp_replicate: int = _setting(1, "Sharding", "copies of the model (HSDP), where no mesh is given", 1, COUNT)
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

    tensorboard: bool = _setting(False, "Logs", "write for TensorBoard too, into the run's folder tensorboard")
    wandb: str = _setting(
        "", "Logs", "project of Weights & Biases to log to as well; WANDB_MODE=offline needs no account", 0, 128
    )
    log_level: str = _setting(
        "auto", "Logs", "of logs/rank-N.log: debug, info, warning, error, or auto: QUANTSHARD_LOG, else info"
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
        """Storage options of the optimizer's masters and moments.

        Raises:
            ConfigurationError: the preset is unknown, or another setting contradicts it.
        """
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
        """Refuse settings that cannot be trained on any number of ranks.

        Raises:
            ConfigurationError: invalid setting; the message names the setting, its value, the valid values, and the
                file `where`.
        """
        try:
            self._check()
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}" if where else str(error)) from None

    def _check(self) -> None:
        for name, kind in KINDS.items():
            check_value(name, getattr(self, name), kind)
        LayerRecipes.parse(self.recipe)
        _ = self.state_options
        if self.head_size % 2 or (not self.head_dim and self.hidden % self.heads):
            raise ConfigurationError(
                f"hidden = {self.hidden} over heads = {self.heads}: each head must get the same even number of "
                f"elements; or give head_dim (now {self.head_dim}), an even number"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigurationError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}")
        if self.micro_batch and self.micro_batches != 1:
            raise ConfigurationError(
                f"micro_batch = {self.micro_batch} and micro_batches = {self.micro_batches} both say how a process "
                "takes its share of a step; give one of them"
            )
        check_combinations(self)
        if self.mesh:
            self._check_mesh(MeshSpec.parse(self.mesh))
        self._check_data()

    def _check_data(self) -> None:
        weights = self.weights
        if weights and len(weights) != len(self.data):
            raise ConfigurationError(
                f"data_weights = {shown_value(self.data_weights)}: {len(weights)} given, and --data {len(self.data)} "
                "times; give one share for each, in order"
            )
        if self.heldout_data and self.heldout not in (0.0, type(self).heldout):
            raise ConfigurationError(
                f"heldout = {self.heldout} keeps a share of the data to evaluate on, and heldout_data names others; "
                "give one of them"
            )

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

    @property
    def stores_codes(self) -> bool:
        """Whether activation inputs are stored for backward as codes."""
        return ACTIVATION_CELLS[self.activation_storage] is not None

    def _check_mesh(self, axes: MeshSpec) -> None:
        if self.dp_replicate not in (1, axes.dp_replicate):
            raise ConfigurationError(
                f"dp_replicate = {self.dp_replicate}, but mesh = {axes} has dp_replicate = {axes.dp_replicate}; give "
                "it in the mesh alone"
            )
        full, tp = self.resolved(), axes.tp
        if axes.ep > 1 and not self.experts:
            raise ConfigurationError(
                f"mesh = {axes} spreads experts over ep = {axes.ep} processes, but the model has none; give experts "
                f"(--experts {4 * axes.ep}, a multiple of {axes.ep}), or leave ep out"
            )
        if full.experts % axes.ep:
            raise ConfigurationError(
                f"experts = {full.experts}, but mesh = {axes} spreads them over ep = {axes.ep} processes; take a "
                f"multiple of {axes.ep}, or leave ep out"
            )
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
        weights = [layer_recipe.weight for layer_recipe in LayerRecipes.parse(self.recipe).recipes.values()]
        parts = [part for weight in weights if weight for part in weight.format.components]
        packed = max((max(part.block_shape) for part in parts if part.role is Role.CODES), default=1)
        if full.ffn // tp % packed:
            raise ConfigurationError(
                f"ffn = {full.ffn} over tp = {tp} processes (mesh = {axes}) is {full.ffn // tp} each, but recipe = "
                f"{self.recipe!r} stores {packed} elements in a byte; make ffn a multiple of {tp * packed}"
            )

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

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that these settings cannot be divided over.

        Raises:
            ConfigurationError: with the numbers, and a number that would fit.
        """
        if not self.mesh and ranks % self.dp_replicate:
            raise ConfigurationError(f"dp_replicate = {self.dp_replicate} must divide the {ranks} processes")
        axes = self.axes(ranks)
        if axes.processes != ranks:
            raise ConfigurationError(
                f"mesh = {axes} is of {axes.processes} processes, but --nproc-per-node, or the launcher, says {ranks}; "
                "make them equal, or leave --nproc-per-node out"
            )
        times, name = (self.micro_batch, "micro_batch") if self.micro_batch else (self.micro_batches, "micro_batches")
        parts = axes.data_parallel * times
        if self.global_batch % parts:
            over = f"{ranks} processes" if axes.tp == 1 else f"{axes.data_parallel} data-parallel parts (mesh = {axes})"
            raise ConfigurationError(
                f"global_batch = {self.global_batch} sequences cannot be split evenly over {over} x {name} = {times}; "
                f"make it a multiple of {parts}, or take another --nproc-per-node or --mesh"
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
"""The valid values of each setting."""


def setting_fields() -> tuple[Field[Any], ...]:
    """Return the fields of `TrainSettings`, with `panel` and `help` in their metadata."""
    return fields(TrainSettings)
