"""What a step costs in energy: watts and clocks of the GPU while one variant of `block_step.py` steps without pause.

    python benchmarks/power.py [--only 'ours-*,bf16-compiled'] [--seconds 4] [the shape as for block_step.py]

A GPU at its limit of power lowers its clocks, so of two variants that move the same bytes the one that needs less
energy is the faster. `nvidia-smi` is asked ten times a second; the first second of each variant is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from benchmarks.block_step import Shape, Subject, torchao, variants

WARM = 1.0
"""Seconds until clocks have settled."""
PERIOD = 100
"""Milliseconds between two readings."""
QUERY = ("power.draw.instant", "clocks.sm")


class Reading(NamedTuple):
    """Watts and MHz."""

    power: float
    clock: float


class Draw(NamedTuple):
    """What a variant draws: medians of the readings, and milliseconds and joules of a step."""

    reading: Reading
    milliseconds: float
    joules: float


@contextmanager
def readings() -> Iterator[list[Reading]]:
    """A list that is filled where the block ends."""
    device = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = f"--query-gpu={','.join(QUERY)}"
    process = subprocess.Popen(
        ["nvidia-smi", device, query, "--format=csv,noheader,nounits", f"--loop-ms={PERIOD}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    found: list[Reading] = []
    try:
        yield found
    finally:
        process.terminate()
        found += read(process.communicate()[0])


def read(text: str) -> list[Reading]:
    """Readings as nvidia-smi prints them, a line each; what its end cut off is left out."""
    return [Reading(*map(float, line.split(","))) for line in text.rpartition("\n")[0].splitlines()]


def run(step: Callable[[], None], steps: int) -> float:
    """Seconds of each of some steps."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def draw(step: Callable[[], None], seconds: float, each: float, agreed: Callable[[int], int] = int) -> Draw:
    """Of what steps without pause for some seconds; `each`: how long a step takes, about. `agreed`: makes the number of
    steps that of all ranks.

    Raises:
        OSError: nvidia-smi is not there.
        ValueError: it said nothing.
    """
    run(step, agreed(math.ceil(WARM / each)))
    steps = agreed(math.ceil(seconds / each))
    with readings() as found:
        each = run(step, steps)
    if not found:
        raise ValueError(f"nvidia-smi said nothing in {seconds:g} s")
    power, clock = (statistics.median(values) for values in zip(*found, strict=True))
    return Draw(Reading(power, clock), each * 1e3, statistics.mean(one.power for one in found) * each)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bf16-compiled,torchao-tensorwise,ours-*", help="variants, with commas")
    parser.add_argument("--seconds", type=float, default=4.0)
    for field in dataclasses.fields(Shape)[:-1]:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/power.py: there is no GPU whose power could be read")
    sizes = {field.name: getattr(options, field.name) for field in dataclasses.fields(Shape)[:-1]}
    shape = Shape(**sizes, device="cuda")
    print(f"## {torch.cuda.get_device_name()}, torch {torch.__version__}, torchao {torchao()}, {datetime.date.today()}")
    print(f"\n{shape}\n\n| variant | W | MHz | ms a step | J a step |\n|---|---|---|---|---|", flush=True)
    for variant in variants(False, False, True):
        if not any(fnmatch.fnmatch(variant.name, pattern) for pattern in options.only.split(",")):
            continue
        subject = Subject(variant, shape, None, "inductor")

        def step(subject: Subject = subject) -> None:
            subject.step()
            subject.clear()

        found = draw(step, options.seconds, run(step, 4))
        power, clock = found.reading
        cells = [variant.name, f"{power:.0f}", f"{clock:.0f}", f"{found.milliseconds:.2f}", f"{found.joules:.1f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
        del subject, step
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
