"""Compare held-out losses of one model, trained on the same tokens with each recipe and optimizer.

    python benchmarks/convergence_corpus.py CORPUS
    python benchmarks/convergence.py CORPUS RESULTS.jsonl --arms bf16:0,current:0 [--minutes 9] [--work DIR]
                                     [--model "llama 12x768"] [--steps 1500] [--batch 64] [--eval-sequences 96]
                                     [--lr 1e-3] [--eager]
    python benchmarks/convergence_table.py RESULTS.jsonl --plot curves.svg

The model is a decoder of GPT-2 small's size (12 layers of width 768, 12 heads, 1024 tokens, tied head), a Llama with as
many layers, heads and parameters, or the mixture of experts of `quantshard train --model moe-small`.

An arm is a name of `ARMS` and a seed. The seed sets the initial weights and the order of the windows as in
`quantshard train`; its runs can be arms too (`convergence_runs.py`). Each finished arm is one line of RESULTS.jsonl
and is not run again for the same corpus, model, steps and batch. If --minutes end an arm, it is saved under --work and
continues from there bit for bit. On a GPU the dense models' layers run in CUDA graphs, which changes no bit; --eager
disables that. Arms of `convergence_peers.py` are compiled instead.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import quantshard as qs
from benchmarks.convergence_peers import PLAIN, TENSORWISE, PlainModel
from benchmarks.harness import DEVICE, GIB, append_json, make_parser
from quantshard import recipe as recipes
from quantshard.modules.base.module import QuantizedModule
from quantshard.optimizers import FusedAdam
from quantshard.recipe import Recipe
from quantshard.state_storage import PRESETS, StateOptions
from quantshard.tensor import components
from quantshard.tools.trainer import data
from quantshard.tools.trainer.loop import learning_rate
from quantshard.tools.trainer.models.decoder import LanguageModel, recipes_of
from quantshard.tools.trainer.models.model import token_losses, trained_loss
from quantshard.tools.trainer.optimizer import make_optimizer
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import SIZES

SMALL = TrainSettings(
    architecture="gpt",
    hidden=768,
    layers=12,
    heads=12,
    ffn=3072,
    seq_length=1024,
    tied=True,
    steps=1500,
    global_batch=64,
    micro_batches=2,
    lr=1e-3,
    warmup=150,
    eval_sequences=96,
    save_every=0,
).resolved()
"""98 million tokens, 0.8 per parameter: the start of a training, in which arms differ as they do later."""

DENSE, LLAMA, MIXTURE = "gpt2-small", "llama 12x768", "moe-small"
"""Models by their names for `quantshard train --model`; the Llama by its sizes, as in `convergence_runs.py`."""

MODELS: dict[str, dict[str, Any]] = {
    DENSE: {},
    LLAMA: {"architecture": "llama", "ffn": 2048, "kv_heads": 0},
    MIXTURE: {"kv_heads": 0, **SIZES[MIXTURE]},
}
"""Settings of each model that replace settings of SMALL."""

STEPS_PER_WARMUP_STEP = 10
LARGEST_MICRO_BATCH = 32
EVAL_BATCH = 32
EVERY = 10
"""Steps between recorded losses, where the host waits for the device; times are of this many steps."""

MakeOptimizer = Callable[[nn.Module, TrainSettings], torch.optim.Optimizer]


class Arm(NamedTuple):
    """A way to train.

    Args:
        recipe: of weights and GEMMs; text as for `quantshard train --recipe`.
        peer: a kind of `PlainModel` to train instead of quantshard's decoder.
        activation_storage: what MLPs save of activations.
    """

    recipe: str | Recipe
    optimizer: MakeOptimizer
    peer: str = ""
    activation_storage: str = "high_precision"


def fused(**options: Any) -> MakeOptimizer:
    """Make FusedAdam, by default with float32 masters and moments."""
    return lambda model, settings: FusedAdam(
        list(_groups(model, settings)), settings.lr, betas=(SMALL.beta1, SMALL.beta2), eps=SMALL.eps, **options
    )


def adamw(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Make PyTorch's AdamW of the weights themselves, with states in their dtype."""
    return torch.optim.AdamW(_groups(model, settings), lr=settings.lr, betas=(SMALL.beta1, SMALL.beta2), eps=SMALL.eps)


def muon(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Make Muon as `quantshard train` does."""
    return make_optimizer(model, replace(settings, optimizer="muon"))


NVFP4 = recipes.NVFP4BlockScaling
NVFP4_VARIANTS = {
    "no-transform": NVFP4(disable_rht=True),
    "to-nearest": NVFP4(disable_stochastic_rounding=True),
    "weights-by-rows": NVFP4(disable_2d_quantization=True),
    "mxfp8-backward": recipes.resolve("nvfp4/dgrad:mxfp8/wgrad:mxfp8"),
    "mxfp8-forward": recipes.resolve("mxfp8/dgrad:nvfp4/wgrad:nvfp4"),
    "bf16-dgrad": recipes.resolve("nvfp4/dgrad:bf16"),
    "bf16-wgrad": recipes.resolve("nvfp4/wgrad:bf16"),
}
"""NVFP4 without one of its parts, to find which part costs loss."""

NVFP4_BETWEEN = ",".join(f"layers.{number}=current" for number in (0, 1, 10, 11)) + ",*=nvfp4"
"""NVFP4 except for the first and last two of twelve layers."""

WHOLE_MASTERS = {
    f"FP16-masters {name}": replace(options, store_param_remainders=False) for name, options in PRESETS.items()
}
"""The presets with masters that do not use the codes of weights."""

FP8_MOMENTS = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
NO_MASTERS = StateOptions(master_weights=False, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8)

QUANTIZED = ("current", "delayed", "block", "rowwise", "mxfp8", "nvfp4")
ARMS = {
    "bf16": Arm("bf16", fused()),
    "bf16 AdamW": Arm("bf16", adamw),
    **{name: Arm(name, fused()) for name in QUANTIZED},
    **{f"{name} AdamW": Arm(name, adamw) for name in QUANTIZED},
    **{
        f"{name} {preset}": Arm(name, fused(preset=preset))
        for name in ("current", "block", "mxfp8")
        for preset in PRESETS
    },
    **{
        f"{name} {states}": Arm(name, fused(**options.arguments()))
        for name in ("current", "block", "mxfp8")
        for states, options in WHOLE_MASTERS.items()
    },
    **{f"nvfp4 {name}": Arm(recipe, fused()) for name, recipe in NVFP4_VARIANTS.items()},
    **{f"nvfp4 {name} muon": Arm(recipe, muon) for name, recipe in NVFP4_VARIANTS.items()},
    NVFP4_BETWEEN: Arm(NVFP4_BETWEEN, fused()),
    "current fp8-activations": Arm("current", fused(), activation_storage="fp8"),
    **{f"{name} FP8 moments": Arm(name, fused(**FP8_MOMENTS)) for name in ("block", "mxfp8")},
    **{f"{name} no masters": Arm(name, fused(**NO_MASTERS.arguments())) for name in ("current", "mxfp8")},
    "plain bf16": Arm("bf16", fused(), PLAIN),
    "torchao tensorwise": Arm("bf16", fused(), TENSORWISE),
}
"""Arms by name. Plain bf16 differs from bf16 in the order of rounding, and so shows what that does to a loss; arms of
the plain model need the dense model."""


class Training:
    """The training of one arm and seed, at some step."""

    def __init__(self, arm: Arm, seed: int, corpus: Path, settings: TrainSettings, device: str) -> None:
        self.settings, self.seed, self.device, self.step, self.seconds = settings, seed, device, 0, 0.0
        self.times: list[float] = []
        self.losses: list[float] = []
        self.peak = 0.0
        vocabulary = json.loads((corpus / "corpus.json").read_text())["vocabulary"]
        files = [str(corpus / name) for name in ("train.bin", "heldout.bin")]
        tokens = data.collect(files[:1], files[1:], like=data.Corpus((), vocabulary=vocabulary, end_of_document=0))
        self.windows = data.Windows(tokens, settings.seq_length, 0.0)
        torch.manual_seed(seed)
        settings = replace(settings, activation_storage=arm.activation_storage)
        recipe = recipes_of(replace(settings, recipe=arm.recipe)) if isinstance(arm.recipe, str) else arm.recipe
        padded_vocabulary = -(-vocabulary // 128) * 128
        ours = LanguageModel(settings, recipe, device, vocabulary=padded_vocabulary)
        self.model: LanguageModel | PlainModel = PlainModel(ours, arm.peer, device) if arm.peer else ours
        del ours
        self.optimizer = arm.optimizer(self.model, settings)
        for weight in map(components.quantized_local, self.model.parameters()):
            if weight is not None:
                # Masters, if there are any, have copied these values.
                weight.clear_high_precision_init_val()

    def capture(self) -> None:
        """Run the layers in CUDA graphs from now on, if possible.

        Experts cannot be captured, because their token counts depend on values; neither can layers of several recipes.
        """
        settings = self.settings
        if settings.experts or not isinstance(self.model, LanguageModel):
            return
        if any(recipe != self.model.recipes[0] for recipe in self.model.recipes):
            return
        shape = (settings.global_batch // settings.micro_batches, settings.seq_length, settings.hidden)
        x = torch.zeros(shape, dtype=settings.torch_params_dtype, device=self.device, requires_grad=True)
        layers = tuple(self.model.layers)
        rotary = self.model.rotary
        angles = None if rotary is None else rotary(settings.seq_length, device=x.device)  # None: learned positions
        keywords: Any = [{"rotary_pos_emb": angles} for _ in layers]
        qs.make_graphed_callables(layers, [(x,)] * len(layers), sample_kwargs=keywords, recipe=self.model.recipes[0])

    def train(self, deadline: float, last: int | None = None) -> bool:
        """Train up to step `last` (default: all) or until a time; returns whether all steps are done."""
        settings, interval_start = self.settings, None
        while self.step < (settings.steps if last is None else last):
            start = time.monotonic()
            if start > deadline:
                return False
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(settings, self.step + 1)
            loss = self._backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.step % EVERY == 0:
                self.losses.append(round(float(loss), 5))
                now = time.monotonic()
                self.times += [] if interval_start is None else [round(now - interval_start, 4)]
                interval_start = now
            self.seconds += time.monotonic() - start
        return True

    def peak_gib(self) -> float:
        """Return the peak GPU memory, including the one before `load`; 0 on a CPU."""
        if self.device == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() / GIB)
        return self.peak

    def tokens_per_second(self) -> float:
        """Return the rate by the median time of `EVERY` steps, without compilation, or by all steps if too few."""
        tokens = self.settings.global_batch * self.settings.seq_length
        return tokens * (EVERY / statistics.median(self.times) if self.times else self.step / max(self.seconds, 1e-9))

    def _backward(self) -> Tensor:
        settings, total = self.settings, torch.zeros((), dtype=torch.float32, device=self.device)
        size = settings.global_batch // settings.micro_batches
        for number in range(settings.micro_batches):
            inputs, targets = self._split(self.windows.batch(self.seed, self.step + 1, number * size, size))
            losses = token_losses(self.model(inputs), targets)
            total += losses.cross_entropy.detach() / settings.micro_batches
            (trained_loss(self.model, losses, settings) / settings.micro_batches).backward()
        return total

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean held-out loss, in nats per token."""
        self.model.eval()
        total, windows = 0.0, torch.stack([rows for _, rows in self.windows.heldout(self.settings.eval_sequences)])
        for inputs, targets in map(self._split, windows.split(EVAL_BATCH)):
            total += float(token_losses(self.model(inputs), targets).cross_entropy) * len(inputs)
        self.model.train()
        return total / len(windows)

    def _split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Split windows [windows, 2, seq_length] into tokens and targets [windows, seq_length] on the device."""
        tokens, targets = batch.to(self.device).unbind(1)
        return tokens, targets

    def save(self, folder: Path) -> None:
        extra = {"losses": self.losses, "seconds": self.seconds, "times": self.times, "peak": self.peak_gib()}
        with qs.checkpoints.Manager(folder, keep_last=1) as manager:
            manager.save(self.step, self.model, self.optimizer, extra=extra)

    def load(self, folder: Path) -> None:
        """Continue from where `save` was called, if it was."""
        with qs.checkpoints.Manager(folder) as manager:
            restored = manager.restore(self.model, self.optimizer) if manager.steps() else None
        if restored is not None:
            extra = restored.extra
            self.step, self.losses, self.seconds = restored.step, extra["losses"], extra["seconds"]
            self.times, self.peak = extra.get("times", []), extra.get("peak", 0.0)


def _groups(model: nn.Module, settings: TrainSettings) -> Iterator[dict[str, Any]]:
    """Yield parameter groups with weight decay for matrices only."""
    params = list(model.parameters())
    yield {"params": [param for param in params if param.ndim == 2], "weight_decay": settings.weight_decay}
    yield {"params": [param for param in params if param.ndim != 2], "weight_decay": 0.0}


def bytes_per_parameter(training: Training) -> float:
    """Return the bytes of weights and optimizer states per parameter of the layers' matrices."""
    modules = [m for m in training.model.layers.modules() if isinstance(m, (QuantizedModule, nn.Linear))]
    count = size = 0
    for parameter in (p for module in modules for p in module.parameters(recurse=False) if p.ndim == 2):
        storage = getattr(parameter, "quantized_storage", None)
        parts = [parameter] if storage is None else list(storage.components.values())
        states = [value for value in training.optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
        count += parameter.numel()
        size += sum(part.numel() * part.element_size() for part in (*parts, *states))
    return size / count


def at_rate(name: str, lr: float, default: float = SMALL.lr) -> str:
    """Add a learning rate to an arm's name, unless it is the default."""
    return name if lr == default else f"{name} at {lr:g}"


def run(name: str, seed: int, options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Train an arm and return its record; if the time ends first, save it and return None."""
    settings = options.settings
    training = Training(ARMS[name], seed, options.corpus, settings, DEVICE)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    folder = work_folder(options.work, name, seed, settings)
    training.load(folder)
    if DEVICE == "cuda" and not options.eager:
        training.capture()
    if not training.train(deadline):
        training.save(folder)
        print(f"{name}:{seed} stopped at step {training.step}", flush=True)
        return None
    peak = {"peak_gib": round(training.peak_gib(), 2)} if DEVICE == "cuda" else {}
    return {
        "arm": at_rate(name, settings.lr),
        "seed": seed,
        **training_key(options.corpus, settings),
        "heldout": round(training.evaluate(), 5),
        "bytes": round(bytes_per_parameter(training), 3),
        **peak,
        "seconds": round(training.seconds, 1),
        "tokens_per_s": round(training.tokens_per_second()),
        "losses": training.losses,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def model_name(settings: TrainSettings) -> str:
    """Name a model as in `MODELS`."""
    if settings.experts:
        return MIXTURE
    return name_by_sizes(settings) if settings.architecture == "llama" else DENSE


def name_by_sizes(settings: TrainSettings) -> str:
    return f"{settings.architecture} {settings.layers}x{settings.hidden}"


def corpus_hash(corpus: Path) -> str:
    """Return the start of the training tokens' SHA-256. Only losses on the same tokens are compared."""
    return str(json.loads((corpus / "corpus.json").read_text())["train"]["sha256"])[:8]


def training_key(corpus: Path, settings: TrainSettings) -> dict[str, Any]:
    """Return the fields of a record that must agree for losses to be compared."""
    return {
        "model": model_name(settings),
        "corpus": corpus_hash(corpus),
        "tokens": settings.steps * settings.global_batch * settings.seq_length,
        "batch": settings.global_batch,
    }


def with_defaults(record: dict[str, Any]) -> dict[str, Any]:
    """Add the model and batch that old records lack."""
    return {"model": DENSE, "batch": SMALL.global_batch, **record}


def finished(results: Path, key: dict[str, Any]) -> set[tuple[str, int]]:
    """Return the arms and seeds that have a record with this key."""
    lines = results.read_text().splitlines() if results.exists() else []
    records = [with_defaults(json.loads(line)) for line in lines]
    return {(record["arm"], record["seed"]) for record in records if key.items() <= record.items()}


def work_folder(work: Path, name: str, seed: int, settings: TrainSettings) -> Path:
    """Return the folder that saves an arm of this model, batch and number of steps."""
    folder = f"{at_rate(name, settings.lr)}-{seed}".replace(" ", "-")
    model = model_name(settings)
    if (model, settings.steps, settings.global_batch) != (DENSE, SMALL.steps, SMALL.global_batch):
        folder += f"-{model.replace(' ', '-')}-{settings.steps}x{settings.global_batch}"
    return work / folder


def make_settings(
    model: str, steps: int, batch: int, eval_sequences: int = SMALL.eval_sequences, lr: float = SMALL.lr
) -> TrainSettings:
    """Return the settings of a model, with a learning rate that rises to `lr` and decays until `steps`.

    Raises:
        ValueError: the batch cannot be divided into equal micro-batches.
    """
    parts = -(-batch // LARGEST_MICRO_BATCH)
    if batch % parts:
        raise ValueError(
            f"--batch {batch} cannot be taken in {parts} equal parts of at most {LARGEST_MICRO_BATCH} sequences"
        )
    schedule = {"steps": steps, "decay_steps": steps, "warmup": steps // STEPS_PER_WARMUP_STEP, "lr": lr}
    batches = {"global_batch": batch, "micro_batches": parts, "eval_sequences": eval_sequences}
    return replace(SMALL, **MODELS[model], **schedule, **batches).resolved()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--arms", required=True, help="NAME:SEED, separated by commas; names: " + ", ".join(ARMS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="save and stop after this time")
    parser.add_argument("--eager", action="store_true", help="run the layers without CUDA graphs")
    parser.add_argument("--work", type=Path, default=Path("convergence-work"))
    parser.add_argument("--model", choices=MODELS, default=DENSE)
    parser.add_argument("--steps", type=int, default=SMALL.steps, help="number of steps, where the schedule ends")
    parser.add_argument("--batch", type=int, default=SMALL.global_batch, help="sequences per step")
    parser.add_argument("--eval-sequences", type=int, default=SMALL.eval_sequences, help="held-out sequences")
    parser.add_argument("--lr", type=float, default=SMALL.lr, help="learning rate after the warmup")
    options = parser.parse_args()
    options.settings = make_settings(options.model, options.steps, options.batch, options.eval_sequences, options.lr)
    deadline = time.monotonic() + 60 * options.minutes
    for arm in options.arms.split(","):
        name, _, seed = arm.rpartition(":")
        done = finished(options.results, training_key(options.corpus, options.settings))
        if (at_rate(name, options.lr), int(seed)) in done or time.monotonic() > deadline:
            continue
        record = run(name, int(seed), options, deadline)
        if record is not None:
            append_json(options.results, record)
            print(json.dumps({key: value for key, value in record.items() if key != "losses"}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
