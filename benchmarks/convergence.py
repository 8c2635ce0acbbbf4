"""Does it learn as well as BF16? Held-out losses of one model, trained on the same tokens by each recipe and optimizer.

    python benchmarks/convergence_corpus.py CORPUS
    python benchmarks/convergence.py CORPUS RESULTS.jsonl --arms bf16:0,current:0 [--minutes 9] [--work DIR]
                                     [--model "llama 12x768"] [--steps 1500] [--batch 64] [--eval-sequences 96]
                                     [--lr 1e-3] [--eager]
    python benchmarks/convergence_table.py RESULTS.jsonl --plot curves.svg

A decoder of the size of GPT-2 small (12 layers of 768, 12 heads, 1024 tokens, tied head), a Llama of as many layers,
heads and parameters, or a mixture of experts of the train command's sizes. An arm is a name of `ARMS` and a seed, which
gives the initial weights and the order of the windows, both as of `quantshard train`, whose runs are arms too
(`convergence_runs.py`): those of one seed read the same tokens in the same order. Each finished arm is one line of
RESULTS.jsonl with the hash of its corpus, its model, steps and batch, and is not run again. An arm that the minutes end
is saved under --work and goes on from there, bit for bit. On a GPU the dense model's layers run from CUDA graphs, which
changes no bit; `--eager` does without. Arms of `convergence_peers.py` are compiled instead.
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
from quantshard.tools.trainer.settings.config import SIZES, TrainSettings

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
"""98 million tokens, 0.8 for each parameter: the start of a training, in which arms differ as they do later."""

DENSE, LLAMA, MIXTURE = "gpt2-small", "llama 12x768", "moe-small"
"""The models, by their names for `quantshard train --model`; the Llama by its sizes, as `convergence_runs.py` names
runs."""

MODELS: dict[str, dict[str, Any]] = {
    DENSE: {},
    LLAMA: {"architecture": "llama", "ffn": 2048, "kv_heads": 0},
    MIXTURE: {"kv_heads": 0, **SIZES[MIXTURE]},
}
"""What each has in place of SMALL's settings."""

WARMUP_SHARE, PART = 10, 32
"""Warmup is one in so many steps; a micro-batch has at most so many sequences."""

AT_ONCE = 32
"""Held-out windows of one forward."""

EVERY = 10
"""Steps between recorded losses, at which the host waits for the device: times are of so many steps."""


class Arm(NamedTuple):
    """How weights and GEMMs are quantized (text as for `train --recipe`), and how the optimizer is made.

    `peer`: a kind of the plain model. `activation_storage`: what MLPs keep of activations.
    """

    recipe: str | Recipe
    optimizer: Callable[[nn.Module, TrainSettings], torch.optim.Optimizer]
    peer: str = ""
    activation_storage: str = "high_precision"


def fused(**options: Any) -> Callable[[nn.Module, TrainSettings], torch.optim.Optimizer]:
    """FusedAdam; with float32 masters and moments unless said otherwise."""
    return lambda model, settings: FusedAdam(
        list(_groups(model, settings)), settings.lr, betas=(SMALL.beta1, SMALL.beta2), eps=SMALL.eps, **options
    )


def plain(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """PyTorch's AdamW straight on the weights, with states of their dtype."""
    return torch.optim.AdamW(_groups(model, settings), lr=settings.lr, betas=(SMALL.beta1, SMALL.beta2), eps=SMALL.eps)


def muon(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Muon as `quantshard train` has it."""
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
"""NVFP4 less one of its parts: which of them costs what it loses."""

NVFP4_BETWEEN = ",".join(f"layers.{number}=current" for number in (0, 1, 10, 11)) + ",*=nvfp4"
"""NVFP4 but for the first and last two of twelve layers."""

WHOLE_MASTERS = {
    f"FP16-masters {name}": replace(options, store_param_remainders=False) for name, options in PRESETS.items()
}
"""The presets as they were before masters were kept beside the codes of weights."""

FP8_MOMENTS = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
NO_MASTERS = StateOptions(master_weights=False, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8)

ARMS = {
    "bf16": Arm("bf16", fused()),
    "bf16 AdamW": Arm("bf16", plain),
    **{name: Arm(name, fused()) for name in ("current", "delayed", "block", "rowwise", "mxfp8", "nvfp4")},
    **{f"{name} AdamW": Arm(name, plain) for name in ("current", "delayed", "block", "rowwise", "mxfp8", "nvfp4")},
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
"""Arms of the plain model have float32 masters and moments, and the dense
model alone; plain bf16 is bf16 in another order of rounding, and so tells what that does to a loss."""


class Training:
    """One arm and seed, at some step."""

    def __init__(self, arm: Arm, seed: int, corpus: Path, settings: TrainSettings, device: str) -> None:
        self.settings, self.seed, self.device, self.step, self.seconds = settings, seed, device, 0, 0.0
        self.times: list[float] = []
        self.peak = 0.0
        vocabulary = json.loads((corpus / "corpus.json").read_text())["vocabulary"]
        files = [str(corpus / name) for name in ("train.bin", "heldout.bin")]
        found = data.collect(files[:1], files[1:], like=data.Corpus((), vocabulary=vocabulary, end_of_document=0))
        self.windows = data.Windows(found, settings.seq_length, 0.0)
        torch.manual_seed(seed)
        settings = replace(settings, activation_storage=arm.activation_storage)
        recipe = recipes_of(replace(settings, recipe=arm.recipe)) if isinstance(arm.recipe, str) else arm.recipe
        ours = LanguageModel(settings, recipe, device, vocabulary=_padded(vocabulary))
        self.model: LanguageModel | PlainModel = PlainModel(ours, arm.peer, device) if arm.peer else ours
        del ours
        self.optimizer = arm.optimizer(self.model, settings)
        for weight in map(components.quantized_local, self.model.parameters()):
            if weight is not None:
                weight.clear_high_precision_init_val()  # the masters have them now, if there are any
        self.losses: list[float] = []

    def capture(self) -> None:
        """Let the layers run from CUDA graphs from now on, if they can: the tokens of experts follow from values, and
        the graphs here are of one recipe."""
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

    def train(self, until: float, last: int | None = None) -> bool:
        """Steps until the last, or until a time; True if all are done."""
        settings, since = self.settings, None
        while self.step < (settings.steps if last is None else last):
            start = time.monotonic()
            if start > until:
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
                self.times += [] if since is None else [round(now - since, 4)]
                since = now
            self.seconds += time.monotonic() - start
        return True

    def most_memory(self) -> float:
        """GiB that a GPU has held at most, of this sitting and those before; 0 on a CPU."""
        if self.device == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() / 2**30)
        return self.peak

    def tokens_per_second(self) -> float:
        """By the median time of `EVERY` steps, which leaves out compiling; of all steps, where there were too few."""
        tokens = self.settings.global_batch * self.settings.seq_length
        return tokens * (EVERY / statistics.median(self.times) if self.times else self.step / max(self.seconds, 1e-9))

    def _backward(self) -> Tensor:
        settings, total = self.settings, torch.zeros((), dtype=torch.float32, device=self.device)
        size = settings.global_batch // settings.micro_batches
        for part in range(settings.micro_batches):
            inputs, targets = self._windows(self.windows.batch(self.seed, self.step + 1, part * size, size))
            found = token_losses(self.model(inputs), targets)
            total += found.cross_entropy.detach() / settings.micro_batches
            (trained_loss(self.model, found, settings) / settings.micro_batches).backward()
        return total

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean held-out loss, nats a token."""
        self.model.eval()
        total, windows = 0.0, self.windows.heldout(self.settings.eval_sequences)
        for inputs, targets in map(self._windows, windows.split(AT_ONCE)):
            total += float(token_losses(self.model(inputs), targets).cross_entropy) * len(inputs)
        self.model.train()
        return total / len(windows)

    def _windows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets [windows, seq_length] of tokens [windows, seq_length + 1]."""
        moved = tokens.to(self.device)
        return moved[:, :-1], moved[:, 1:]

    def save(self, folder: Path) -> None:
        """What `load` goes on from."""
        own = {"losses": self.losses, "seconds": self.seconds, "times": self.times, "peak": self.most_memory()}
        with qs.checkpoints.Manager(folder, keep_last=1) as manager:
            manager.save(self.step, self.model, self.optimizer, extra=own)

    def load(self, folder: Path) -> None:
        """Go on where `save` was called, if it was."""
        with qs.checkpoints.Manager(folder) as manager:
            found = manager.restore(self.model, self.optimizer) if manager.steps() else None
        if found is not None:
            self.step, self.losses, self.seconds = found.step, found.extra["losses"], found.extra["seconds"]
            self.times, self.peak = found.extra.get("times", []), found.extra.get("peak", 0.0)


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // 128) * 128


def _groups(model: nn.Module, settings: TrainSettings) -> Iterator[dict[str, Any]]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    yield {"params": matrices, "weight_decay": settings.weight_decay}
    yield {"params": [each for each in model.parameters() if each.ndim != 2], "weight_decay": 0.0}


def bytes_kept(training: Training) -> float:
    """Bytes of weights and optimizer states a parameter of the layers' matrices."""
    kinds = (QuantizedModule, nn.Linear)
    weights = [(module, name) for module in training.model.layers.modules() if isinstance(module, kinds)
               for name, each in module.named_parameters(recurse=False) if each.ndim == 2]  # fmt: skip
    count = stored = 0
    for module, name in weights:
        parameter = getattr(module, name)
        storage = getattr(parameter, "quantized_storage", None)
        parts = [parameter] if storage is None else list(storage.components.values())
        states = [each for each in training.optimizer.state.get(parameter, {}).values() if isinstance(each, Tensor)]
        count += parameter.numel()
        stored += sum(each.numel() * each.element_size() for each in (*parts, *states))
    return stored / count


def at_rate(name: str, lr: float, usual: float = SMALL.lr) -> str:
    """The name of an arm that was trained at this learning rate."""
    return name if lr == usual else f"{name} at {lr:g}"


def run(name: str, seed: int, asked: argparse.Namespace, until: float) -> dict[str, Any] | None:
    """The result of one arm; None if time ended it, saved."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training = Training(ARMS[name], seed, asked.corpus, asked.settings, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    folder = work_folder(asked.work, name, seed, asked.settings)
    training.load(folder)
    if device == "cuda" and not asked.eager:
        training.capture()
    done = training.train(until)
    if not done:
        training.save(folder)
        print(f"{name}:{seed} stopped at step {training.step}", flush=True)
        return None
    peak = {"peak_gib": round(training.most_memory(), 2)} if device == "cuda" else {}
    return {
        "arm": at_rate(name, asked.settings.lr),
        "seed": seed,
        **what_is_trained(asked.corpus, asked.settings),
        "heldout": round(training.evaluate(), 5),
        "bytes": round(bytes_kept(training), 3),
        **peak,
        "seconds": round(training.seconds, 1),
        "tokens_per_s": round(training.tokens_per_second()),
        "losses": training.losses,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def model_of(settings: TrainSettings) -> str:
    """Its name, as `MODELS` has it where it is of these sizes."""
    if settings.experts:
        return MIXTURE
    return name_by_sizes(settings) if settings.architecture == "llama" else DENSE


def name_by_sizes(settings: TrainSettings) -> str:
    """As `LLAMA`."""
    return f"{settings.architecture} {settings.layers}x{settings.hidden}"


def corpus_hash(corpus: Path) -> str:
    """The beginning of the SHA-256 of its training tokens: losses are compared on equal ones alone."""
    return str(json.loads((corpus / "corpus.json").read_text())["train"]["sha256"])[:8]


def what_is_trained(corpus: Path, settings: TrainSettings) -> dict[str, Any]:
    """What arms have in common whose losses are compared: the tokens, and how they come."""
    return {
        "model": model_of(settings),
        "corpus": corpus_hash(corpus),
        "tokens": settings.steps * settings.global_batch * settings.seq_length,
        "batch": settings.global_batch,
    }


def of_record(record: dict[str, Any]) -> dict[str, Any]:
    """The same of a line of results; those of before there was a choice are of the dense model and batches of 64."""
    return {"model": DENSE, "batch": SMALL.global_batch, **record}


def finished(results: Path, trained: dict[str, Any]) -> set[tuple[str, int]]:
    """Arms and seeds that have a line of these tokens."""
    lines = results.read_text().splitlines() if results.exists() else []
    records = [of_record(json.loads(line)) for line in lines]
    alike = [each for each in records if all(each[key] == value for key, value in trained.items())]
    return {(each["arm"], each["seed"]) for each in alike}


def work_folder(work: Path, name: str, seed: int, settings: TrainSettings) -> Path:
    """Where an arm that was stopped is saved; of another model, batch or number of steps elsewhere."""
    folder = f"{at_rate(name, settings.lr)}-{seed}".replace(" ", "-")
    model = model_of(settings)
    if (model, settings.steps, settings.global_batch) != (DENSE, SMALL.steps, SMALL.global_batch):
        folder += f"-{model.replace(' ', '-')}-{settings.steps}x{settings.global_batch}"
    return work / folder


def chosen_settings(
    model: str, steps: int, batch: int, evaluated: int = SMALL.eval_sequences, lr: float = SMALL.lr
) -> TrainSettings:
    """Of a model, with a schedule of rates up to `lr` that ends at `steps`, batches of so many sequences, and so many
    `evaluated`.

    Raises:
        ValueError: a batch cannot be taken in parts of equal size.
    """
    parts = -(-batch // PART)
    if batch % parts:
        raise ValueError(f"--batch {batch} cannot be taken in {parts} equal parts of at most {PART} sequences")
    schedule = {"steps": steps, "decay_steps": steps, "warmup": steps // WARMUP_SHARE, "lr": lr}
    batches = {"global_batch": batch, "micro_batches": parts, "eval_sequences": evaluated}
    return replace(SMALL, **MODELS[model], **schedule, **batches).resolved()


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out losses of recipes and optimizers.")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--arms", required=True, help="NAME:SEED, by commas; names: " + ", ".join(ARMS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop, saved, after so many")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs of the layers")
    parser.add_argument("--work", type=Path, default=Path("convergence-work"))
    parser.add_argument("--model", choices=MODELS, default=DENSE)
    parser.add_argument("--steps", type=int, default=SMALL.steps, help="at which the schedule ends")
    parser.add_argument("--batch", type=int, default=SMALL.global_batch, help="sequences of a step")
    parser.add_argument("--eval-sequences", type=int, default=SMALL.eval_sequences, help="of which held-out loss is")
    parser.add_argument("--lr", type=float, default=SMALL.lr, help="learning rate after the warmup")
    asked = parser.parse_args()
    asked.settings = chosen_settings(asked.model, asked.steps, asked.batch, asked.eval_sequences, asked.lr)
    until = time.monotonic() + 60 * asked.minutes
    for each in asked.arms.split(","):
        name, _, seed = each.rpartition(":")
        done = finished(asked.results, what_is_trained(asked.corpus, asked.settings))
        if (at_rate(name, asked.lr), int(seed)) in done or time.monotonic() > until:
            continue
        result = run(name, int(seed), asked, until)
        if result is not None:
            with asked.results.open("a") as out:
                out.write(json.dumps(result) + "\n")
            shown = {key: value for key, value in result.items() if key != "losses"}
            print(json.dumps(shown), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
