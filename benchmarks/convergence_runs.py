"""Convert runs of `quantshard train` to records of `convergence.jsonl`, for the tables of `convergence_table.py`.

    python benchmarks/convergence_runs.py CORPUS RUN... [--shared-gpu] >> benchmarks/convergence.jsonl

CORPUS is the folder of `convergence_corpus.py` with the `train.bin` of the runs. A run must be finished, have a decoder
that is built by sizes, and differ from the defaults of `quantshard train` only in parts of an arm's name: recipe,
optimizer, states, and stored activations. An unusual learning rate is part of the name (`bf16 muon at 0.002`), and so
is a change of the recipe (`nvfp4, current from 80 %`). Tokens per second are the median of the steps after the third.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.convergence import EVERY, NO_MASTERS, SMALL, WHOLE_MASTERS, at_rate, corpus_hash, name_by_sizes
from benchmarks.harness import GIB, make_parser
from quantshard.state_storage import PRESETS, StateOptions
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import as_settings

COMPILING = 3
"""Number of first steps, which include compilation."""
TIMES = ("seconds", "tokens_per_s")
"""Fields of a record that depend on the machine's load."""
DEFAULTS_REQUIRED = (
    "schedule", "lr_floor", "beta1", "beta2", "eps", "weight_decay", "z_loss", "ema", "clip", "params_dtype",
    "reduce_dtype", "dropout",
)  # fmt: skip
"""Settings that change a loss and are not part of an arm's name."""
USUAL_RATES = {"adamw": SMALL.lr, "muon": SMALL.lr, "lion": 3e-4}
"""Lion's is the best rate of docs/optimizers.md."""
STATES = {"": StateOptions(), **PRESETS, **WHOLE_MASTERS, "no masters": NO_MASTERS}
"""State options by their word in an arm's name."""


def record(corpus: Path, folder: Path, rate_in_name: bool = True) -> dict[str, Any]:
    """Return the record of a run. `rate_in_name`: an unusual learning rate is part of the arm's name.

    Raises:
        ValueError: the run is not finished, or has settings that no arm's name expresses.
    """
    run = RunDir(folder)
    settings, _, data = run.read_config()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    if not lines or lines[-1]["step"] < settings.steps or "heldout_loss" not in lines[-1]:
        raise ValueError(f"{folder}: {len(lines)} of {settings.steps} steps, or no final evaluation; finish the run")
    if not settings.is_by_sizes:
        raise ValueError(f"{folder}: {settings.model} is not built by sizes")
    for name in DEFAULTS_REQUIRED:
        if getattr(settings, name) != getattr(TrainSettings, name):
            raise ValueError(f"{folder}: {name} = {getattr(settings, name)!r} is not the default")
    digest = data["files"][0].split()[0]
    if digest[:8] != corpus_hash(corpus):
        raise ValueError(f"{folder}: trained on a file with SHA-256 {digest}, not on train.bin of {corpus}")
    starts = [json.loads(line) for line in run.starts.read_text().splitlines()]
    environment = starts[-1]["environment"]
    tokens = settings.global_batch * settings.seq_length
    arm = arm_name(settings, starts)
    return {
        "arm": at_rate(arm, settings.lr, USUAL_RATES[settings.optimizer]) if rate_in_name else arm,
        "seed": settings.seed,
        "model": settings.model or name_by_sizes(settings),
        "corpus": corpus_hash(corpus),
        "tokens": settings.steps * tokens,
        "batch": settings.global_batch,
        "heldout": round(lines[-1]["heldout_loss"], 5),
        "bytes": round(json.loads(run.parameters.read_text())["parameter"]["together"], 3),
        "peak_gib": round(max(line["memory_bytes"] for line in lines) / GIB, 2),
        "seconds": round(math.fsum(tokens / line["tokens_per_s"] for line in lines), 1),
        "tokens_per_s": round(statistics.median(line["tokens_per_s"] for line in lines[COMPILING:])),
        "losses": [round(line["loss"], 5) for line in lines if line["step"] % EVERY == 0],
        "device": environment["device"],
        "torch": environment["torch"],
        "date": datetime.date.fromtimestamp(run.metrics.stat().st_mtime).isoformat(),
    }


def arm_name(settings: TrainSettings, starts: Sequence[Mapping[str, Any]] = ()) -> str:
    """Name the arm of a run by its recipes, optimizer, states and stored activations."""
    optimizer = "" if settings.optimizer == "adamw" else settings.optimizer
    activations = "fp8-activations" if settings.activation_storage == "fp8" else ""
    return " ".join(filter(None, (_recipes(settings, starts), optimizer, _states(settings), activations)))


def _states(settings: TrainSettings) -> str:
    """Return a name of `STATES`, or the settings that are not the default: `master=float16 momentum=fp8`."""
    states, default, *named = (
        {
            name: value
            for name, value in as_settings(options).items()
            if settings.optimizer == "muon" or name != "momentum_dtype"  # only Muon has a momentum
        }
        for options in (settings.state_options, StateOptions(), *STATES.values())
    )
    if states in named:
        return [*STATES][named.index(states)]
    changed = [name for name in states if states[name] != default[name]]
    return " ".join(f"{name.removesuffix('_dtype')}={states[name]}" for name in changed)


def _recipes(settings: TrainSettings, starts: Sequence[Mapping[str, Any]]) -> str:
    """Return the first recipe of a run, and later ones with the share of the steps before them."""
    changes: list[tuple[int, str]] = []
    for start in starts:
        if "recipe" in start:
            # A resumed run repeats the steps of earlier starts after its checkpoint.
            changes = [change for change in changes if change[0] < start["step"]]
            changes.append((start["step"], start["recipe"]))
    changes = changes or [(0, settings.recipe)]
    later = [(step, recipe) for (_, previous), (step, recipe) in pairwise(changes) if recipe != previous]
    return ", ".join([changes[0][1], *(f"{recipe} from {100 * step / settings.steps:.0f} %" for step, recipe in later)])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--shared-gpu", action="store_true", help="leave out times, because other jobs ran there too")
    options = parser.parse_args()
    # All records or none are printed.
    records = [record(options.corpus, folder) for folder in options.runs]
    if options.shared_gpu:
        records = [{name: value for name, value in r.items() if name not in TIMES} for r in records]
    print("\n".join(map(json.dumps, records)))


if __name__ == "__main__":
    main()
