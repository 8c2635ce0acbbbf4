"""What the host does for a module, counted by benchmarks/host.py on a machine without a GPU."""

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from weakref import WeakKeyDictionary

import pytest
import torch

from benchmarks import host
from tests.covering import exhaustive

HOST_WORK = {
    "linear": {
        "current": (280, 16, 8), "delayed": (390, 27, 8), "block": (275, 21, 6),
        "rowwise": (330, 25, 7), "mxfp8": (330, 22, 6), "nvfp4": (395, 25, 7),
    },
    "layer": {
        "current": (1330, 128, 45), "delayed": (1610, 137, 43), "block": (1350, 153, 39),
        "rowwise": (1660, 172, 38), "mxfp8": (1660, 163, 42), "nvfp4": (2045, 193, 43),
    },
    "llama-fused": {"current": (1600, 224, 48), "delayed": (1950, 239, 44), "block": (1570, 245, 38)},
}  # fmt: skip
"""At most so many Python calls, ATen operations and launches, products included, of a step, forward and backward."""
WIDTH = 512
"""The least whose grids of square blocks are not filled up, which takes operations that wider ones do without."""


COUNT = """
import json, sys
from benchmarks import host
from quantshard.kernels import workspace
host.TOKENS = (128, 1)  # as many calls as for more tokens, in a fifth of the time
workspace.SCALARS = 2048  # one step of several makes shared scalars; none of these
rows = {}
for module, recipe in json.loads(sys.argv[1]):
    workspace._FREE.clear()
    row = host.measure(module, recipe, int(sys.argv[2]), repeats=1)
    rows[f"{module} {recipe}"] = [row[name] for name in ("calls", "operations", "launches")]
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def host_counts(request: pytest.FixtureRequest) -> dict[str, list[int]]:
    """Counts by module and recipe, from a new process: what other tests leave behind adds Python calls."""
    if torch.cuda.is_available():
        pytest.skip("counts are those of a machine without a GPU")
    asked = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = [
        (spec.params["module"], spec.params["recipe"]) for spec in asked if spec is not None and "module" in spec.params
    ]
    command = [sys.executable, "-W", "ignore", "-c", COUNT, json.dumps(cases), str(WIDTH)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(output.splitlines()[-1])


EVERY = [(module, recipe) for module, by in HOST_WORK.items() for recipe in by]
SOME = [("linear", "current"), ("linear", "block"), ("linear", "nvfp4"), ("layer", "current")]


@pytest.mark.parametrize(("module", "recipe"), exhaustive(EVERY, SOME))
def test_the_host_does_no_more_for_a_module(module: str, recipe: str, host_counts: dict[str, list[int]]) -> None:
    counted = host_counts[f"{module} {recipe}"]
    assert all(count <= most for count, most in zip(counted, HOST_WORK[module][recipe], strict=True)), counted
    assert counted[2] > 5


def test_garbage_of_others_is_no_call_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed in the midst of a step, each object that is referred to weakly calls Python."""
    step, referred, thresholds = host.Subject.step, WeakKeyDictionary[torch.nn.Module, int](), gc.get_threshold()

    def littering(subject: host.Subject) -> None:
        for _ in range(2 * 700):
            module = torch.nn.Module()
            module.itself = [module]
            referred[module] = 1
        step(subject)

    monkeypatch.setattr(host.Subject, "step", littering)
    subject = host.Subject("linear", "bf16", 16, "cpu")
    gc.set_threshold(700, 10, 10)  # as Python has it, and conftest.py has not
    try:
        counted = [host.counts(subject, Counter())["calls"] for _ in range(2)]
        gc.disable()
        assert counted == [host.counts(subject, Counter())["calls"]] * 2
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
