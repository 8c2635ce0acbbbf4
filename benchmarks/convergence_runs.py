"""Records of `convergence.jsonl` from runs of `quantshard train`, which then stand in the tables of the benchmark.

    python benchmarks/convergence_runs.py CORPUS RUN... [--shared-gpu] >> benchmarks/convergence.jsonl

CORPUS is the folder of `convergence_corpus.py` on whose `train.bin` they were trained. A run is of a decoder that is
built by sizes, has ended, and differs from the train command's defaults in what its arm is named by alone: recipe,
optimizer, how masters and moments are kept (`E4M3`, where second moments of 8 bits were so), what is kept of
activations; its warmup and seed are what the table
compares at. A learning rate other than the usual one is named too, as `bf16 muon at 0.002`, and a run that went on by
another recipe by both, as `nvfp4, current from 80 %`. Tokens a second are medians of the steps after the third.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.convergence import EVERY, NO_MASTERS, SMALL, WHOLE_MASTERS, at_rate, corpus_hash, name_by_sizes
from quantshard.state_storage import PRESETS, StateOptions
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import as_settings

GIB = 1 << 30
COMPILING = 3
"""Steps at the beginning whose time is that of compiling."""
TIMES = ("seconds", "tokens_per_s")
"""What a record tells of how long a run took."""
AS_USUAL = ("schedule", "lr_floor", "beta1", "beta2", "eps", "weight_decay", "z_loss", "ema", "clip", "params_dtype",
            "reduce_dtype", "dropout")  # fmt: skip
"""What changes a loss, and no arm's name tells."""
USUAL_RATES = {"adamw": SMALL.lr, "muon": SMALL.lr, "lion": 3e-4}
"""Lion's is the best of docs/optimizers.md."""
STATES = {"": StateOptions(), **PRESETS, **WHOLE_MASTERS, "no masters": NO_MASTERS}
"""How an arm's name tells masters and moments."""
MOMENTUM = "momentum_dtype"
"""The setting of Muon alone."""


def record(corpus: Path, folder: Path) -> dict[str, Any]:
    """What a run has come to.

    Raises:
        ValueError: it has not ended, or no arm's name tells what it was.
    """
    run = RunDir(folder)
    settings = run.read_config()[0]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    if not lines or lines[-1]["step"] < settings.steps or "heldout_loss" not in lines[-1]:
        raise ValueError(
            f"{folder} has not ended, after {len(lines)} of {settings.steps} steps, or was not evaluated there"
        )
    if not settings.is_by_sizes:
        raise ValueError(f"{folder} is of {settings.model}, which no sizes tell, so that nothing is compared with it")
    for name in AS_USUAL:
        if getattr(settings, name) != getattr(TrainSettings, name):
            raise ValueError(f"{folder} has {name} = {getattr(settings, name)!r}, which no arm's name tells")
    told = run.read_config()[2]["files"][0].split()[0]
    if told[:8] != corpus_hash(corpus):
        raise ValueError(f"{folder} was trained on a file of SHA-256 {told}, which is not train.bin of {corpus}")
    kept = json.loads(run.parameters.read_text())
    starts = [json.loads(line) for line in run.starts.read_text().splitlines()]
    start = starts[-1]["environment"]
    tokens = settings.global_batch * settings.seq_length
    return {
        "arm": _arm(settings, starts, kept.get("rows", ())),
        "seed": settings.seed,
        "model": settings.model or name_by_sizes(settings),
        "corpus": corpus_hash(corpus),
        "tokens": settings.steps * tokens,
        "batch": settings.global_batch,
        "heldout": round(lines[-1]["heldout_loss"], 5),
        "bytes": round(kept["parameter"]["together"], 3),
        "peak_gib": round(max(line["memory_bytes"] for line in lines) / GIB, 2),
        "seconds": round(math.fsum(tokens / line["tokens_per_s"] for line in lines), 1),
        "tokens_per_s": round(statistics.median(line["tokens_per_s"] for line in lines[COMPILING:])),
        "losses": [round(line["loss"], 5) for line in lines if line["step"] % EVERY == 0],
        "device": start["device"],
        "torch": start["torch"],
        "date": datetime.date.fromtimestamp(run.metrics.stat().st_mtime).isoformat(),
    }


def with_rate(found: dict[str, Any], settings: TrainSettings) -> dict[str, Any]:
    """A record whose arm tells the learning rate, if that is not the usual one of its optimizer."""
    return found | {"arm": at_rate(found["arm"], settings.lr, USUAL_RATES[settings.optimizer])}


def _arm(
    settings: TrainSettings, starts: Sequence[Mapping[str, Any]] = (), rows: Sequence[Mapping[str, Any]] = ()
) -> str:
    optimizer = "" if settings.optimizer == "adamw" else settings.optimizer
    stored = "fp8-activations" if settings.activation_storage == "fp8" else ""
    of_before = "E4M3" if any(map(_has_signed_squares, rows)) else ""
    return " ".join(filter(None, (_recipes(settings, starts), optimizer, of_before, _states(settings), stored)))


def _has_signed_squares(row: Mapping[str, Any]) -> bool:
    """Whether a parameter's second moment is in E4M3, as those of 8 bits were until 2026-11-27: as large as the first,
    whose scales take four bytes and not one."""
    sizes = row["state_sizes"]
    return row["optimizer"].get("exp_avg_sq") == "FP8" and sizes["exp_avg_sq"] == sizes["exp_avg"]


def _states(settings: TrainSettings) -> str:
    """A name of `STATES`, or each setting that is not the default: `master=float16 momentum=fp8`."""
    kept, default, *known = (
        {name: word for name, word in as_settings(each).items() if settings.optimizer == "muon" or name != MOMENTUM}
        for each in (settings.state_options, StateOptions(), *STATES.values())
    )
    if kept in known:
        return [*STATES][known.index(kept)]
    return " ".join(f"{name.removesuffix('_dtype')}={kept[name]}" for name in kept if kept[name] != default[name])


def _recipes(settings: TrainSettings, starts: Sequence[Mapping[str, Any]]) -> str:
    """The recipe that a run began by, and the others, each with the share of the steps that were done before it."""
    found: list[tuple[int, str]] = []
    for start in starts:
        if "recipe" in start:  # what an earlier start did from that step on was done again
            found = [each for each in found if each[0] < start["step"]] + [(start["step"], start["recipe"])]
    found = found or [(0, settings.recipe)]
    later = [(step, recipe) for (_, before), (step, recipe) in pairwise(found) if recipe != before]
    return ", ".join([found[0][1], *(f"{recipe} from {100 * step / settings.steps:.0f} %" for step, recipe in later)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--shared-gpu", action="store_true", help="others ran there too: leave out how long it took")
    asked = parser.parse_args()
    found = [with_rate(record(asked.corpus, folder), RunDir(folder).read_config()[0]) for folder in asked.runs]
    if asked.shared_gpu:
        found = [{name: value for name, value in each.items() if name not in TIMES} for each in found]
    print("\n".join(map(json.dumps, found)))  # all, or none


if __name__ == "__main__":
    main()
