"""Check that training runs that were killed at their midpoint end like uninterrupted ones, on any number of processes.

    python benchmarks/convergence_resume.py RESULTS.jsonl --corpus CORPUS --work DIR [--arms bf16,current,...]
        [--processes 1] [--others 2,3] [--seeds 0,1] [--steps 200] [-- FLAGS of quantshard train]
    python benchmarks/convergence_resume.py RESULTS.jsonl

An arm is a name of `ARMS`. With the first seed it is trained to the end, then started again and killed by SIGKILL soon
after the checkpoint at half of the steps, and resumed from there. On the same number of processes the resumed run must
repeat all losses and the last checkpoint bit for bit. On each of the --others it must load the checkpoint bit for bit
and end within the spread of seeds. With the other seeds the arm is only trained to the end.

CORPUS is a folder of `convergence_corpus.py`. FLAGS apply to all runs; an arm's own flags follow them. Each
uninterrupted run becomes a line of RESULTS.jsonl as in `convergence_runs.py`, with the resumed runs under `resumed`,
and is not run again. Checkpoints are removed from DIR once they are compared and equal. Both forms print the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import convergence_table
from benchmarks.convergence import corpus_hash
from benchmarks.convergence_corpus import END_OF_DOCUMENT
from benchmarks.convergence_runs import record
from benchmarks.harness import append_json, make_parser, table_head, table_row
from quantshard.checkpoints.comparison import compare
from quantshard.tools.cli.demo import facts, last_step, started
from quantshard.tools.report.records import read_records
from quantshard.tools.trainer.run_dir import RunDir

_FP8_MOMENTS = ("--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8")

ARMS = {
    **{name: ("--recipe", name) for name in ("bf16", "delayed", "current", "block", "rowwise", "mxfp8", "nvfp4")},
    **{f"current {name}": ("--recipe", "current", "--preset", name) for name in ("lean8", "lean6")},
    "current no masters": ("--recipe", "current", "--no-master-weights", *_FP8_MOMENTS),
    "current muon": ("--recipe", "current", "--optimizer", "muon"),
    "current lion": ("--recipe", "current", "--optimizer", "lion", "--lr", "3e-4"),
    "current fp8-activations": ("--recipe", "current", "--activation-storage", "fp8"),
}
"""Flags by the name that `convergence_runs.py` gives to such a run. Lion's rate is the best of docs/optimizers.md."""

_POLL_SECONDS = 0.02
_EXIT_SECONDS = 1.0
"""After their launcher was killed, processes exit within a fifth of this time."""

Record = dict[str, Any]


@dataclass(frozen=True)
class ResumeTrial:
    """Common to all arms: `processes` of uninterrupted runs, `others` to resume on, `flags` of `quantshard train`."""

    corpus: Path
    work: Path
    steps: int
    processes: int
    others: tuple[int, ...]
    flags: tuple[str, ...]

    @property
    def middle(self) -> int:
        """Step of the only checkpoint before the last."""
        return self.steps // 2

    @property
    def fields(self) -> Record:
        """Fields of a record that identify the trial."""
        return {"processes": self.processes, "steps": self.steps, "flags": " ".join(self.flags)}

    def folder(self, name: str, seed: int) -> Path:
        """Return the folder of the runs of an arm and seed."""
        digest = sha256(json.dumps([self.fields, corpus_hash(self.corpus)]).encode()).hexdigest()
        return self.work / digest[:8] / f"{name}-{seed}".replace(" ", "-")

    def train(self, run: RunDir, name: str, seed: int, kill: bool = False) -> int:
        """Run `quantshard train`, and kill it after the midpoint if `kill`; returns the last step done."""
        options: dict[str, Any] = {
            "--run": run.path, "--nproc-per-node": self.processes, "--data": self.corpus / "train.bin",
            "--heldout-data": self.corpus / "heldout.bin", "--tokenizer": self.corpus / "tokenizer.json",
            "--end-of-document": END_OF_DOCUMENT, "--steps": self.steps, "--save-every": self.middle, "--seed": seed,
            "--eval-every": 0,
        }  # fmt: skip
        words = [str(word) for option in options.items() for word in option]
        return _run_command(["train", *words, *self.flags, *ARMS[name]], run, self.middle if kill else 0)


# Runs -----------------------------------------------------------------------------------------------------------------


def run_arm(trial: ResumeTrial, name: str, seed: int, resumes: bool) -> Record:
    """Return the record of an uninterrupted run, with its resumed runs if `resumes`."""
    folder = trial.folder(name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    whole = RunDir(folder / "whole")
    if not whole.is_begun() or last_step(whole) < trial.steps:
        shutil.rmtree(whole.path, ignore_errors=True)
        trial.train(whole, name, seed)
    result = record(trial.corpus, whole.path, rate_in_name=False) | trial.fields
    if result["arm"] != name:
        raise ValueError(f"{whole.path}: arm {result['arm']!r}, not {name!r}; remove the flags of arms from FLAGS")
    if resumes:
        result["resumed"] = list(_resume(trial, name, seed, whole))
    if all(resumed["exact"] for resumed in result.get("resumed", ())):
        shutil.rmtree(folder)
    return result


def _resume(trial: ResumeTrial, name: str, seed: int, whole: RunDir) -> Iterator[Record]:
    """Kill a run at its midpoint, and resume it on each number of processes."""
    killed = RunDir(whole.path.with_name("killed"))
    copies = {count: RunDir(whole.path.with_name(f"on-{count}")) for count in (trial.processes, *trial.others)}
    for run in (killed, *copies.values()):
        shutil.rmtree(run.path, ignore_errors=True)
    killed_step = trial.train(killed, name, seed, kill=True)
    for count, run in copies.items():
        shutil.copytree(killed.path, run.path)
        copy = run.path.with_name(f"loaded-on-{count}")
        shutil.rmtree(copy, ignore_errors=True)
        _run_command(["resume", str(run.path), "--nproc-per-node", str(count), "--copy-to", str(copy)], run)
        is_loaded = compare(killed.checkpoint(trial.middle), copy).equal
        differences = _differences(whole, run)
        is_repeated = not differences["differing"] and differences["checkpoint"]
        yield {
            "on": count, "at": trial.middle, "killed": killed_step, "loaded": is_loaded, **differences,
            "exact": is_loaded and (count != trial.processes or is_repeated),
        }  # fmt: skip


def _differences(whole: RunDir, run: RunDir) -> Record:
    """Compare the metrics and the last checkpoint of a resumed run with the uninterrupted one."""
    expected, actual = ({line["step"]: line for line in read_records(folder.metrics)} for folder in (whole, run))
    last = max(expected)
    return {
        "heldout": actual[last]["heldout_loss"],
        "difference": actual[last]["heldout_loss"] - expected[last]["heldout_loss"],
        "differing": sum(step not in actual or facts(actual[step]) != facts(expected[step]) for step in expected),
        "largest": max(abs(expected[step]["loss"] - actual[step]["loss"]) for step in expected if step in actual),
        "checkpoint": compare(whole.checkpoint(last), run.checkpoint(last)).equal,
    }


def _run_command(arguments: list[str], run: RunDir, kill_after: int = 0) -> int:
    """Run a quantshard command; with `kill_after`, kill it once that step is saved and the next one done.

    Returns the last step done.

    Raises:
        RuntimeError: the command failed, or ended before it could be killed.
    """
    log = run.path.with_name(f"{run.path.name}-{arguments[0]}.log")
    log.unlink(missing_ok=True)
    with started(arguments, log) as process:
        while kill_after and process.poll() is None:
            time.sleep(_POLL_SECONDS)
            if last_step(run) > kill_after and kill_after in run.saved_steps():
                os.killpg(process.pid, signal.SIGKILL)
                break
        code = process.wait()
    if code != (-signal.SIGKILL if kill_after else 0):
        raise RuntimeError(f"`quantshard {arguments[0]}` ended with {code}; see {log}")
    time.sleep(_EXIT_SECONDS if kill_after else 0.0)
    return last_step(run)


# Tables ---------------------------------------------------------------------------------------------------------------


class ResumeRow(NamedTuple):
    """A resumed run of an arm that was started on `processes`, and the arm's held-out losses by seed."""

    arm: str
    processes: int
    resumed: Record
    losses: Sequence[float]

    @property
    def spread(self) -> float:
        return max(self.losses) - min(self.losses)

    @property
    def cells(self) -> Iterator[str]:
        resumed = self.resumed
        is_same, is_repeated = resumed["on"] == self.processes, not resumed["differing"] and resumed["checkpoint"]
        checkpoint = "equal" if resumed["checkpoint"] else "differs"
        differences = f"{resumed['differing']} steps differ, checkpoint {checkpoint}"
        yield self.arm
        yield f"{self.processes} -> {resumed['on']}"
        yield f"{resumed['at']} ({resumed['killed']})"
        yield "equal" if resumed["loaded"] else "**differs**"
        yield "equal" if is_repeated else f"**{differences}**" if is_same else differences
        yield f"{resumed['largest']:.5f}"
        yield f"{resumed['difference']:+.5f}"
        yield "-" if len(self.losses) < 2 else f"{self.spread:.5f} ({len(self.losses)})"
        if is_same:
            yield "bitwise" if is_repeated else "**not bitwise**"
        elif len(self.losses) < 2:
            yield "spread not known"
        else:
            yield "within" if abs(resumed["difference"]) <= self.spread else "**outside**"


_COLUMNS = (
    "arm", "processes", "resumed at (killed)", "loaded checkpoint", "losses and last checkpoint",
    "training losses differ by at most", "held-out loss less that of the whole run", "spread of seeds (of)", "",
)  # fmt: skip


def resume_tables(lines: Sequence[Record]) -> Iterator[str]:
    """Yield Markdown for each size of run: resumed runs, then arms by their losses on the fewest processes."""
    for size in dict.fromkeys(_size(line) for line in lines):
        same_size = [line for line in lines if _size(line) == size]
        yield from _resume_table(same_size)
        yield ""
        groups: convergence_table.Groups = {}
        for line in sorted(same_size, key=lambda line: -line["processes"]):
            convergence_table.add(groups, line)
        for trained, arms in groups.items():
            yield from convergence_table.table(trained, arms)
            yield ""


def _size(line: Record) -> tuple[str, ...]:
    return tuple(str(line[key]) for key in ("flags", "steps", "corpus"))


def _resume_table(lines: Sequence[Record]) -> Iterator[str]:
    rows = sorted(_rows(lines), key=lambda row: (list(ARMS).index(row.arm), row.processes))
    losses_by_arm = {row.arm: row.losses for row in rows if len(row.losses) > 1}
    variances = [statistics.variance(losses) for losses in losses_by_arm.values()]
    noise = f"{statistics.fmean(variances) ** 0.5:.5f}" if variances else "not known"
    yield f"`{lines[0]['flags']}`, {lines[0]['steps']} steps. A seed's standard deviation, pooled over arms: {noise}."
    yield ""
    yield from table_head(_COLUMNS).splitlines()
    yield from (table_row(row.cells) for row in rows)


def _rows(lines: Sequence[Record]) -> Iterator[ResumeRow]:
    for line in lines:
        same_arm = [record for record in lines if record["arm"] == line["arm"]]
        # The last value of a seed counts, which is from the fewest processes.
        losses = {
            record["seed"]: record["heldout"] for record in sorted(same_arm, key=lambda record: -record["processes"])
        }
        for resumed in line.get("resumed", ()):
            yield ResumeRow(line["arm"], line["processes"], resumed, list(losses.values()))


def main() -> None:
    separator = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = _parse(sys.argv[1:separator])
    if options.corpus:
        flags = tuple(sys.argv[separator + 1 :])
        trial = ResumeTrial(options.corpus, options.work, options.steps, options.processes, options.others, flags)
        for number, seed in enumerate(options.seeds):
            for name in options.arms:
                key = {"arm": name, "seed": seed, "corpus": corpus_hash(trial.corpus), **trial.fields}
                if not any(key.items() <= line.items() for line in read_records(options.results)):
                    append_json(options.results, run_arm(trial, name, seed, resumes=number == 0))
    print("\n".join(resume_tables(read_records(options.results))))


def _parse(arguments: list[str]) -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(",") if part)

    parser = make_parser(__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--work", type=Path, default=Path("convergence-work"))
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--processes", type=int, default=1, help="processes of uninterrupted runs")
    parser.add_argument("--others", type=numbers, default=(2,), help="other numbers of processes to resume on")
    parser.add_argument("--seeds", type=numbers, default=(0, 1))
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.arms if name not in ARMS]:
        parser.error(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    return options


if __name__ == "__main__":
    main()
