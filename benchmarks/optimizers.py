"""Train the demo's language model with each optimizer option, and compare the held-out losses.

    python benchmarks/optimizers.py RESULTS.json [--plot FILE.svg]

One process, one thread of a CPU. Each run is written to RESULTS.json when it is done, so that another call goes on
where this one was stopped. Prints the table of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from quantshard import recipe as recipes
from quantshard.optimizers import FusedAdam, Lion, MasterWeights, Muon
from quantshard.state_storage import PRESETS
from quantshard.tensor import components
from quantshard.tools.cli.demo import SETTINGS
from quantshard.tools.trainer.data import Corpus, Windows, collect
from quantshard.tools.trainer.loop import learning_rate
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.settings.config import TrainSettings

CHANGED = {"steps": 200, "global_batch": 4, "seq_length": 64, "lr": 1e-3, "eval_sequences": 256}
DEMO = TrainSettings(**SETTINGS | CHANGED).resolved()
"""The demo's model and data, with a quarter of its tokens a step, a third of its rate and more held-out text.

With the demo's rate such small batches train on the edge of stability: last bits grow to 0.1 nats in 200 steps.
"""

AT_ONCE = 32
"""Held-out windows of one forward."""
BLOCK = 10
"""Steps whose losses a point of the plot is the mean of."""

REFERENCE, CONTROL, SGD_MASTERS = "fp32 masters", "MasterWeights(AdamW)", "MasterWeights(SGD)"
"""The control is the mathematics of the reference in another order of rounding, so what they differ by is noise."""
SGD_LR, MOMENTUM = 0.1, 0.9
LION, MUON = "Lion", "Muon"
LION_LR, LION_DECAY = 3e-4, 0.3
"""The best of 1e-4, 3e-4 and 1e-3 for fp32 masters and moment, with a decay that times the rate is AdamW's."""

Make = Callable[[list[dict[str, Any]], TrainSettings], torch.optim.Optimizer]


class Option(NamedTuple):
    """How to make the optimizer; its learning rate if not the demo's; the option that it is compared with."""

    make: Make
    lr: float | None = None
    beside: str = REFERENCE


def _adam(settings: TrainSettings) -> dict[str, Any]:
    betas = (settings.beta1, settings.beta2)
    return {"lr": settings.lr, "betas": betas, "eps": settings.eps, "weight_decay": settings.weight_decay}


def fused(**options: Any) -> Make:
    return lambda groups, settings: FusedAdam(groups, **_adam(settings), **options)


def moments(dtype: torch.dtype) -> Make:
    return fused(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)


def lion(dtype: torch.dtype) -> Make:
    return lambda groups, s: Lion(_decaying(groups, LION_DECAY), s.lr, (s.beta1, 0.99), exp_avg_dtype=dtype)


def muon(dtype: torch.dtype) -> Make:
    """Quantized weights by Muon, at AdamW's rate and decay, all else by AdamW."""

    def make(groups: list[dict[str, Any]], s: TrainSettings) -> Muon:
        matrices, others = groups
        quantized = [param for param in matrices["params"] if components.quantized_local(param) is not None]
        rest = [param for param in matrices["params"] if components.quantized_local(param) is None]
        adamw = {"algorithm": "adamw", **_adam(s)}
        divided = [{"params": quantized}, {**adamw, "params": rest}, {**adamw, **others}]
        return Muon(
            divided, s.lr, s.weight_decay, adjust_lr_fn="match_rms_adamw",
            momentum_buffer_dtype=dtype, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype,
        )  # fmt: skip

    return make


def _decaying(groups: list[dict[str, Any]], decay: float) -> list[dict[str, Any]]:
    return [{"weight_decay": decay, **group} for group in groups]


OPTIONS = {
    REFERENCE: Option(fused()),
    "bf16 masters": Option(fused(master_weight_dtype=torch.bfloat16)),
    "fp16 masters": Option(fused(master_weight_dtype=torch.float16)),
    "no masters": Option(fused(master_weights=False)),
    "FP8 moments": Option(moments(torch.uint8)),
    "fp16 moments": Option(moments(torch.float16)),
    "bf16 moments": Option(moments(torch.bfloat16)),
    **{name: Option(fused(preset=name)) for name in PRESETS},
    "remainders": Option(fused(store_param_remainders=True)),
    CONTROL: Option(lambda groups, s: MasterWeights(torch.optim.AdamW, groups, **_adam(s))),
    "torch AdamW": Option(lambda groups, s: torch.optim.AdamW(groups, **_adam(s))),
    SGD_MASTERS: Option(
        lambda groups, s: MasterWeights(torch.optim.SGD, groups, lr=s.lr, momentum=MOMENTUM), SGD_LR, SGD_MASTERS
    ),
    LION: Option(lion(torch.float32), LION_LR),
    "Lion, FP8 moment": Option(lion(torch.uint8), LION_LR, LION),
    MUON: Option(muon(torch.float32)),
    "Muon, FP8 states": Option(muon(torch.uint8), None, MUON),
    "torch SGD": Option(lambda groups, s: torch.optim.SGD(groups, lr=s.lr, momentum=MOMENTUM), SGD_LR, SGD_MASTERS),
}

FEW = (REFERENCE, "no masters", "torch AdamW")
PLAN: dict[str, tuple[str, ...]] = {
    "mxfp8": tuple(name for name in OPTIONS if name != "remainders"),  # a quantized weight has no remainder
    "bf16": (*FEW, "remainders"),
    "current": FEW,
    "delayed": FEW,
    "block": FEW,
    "nvfp4": FEW,
}
SEEDS = {("mxfp8", name): (0, 1, 2) for name in (REFERENCE, CONTROL, *PRESETS)}
"""Of weights and data order; all others have seed 0 alone."""


class Run(NamedTuple):
    """What is trained."""

    recipe: str
    option: str
    seed: int


def runs_of(recipe: str, option: str) -> list[Run]:
    """One for each seed."""
    return [Run(recipe, option, seed) for seed in SEEDS.get((recipe, option), (0,))]


def plan() -> list[Run]:
    """All runs, those of seed 0 first."""
    runs = [run for recipe, names in PLAN.items() for name in names for run in runs_of(recipe, name)]
    return sorted(runs, key=lambda run: run.seed)


# Training


def train(run: Run, settings: TrainSettings, windows: Windows) -> dict[str, Any]:
    """The loss of each step, held-out loss and its standard error over windows, and bytes of optimizer state."""
    option = OPTIONS[run.option]
    settings = replace(settings, recipe=run.recipe, seed=run.seed, lr=option.lr or settings.lr)
    torch.manual_seed(run.seed)
    model = models.LanguageModel(settings, recipes.resolve(run.recipe), "cpu")
    params = list(model.parameters())
    groups = [  # as `quantshard train` has them
        {"params": [param for param in params if param.ndim == 2]},
        {"params": [param for param in params if param.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = option.make(groups, settings)
    losses, began = [], time.process_time()
    for step in range(1, settings.steps + 1):
        batch = windows.batch(run.seed, step, 0, settings.global_batch)
        loss = models.loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
    seconds = time.process_time() - began
    each = heldout(model, windows.heldout(settings.eval_sequences))
    return {
        "losses": losses,
        "heldout": each.mean().item(),
        "heldout_error": (each.std() / math.sqrt(len(each))).item(),
        "state_bytes": sum(tensor.nbytes for tensor in state(optimizer)) / sum(param.numel() for param in params),
        "seconds": round(seconds, 1),
    }


@torch.no_grad()
def heldout(model: models.LanguageModel, windows: Tensor) -> Tensor:
    """The mean loss of each window, float64."""
    model.eval()
    each = []
    for batch in windows.split(AT_ONCE):
        logits = model(batch[:, :-1])
        each.append(cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").double().mean(1))
    return torch.cat(each)


def state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that an optimizer keeps."""
    for held in optimizer.state.values():
        yield from (value for value in held.values() if isinstance(value, Tensor))


def measure(file: Path, settings: TrainSettings, corpus: Corpus) -> dict[Run, dict[str, Any]]:
    """Train what is not in the file yet, and return all of it.

    Raises:
        ValueError: the file is of other settings, data or software.
    """
    told = {name: value for name, value in asdict(settings).items() if name not in ("data", "recipe", "seed")}
    of = json.loads(json.dumps({"settings": told, "data": corpus.sha256, "torch": torch.__version__}))
    content = json.loads(file.read_text()) if file.exists() else {"of": of, "runs": {}}
    if content["of"] != of:
        raise ValueError(f"{file} is of other settings, data or torch ({content['of']}, now {of}); name another file")
    windows = Windows(corpus, settings.seq_length, settings.heldout)
    for run in plan():
        if str(run) not in content["runs"]:
            content["runs"][str(run)] = result = train(run, settings, windows)
            file.write_text(json.dumps(content))
            print(f"{', '.join(map(str, run))}: {result['heldout']:.4f} ({result['seconds']:.0f} s)", flush=True)
    return {run: content["runs"][str(run)] for run in plan()}


# What came of it


class Compared(NamedTuple):
    """An option beside the one that it is compared with: differences in held-out loss, a seed each."""

    recipe: str
    option: str
    differences: list[float]

    def bound(self, noise: float) -> float:
        """The mean difference that noise alone reaches in 1 of 20 comparisons, if it is known from three (t = 3.18)."""
        return 3.18 * noise / math.sqrt(len(self.differences))


def compare(results: dict[Run, dict[str, Any]]) -> list[Compared]:
    """All options in all recipes but those that others are compared with."""
    found = []
    for recipe, names in PLAN.items():
        for name in names:
            if (beside := OPTIONS[name].beside) != name:
                pairs = [(run, run._replace(option=beside)) for run in runs_of(recipe, name)]
                found.append(Compared(recipe, name, [results[a]["heldout"] - results[b]["heldout"] for a, b in pairs]))
    return found


def noise_of(compared: Iterable[Compared]) -> float:
    """Root mean square of the differences between control and reference."""
    return math.sqrt(statistics.fmean(d * d for item in compared if item.option == CONTROL for d in item.differences))


def tables(results: dict[Run, dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown."""
    compared = compare(results)
    noise = noise_of(compared)
    by_name = {(item.recipe, item.option): item for item in compared}
    yield "| recipe | option | bytes of state a parameter | held-out loss, seed 0 | seeds | mean difference | verdict |"
    yield "|---|---|---|---|---|---|---|"
    for recipe, names in PLAN.items():
        for name in names:
            runs = runs_of(recipe, name)
            first = results[runs[0]]
            row = [recipe, name, f"{first['state_bytes']:.2f}", f"{first['heldout']:.3f}", str(len(runs))]
            item = by_name.get((recipe, name))
            if item is None:
                row += ["0", "compared with"]
            else:
                difference, bound = statistics.fmean(item.differences), item.bound(noise)
                verdict = "loses" if difference > bound else "better" if difference < -bound else "within the noise"
                row += [f"{difference:+.4f} ± {bound:.4f}", "control" if name == CONTROL else verdict]
            yield f"| {' | '.join(row)} |"
    yield ""
    yield f"Noise: {noise:.4f}."
    for name in FEW[1:]:
        over = Compared("all", name, [d for item in compared if item.option == name for d in item.differences])
        yield f"{name}, {len(PLAN)} recipes: {statistics.fmean(over.differences):+.4f} ± {over.bound(noise):.4f}."
    for item in compared:
        if len(item.differences) > 1:
            each = ", ".join(f"{difference:+.4f}" for difference in item.differences)
            yield f"{item.recipe}, {item.option}, differences by seed: {each}."
    by_seed = [results[run] for run in runs_of("mxfp8", REFERENCE)]
    yield f"mxfp8, {REFERENCE}, by seed: {', '.join('{:.4f}'.format(result['heldout']) for result in by_seed)}."
    yield f"Standard error of a held-out loss over windows: {by_seed[0]['heldout_error']:.4f}."


def draw(file: Path, results: dict[Run, dict[str, Any]]) -> None:
    """Training losses of seed 0, and how far each option's are from those of the one that it is compared with."""
    import matplotlib  # here, since it takes long to import
    from matplotlib.figure import Figure

    def blocks(recipe: str, name: str) -> Tensor:
        return torch.tensor(results[Run(recipe, name, 0)]["losses"]).unfold(0, BLOCK, BLOCK).mean(1)

    figure = Figure(figsize=(11, 11), layout="constrained")
    panels = figure.subplots(math.ceil((1 + len(PLAN)) / 2), 2, sharex=True).flatten()
    styles = {
        name: {"label": name, "color": f"C{number % 10}", "linestyle": "--" if "SGD" in name else "-", "linewidth": 1}
        for number, name in enumerate(OPTIONS)
    }
    shown = "mxfp8"
    steps = torch.arange(len(blocks(shown, REFERENCE))) * BLOCK + BLOCK / 2
    lines = {name: panels[0].plot(steps, blocks(shown, name), **styles[name])[0] for name in PLAN[shown]}
    panels[0].set(title=shown, ylabel="training loss (nats a byte)", xlabel="step")
    for panel, recipe in zip(panels[1:], PLAN, strict=False):
        for name in PLAN[recipe]:
            difference = blocks(recipe, name) - blocks(recipe, OPTIONS[name].beside)
            lines[name] = panel.plot(steps, difference, **styles[name])[0]
        panel.set(title=f"{recipe}, difference", ylabel="nats a byte", xlabel="step", ylim=(-0.1, 0.1))
    for panel in panels[1 + len(PLAN) :]:
        panel.set_axis_off()
    figure.legend(handles=lines.values(), loc="outside lower center", ncols=6, fontsize="small")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "optimizers"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(given.results, DEMO, collect(()))
    print(f"\n## CPU, {datetime.date.today()}, torch {torch.__version__}\n")
    for line in tables(results):
        print(line)
    if given.plot:
        draw(given.plot, results)


if __name__ == "__main__":
    main()
