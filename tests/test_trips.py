"""How many files and functions of the package one job enters: long trips are hard to follow, and cost host time.

The GPU path runs on the meta device, which `described_gpu` makes look like an H200.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

PACKAGE = str(Path(__file__).parents[1] / "quantshard") + os.sep

LIMITS = {
    "forward": (14, 74),
    "backward": (10, 66),
    "forward, mxfp8": (18, 90),
    "backward, mxfp8": (18, 108),
    "step": (17, 195),
    "save": (12, 295),
    "load": (16, 980),
}
"""Job -> the most files that it may enter, and the most calls. Lower a limit when a job gets shorter."""


class Trip:
    """Counts the calls of functions of the package, by file and name."""

    def __enter__(self) -> "Trip":
        self.calls: Counter[tuple[str, str]] = Counter()
        sys.setprofile(self.count)
        return self

    def count(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls[code.co_filename, getattr(code, "co_qualname", code.co_name)] += 1

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def size(self) -> tuple[int, int]:
        return len({file for file, _ in self.calls}), sum(self.calls.values())


def measure() -> dict[str, tuple[int, int]]:
    """The size of each job; the third call of a layer, when what is made once exists."""
    import tempfile
    import warnings

    import torch

    import quantshard as qs
    from quantshard.gemm.predictions import described_gpu

    warnings.simplefilter("ignore")
    sizes = {}

    def layer(device: str, recipe: str, name: str) -> torch.nn.Module:
        with qs.quantized_model_init(recipe=recipe):
            linear = qs.Linear(256, 256, params_dtype=torch.bfloat16, device=device, bias=False)
        x = torch.randn(64, 256, dtype=torch.bfloat16, device=device).requires_grad_()
        for _ in range(3):
            with qs.autocast(recipe=recipe), Trip() as forward:
                y = linear(x)
            with Trip() as backward:
                y.backward(torch.ones_like(y))
        sizes[f"forward{name}"], sizes[f"backward{name}"] = forward.size(), backward.size()
        return linear

    with described_gpu((9, 0)):
        layer("meta", "current", "")
        layer("meta", "mxfp8", ", mxfp8")
    linear = layer("cpu", "current", ", cpu")
    optimizer = qs.optimizers.FusedAdam(linear.parameters(), lr=1e-3)
    for _ in range(3):
        with Trip() as step:
            optimizer.step()
    sizes["step"] = step.size()
    with tempfile.TemporaryDirectory() as folder:
        with Trip() as save:
            qs.checkpoints.save(f"{folder}/checkpoint", linear, optimizer)
        with Trip() as load:
            qs.checkpoints.load(f"{folder}/checkpoint", linear, optimizer)
    sizes["save"], sizes["load"] = save.size(), load.size()
    return sizes


@pytest.fixture(scope="module")
def sizes() -> dict[str, tuple[int, int]]:
    """Measured in a process of its own: other tests leave caches and hooks behind."""
    output = subprocess.check_output([sys.executable, "-m", "tests.test_trips"], cwd=Path(__file__).parents[1])
    return {job: tuple(size) for job, size in json.loads(output.splitlines()[-1]).items()}


@pytest.mark.parametrize("job", LIMITS)
def test_a_job_enters_few_files_and_functions(sizes: dict[str, tuple[int, int]], job: str) -> None:
    (files, calls), (most_files, most_calls) = sizes[job], LIMITS[job]
    assert files <= most_files and calls <= most_calls, f"{job}: {files} files, {calls} calls"


if __name__ == "__main__":
    print(json.dumps(measure()))
