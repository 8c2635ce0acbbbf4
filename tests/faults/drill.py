"""The fault drill: jobs are killed with SIGKILL at named and at random moments and resumed, and no bit may be lost.

`python -m tests.faults.drill --kills 100 --seed 7` (`make drill`) prints the seed and a table of the moments hit.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.ownership import LOCK_FILE
from tests.faults.job import ON_ANY_RANK, POINTS, Fault, Job, rank_main

BOUND_SECONDS = 90
"""Within which a job ends of which one process was killed: gloo's timeout, and some time to end on a busy machine."""

LONGEST_SECONDS = 400
"""Within which any job ends, on a machine however busy."""

ANY_TIME = "at any time"
RECIPES = ("mxfp8", "nvfp4", "delayed", "block")
MODES = (None, "thread")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.job", "torch._dynamo"])


@dataclass
class Attempt:
    """One start of a job: how its processes ended, what killed one, and how long the others took to end."""

    codes: list[int | None]
    killed: str | None
    seconds: float
    others_ended_after: float = 0.0


def attempt(job: Job, fault: Fault | None = None, after: float | None = None, all_at_once: bool = True) -> Attempt:
    """Run a job until it ends. `after`: seconds after which a process is killed; `all_at_once`: the others with it."""
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    hit = Path(job.folder, "hit")
    hit.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as meeting:
        processes: list[BaseProcess] = [
            _context.Process(target=rank_main, args=(rank, job, f"{meeting}/store", fault)) for rank in range(job.ranks)
        ]
        for process in processes:
            process.start()
        killed = _watch(processes, began, after)
        died = time.monotonic()
        if killed and all_at_once:
            _kill(processes)
        for process in processes:
            process.join(max(0.1, died + BOUND_SECONDS - time.monotonic()))
        ended = time.monotonic() - died
        codes = [process.exitcode for process in processes]
        _kill(processes)
    point = hit.read_text() if hit.exists() else ANY_TIME if killed else None
    return Attempt(codes, point, time.monotonic() - began, 0.0 if all_at_once else ended)


def _watch(processes: list[BaseProcess], began: float, after: float | None) -> bool:
    """Wait until all have ended or one was killed, if need be by us; whether one was.

    Raises:
        TimeoutError: they go on for longer than any job does; they are killed.
    """
    while any(process.is_alive() for process in processes):
        if time.monotonic() - began > LONGEST_SECONDS:
            _kill(processes)
            raise TimeoutError(f"the job had not ended after {LONGEST_SECONDS} s")
        if after is not None and time.monotonic() - began >= after:
            alive = [process for process in processes if process.is_alive()]
            os.kill(alive[-1].pid or 0, signal.SIGKILL)
            return True
        if any(process.exitcode == -signal.SIGKILL for process in processes):
            return True
        time.sleep(0.005)
    return any(process.exitcode == -signal.SIGKILL for process in processes)


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


# What must be so afterwards -------------------------------------------------------------------------------------------


def differences(job: Job, whole: Job) -> list[str]:
    """What a finished job has that the one that was never killed has not."""
    expected = {line["step"]: line for line in whole.lines()}
    lines = job.lines()
    wrong = [f"{line} for {expected[line['step']]}" for line in lines if line != expected[line["step"]]]
    missing = expected.keys() - {line["step"] for line in job.lines()}
    wrong += [f"step {step} is missing" for step in sorted(missing)]
    last = f"step-{job.steps:06d}"
    found = compare(job.checkpoints / last, whole.checkpoints / last)
    wrong += [str(difference) for difference in found.differences]
    for path in sorted(job.checkpoints.glob("step-*")):
        wrong += manifest.problems(path)
    if int(Path(job.folder, "from").read_text()) < job.steps:  # else nothing was saved that could have cleaned up
        wrong += [path.name for path in job.checkpoints.glob(".*") if path.name != LOCK_FILE]
    return wrong


@dataclass
class Result:
    """What a drill found."""

    moments: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    jobs: int = 0
    lines: int = 0
    compared: int = 0
    slowest_end: float = 0.0

    def table(self) -> str:
        rows = [f"{'killed':<60}times"]
        rows += [f"{point:<60}{count}" for point, count in sorted(self.moments.items())]
        return "\n".join(
            [
                *rows,
                f"{sum(self.moments.values())} kills in {self.jobs} jobs, {self.lines} steps compared; "
                f"differences: {len(self.wrong)}; one process killed alone: the job ended in {self.slowest_end:.1f} s",
            ]
        )


class Drill:
    """Kills jobs until it has killed often enough; each is resumed until it is done, and compared with a whole one."""

    def __init__(
        self,
        folder: Path,
        kills: int,
        seed: int,
        recipes: tuple[str, ...] = RECIPES,
        modes: tuple[str | None, ...] = MODES,
        say=lambda text: None,
    ):
        self.folder, self.kills, self.recipes, self.modes, self.say = folder, kills, recipes, modes, say
        self.chance, self.result = random.Random(seed), Result()
        self.wholes: dict[str, Job] = {}
        self.seconds = 4.0  # of an attempt that is not killed
        self.points: list[str] = []  # that are still to be hit before each is again

    def run(self) -> Result:
        """All of it."""
        while self.left():
            number = self.result.jobs
            recipe, mode = self.recipes[number % len(self.recipes)], self.modes[number // 2 % len(self.modes)]
            self.kill_and_finish(replace(self.whole(recipe), folder=str(self.folder / f"job-{number}"), mode=mode))
            self.result.jobs += 1
        return self.result

    def left(self) -> int:
        """The kills that are still to be done."""
        return max(0, self.kills - sum(self.result.moments.values()))

    def whole(self, recipe: str) -> Job:
        """The job that is never killed."""
        if recipe not in self.wholes:
            job = self.wholes[recipe] = Job(str(self.folder / f"whole-{recipe}"), recipe)
            first = attempt(job)
            assert first.codes == [0] * job.ranks, errors(job)
            self.seconds = first.seconds
        return self.wholes[recipe]

    def kill_and_finish(self, job: Job) -> None:
        """Start a job until it is done, with a fault each time, and compare."""
        while True:
            fault, after = self.draw(job)
            alone = self.chance.random() < 0.25
            now = attempt(job, fault, after, all_at_once=not alone)
            if now.killed is None:
                break
            self.result.moments[now.killed] += 1
            self.say(f"{self.kills - self.left():>4}  {job.recipe:<9}{job.mode or 'sync':<8}{now.killed}")
            self.result.slowest_end = max(self.result.slowest_end, now.others_ended_after)
            if None in now.codes:
                self.result.wrong.append(f"{job.folder}: a process outlived the killed one: {now.codes}")
        if now.codes != [0] * job.ranks:
            self.result.wrong.append(f"{job.folder}: ended with {now.codes}: {errors(job)}")
            return
        found = differences(job, self.wholes[job.recipe])
        self.result.wrong += [f"{job.folder}: {wrong}" for wrong in found]
        self.result.lines += len(job.lines())
        if not found:
            shutil.rmtree(job.folder)

    def draw(self, job: Job) -> tuple[Fault | None, float | None]:
        """The next fault, or after how many seconds to kill; neither if it was done often enough."""
        if not self.left():
            return None, None
        if self.chance.random() < 0.3:
            return None, self.chance.uniform(0.2, self.seconds)
        self.points = self.points or list(POINTS)
        point = self.points.pop(self.chance.randrange(len(self.points)))
        rank = self.chance.randrange(job.ranks) if point in ON_ANY_RANK else 0
        return Fault(point, self.chance.randint(1, 3), rank), None


def errors(job: Job) -> list[str]:
    """What the processes of a job ended with."""
    return [path.read_text() for path in sorted(Path(job.folder).glob("error-*.txt"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--mode", choices=("sync", "thread"), help="of saving, default: each in turn")
    options = parser.parse_args()
    modes = MODES if options.mode is None else (None if options.mode == "sync" else options.mode,)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        say = functools.partial(print, flush=True)
        result = Drill(Path(folder), options.kills, options.seed, modes=modes, say=say).run()
    print(result.table())
    for wrong in result.wrong:
        print(wrong)
    print(f"{len(result.wrong)} bits, files or processes are not as they should be" if result.wrong else "0 bits lost")
    sys.exit(bool(result.wrong))


if __name__ == "__main__":
    main()
