"""Does a run that was killed at its midpoint end as the one that was not? For each arm, on the same number of processes
and on others.

    python benchmarks/convergence_resume.py RESULTS.jsonl --corpus CORPUS --work DIR [--arms bf16,current,...]
        [--processes 1] [--others 2,3] [--seeds 0,1] [--steps 200] [-- FLAGS of quantshard train]
    python benchmarks/convergence_resume.py RESULTS.jsonl

An arm is a name of `ARMS`. Of the first seed it is trained to the end, started again and killed by SIGKILL soon after
the checkpoint at half of the steps, and resumed from there: on as many processes, which must repeat all losses and the
last checkpoint bit for bit, and on each of the others, where the checkpoint must be loaded bit for bit, and the run end
as near as seeds do. Of the other seeds it is trained to the end. CORPUS is a folder of `convergence_corpus.py`; FLAGS
are of all runs, an arm's own come after them. A run to the end is a line of RESULTS.jsonl, as those of
`convergence_runs.py`, with what its resumed ones came to in `resumed`; what has a line is not run again. The second
form prints the tables, as the first does when all is done. Checkpoints are removed from DIR as soon as they are
compared and equal.
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
from quantshard.checkpoints.comparison import compare
from quantshard.tools.cli.demo import facts, last_step, records, started
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
"""Flags by the name that `convergence_runs.py` has for such a run. Lion's rate is the best of docs/optimizers.md."""

_POLL_SECONDS = 0.02
_END_SECONDS = 1.0
"""Processes whose launcher was killed end within a fifth of it."""

Record = dict[str, Any]


@dataclass(frozen=True)
class ResumeTrial:
    """What all arms have in common. `flags`: of `quantshard train`; `processes`: on which runs are started."""

    corpus: Path
    work: Path
    steps: int
    processes: int
    others: tuple[int, ...]
    flags: tuple[str, ...]

    @property
    def middle(self) -> int:
        """The step of the only checkpoint but the last."""
        return self.steps // 2

    @property
    def told(self) -> Record:
        """What a record has of it, by which it is found again."""
        return {"processes": self.processes, "steps": self.steps, "flags": " ".join(self.flags)}

    def folder(self, name: str, seed: int) -> Path:
        """Where the runs of an arm and seed are."""
        same = json.dumps([self.told, corpus_hash(self.corpus)])
        return self.work / sha256(same.encode()).hexdigest()[:8] / f"{name}-{seed}".replace(" ", "-")

    def train(self, run: RunDir, name: str, seed: int, kill: bool = False) -> int:
        """`quantshard train`, perhaps killed; returns the last step done."""
        given: dict[str, Any] = {
            "--run": run.path, "--nproc-per-node": self.processes, "--data": self.corpus / "train.bin",
            "--heldout-data": self.corpus / "heldout.bin", "--tokenizer": self.corpus / "tokenizer.json",
            "--end-of-document": END_OF_DOCUMENT, "--steps": self.steps, "--save-every": self.middle, "--seed": seed,
            "--eval-every": 0,
        }  # fmt: skip
        pairs = [str(part) for pair in given.items() for part in pair]
        return _follow(["train", *pairs, *self.flags, *ARMS[name]], run, self.middle if kill else 0)


# Runs


def result(trial: ResumeTrial, name: str, seed: int, resumes: bool) -> Record:
    """A record of an arm trained to the end, and of what was killed and `resumes`."""
    folder = trial.folder(name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    whole = RunDir(folder / "whole")
    if not whole.is_begun() or not records(whole.metrics) or last_step(whole) < trial.steps:
        shutil.rmtree(whole.path, ignore_errors=True)
        trial.train(whole, name, seed)
    found = record(trial.corpus, whole.path) | trial.told
    if found["arm"] != name:
        raise ValueError(f"{whole.path} is of the arm {found['arm']!r}, not {name!r}; name a flag of it in no FLAGS")
    if resumes:
        found["resumed"] = list(_resumed(trial, name, seed, whole))
    if all(each["exact"] for each in found.get("resumed", ())):
        shutil.rmtree(folder)
    return found


def _resumed(trial: ResumeTrial, name: str, seed: int, whole: RunDir) -> Iterator[Record]:
    """Kill a run at its midpoint, and go on with it on each number of processes."""
    killed = RunDir(whole.path.with_name("killed"))
    copies = {count: RunDir(whole.path.with_name(f"on-{count}")) for count in (trial.processes, *trial.others)}
    for run in (killed, *copies.values()):
        shutil.rmtree(run.path, ignore_errors=True)
    reached = trial.train(killed, name, seed, kill=True)
    for count, run in copies.items():
        shutil.copytree(killed.path, run.path)
        again = run.path.with_name(f"loaded-on-{count}")
        shutil.rmtree(again, ignore_errors=True)
        _follow(["resume", str(run.path), "--nproc-per-node", str(count), "--copy-to", str(again)], run)
        loaded = compare(killed.checkpoint(trial.middle), again).equal
        found = {"on": count, "at": trial.middle, "killed": reached, "loaded": loaded, **_compared(whole, run)}
        ends = count != trial.processes or (not found["differing"] and found["checkpoint"])
        yield found | {"exact": loaded and ends}


def _compared(whole: RunDir, run: RunDir) -> Record:
    """How a resumed run differs from the one that was not stopped, in its steps and in the last checkpoint."""
    theirs, mine = ({each["step"]: each for each in records(each.metrics)} for each in (whole, run))
    last = max(theirs)
    gaps = [abs(theirs[step]["loss"] - mine[step]["loss"]) for step in theirs if step in mine]
    return {
        "heldout": mine[last]["heldout_loss"],
        "difference": mine[last]["heldout_loss"] - theirs[last]["heldout_loss"],
        "differing": sum(step not in mine or facts(mine[step]) != facts(theirs[step]) for step in theirs),
        "largest": max(gaps),
        "checkpoint": compare(whole.checkpoint(last), run.checkpoint(last)).equal,
    }


def _follow(arguments: list[str], run: RunDir, kill_after: int = 0) -> int:
    """Run a command that trains; kill it once it has saved a step, and done another; returns the last step done.

    Raises:
        RuntimeError: it failed, or ended before it could be killed.
    """
    log = run.path.with_name(f"{run.path.name}-{arguments[0]}.log")
    log.unlink(missing_ok=True)
    with started(arguments, log) as process:
        while kill_after and process.poll() is None:
            time.sleep(_POLL_SECONDS)
            if last_step(run) > kill_after and kill_after in run.saved_steps()[0]:
                os.killpg(process.pid, signal.SIGKILL)
                break
        code = process.wait()
    if code != (-signal.SIGKILL if kill_after else 0):
        raise RuntimeError(f"`quantshard {arguments[0]}` ended with {code}; see {log}")
    time.sleep(_END_SECONDS if kill_after else 0.0)
    return last_step(run)


# Tables


class ResumeRow(NamedTuple):
    """An arm on some processes, what became of it on the same number or others, and its held-out losses by seed."""

    arm: str
    processes: int
    resumed: Record
    seeds: Sequence[float]

    @property
    def spread(self) -> float:
        """The highest less the lowest of the seeds."""
        return max(self.seeds) - min(self.seeds)

    @property
    def cells(self) -> Iterator[str]:
        """As in the table."""
        found = self.resumed
        yield self.arm
        yield f"{self.processes} -> {found['on']}"
        yield f"{found['at']} ({found['killed']})"
        yield "equal" if found["loaded"] else "**differs**"
        is_same, claimed = found["on"] == self.processes, not found["differing"] and found["checkpoint"]
        what = f"{found['differing']} steps differ, checkpoint {'equal' if found['checkpoint'] else 'differs'}"
        yield "equal" if claimed else f"**{what}**" if is_same else what
        yield f"{found['largest']:.5f}"
        yield f"{found['difference']:+.5f}"
        yield "-" if len(self.seeds) < 2 else f"{self.spread:.5f} ({len(self.seeds)})"
        yield "bitwise" if is_same and claimed else self._verdict

    @property
    def _verdict(self) -> str:
        if self.resumed["on"] == self.processes:
            return "**not bitwise**"
        if len(self.seeds) < 2:
            return "spread not known"
        return "within" if abs(self.resumed["difference"]) <= self.spread else "**outside**"


_HEADINGS = (
    "arm", "processes", "resumed at (killed)", "loaded checkpoint", "losses and last checkpoint",
    "training losses differ by at most", "held-out loss less that of the whole run", "spread of seeds (of)", "",
)  # fmt: skip


def resume_tables(lines: Sequence[Record]) -> Iterator[str]:
    """Lines of Markdown: for each size what resumed runs came to, then arms by their losses on the fewest processes."""
    for size in dict.fromkeys(_size(line) for line in lines):
        alike = [line for line in lines if _size(line) == size]
        yield from _resume_table(alike)
        yield ""
        groups: dict[convergence_table.TrainedOn, dict[str, convergence_table.ArmResult]] = {}
        for line in sorted(alike, key=lambda line: -line["processes"]):
            convergence_table.add(groups, line)
        for trained, arms in groups.items():
            yield from convergence_table.table(trained, arms)
            yield ""


def _size(line: Record) -> tuple[str, ...]:
    return tuple(str(line[key]) for key in ("flags", "steps", "corpus"))


def _resume_table(alike: Sequence[Record]) -> Iterator[str]:
    rows = sorted(_rows(alike), key=lambda row: (list(ARMS).index(row.arm), row.processes))
    by_seed = {row.arm: row.seeds for row in rows if len(row.seeds) > 1}
    variances = [statistics.variance(seeds) for seeds in by_seed.values()]
    noise = f"{statistics.fmean(variances) ** 0.5:.5f}" if variances else "not known"
    yield f"`{alike[0]['flags']}`, {alike[0]['steps']} steps. A seed's standard deviation, pooled over arms: {noise}."
    yield ""
    yield f"| {' | '.join(_HEADINGS)} |"
    yield "|---" * len(_HEADINGS) + "|"
    yield from (f"| {' | '.join(row.cells)} |" for row in rows)


def _rows(alike: Sequence[Record]) -> Iterator[ResumeRow]:
    for line in alike:
        same = sorted((each for each in alike if each["arm"] == line["arm"]), key=lambda each: -each["processes"])
        seeds = {each["seed"]: each["heldout"] for each in same}
        for each in line.get("resumed", ()):
            yield ResumeRow(line["arm"], line["processes"], each, list(seeds.values()))


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    asked = _parsed(sys.argv[1:at])
    if asked.corpus:
        trial = ResumeTrial(
            asked.corpus, asked.work, asked.steps, asked.processes, asked.others, tuple(sys.argv[at + 1 :])
        )
        for number, seed in enumerate(asked.seeds):
            for name in asked.arms:
                if not _is_done(asked.results, trial, name, seed):
                    found = json.dumps(result(trial, name, seed, resumes=number == 0))
                    with asked.results.open("a") as out:
                        out.write(found + "\n")
    print("\n".join(resume_tables(records(asked.results))))


def _is_done(results: Path, trial: ResumeTrial, name: str, seed: int) -> bool:
    wanted = {"arm": name, "seed": seed, "corpus": corpus_hash(trial.corpus), **trial.told}
    return any(wanted.items() <= line.items() for line in records(results))


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(",") if part)

    parser.add_argument("results", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--work", type=Path, default=Path("convergence-work"))
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--others", type=numbers, default=(2,))
    parser.add_argument("--seeds", type=numbers, default=(0, 1))
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.arms if name not in ARMS]:
        parser.error(f"there is no arm {unknown[0]!r}; there are {', '.join(ARMS)}")
    return asked


if __name__ == "__main__":
    main()
