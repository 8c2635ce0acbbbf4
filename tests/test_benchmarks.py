"""The benchmark of optimizers, with a small model and two steps: what it trains, keeps, compares and refuses."""

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch

from benchmarks import host
from benchmarks import optimizers as bench
from benchmarks.optimizers import Run
from quantshard.tools.trainer.data import collect
from tests.covering import exhaustive

SMALL = replace(
    bench.DEMO,
    hidden=32,
    layers=1,
    heads=2,
    kv_heads=2,
    ffn=32,
    seq_length=16,
    steps=2,
    global_batch=1,
    eval_sequences=3,
)
NO_MASTERS, FP32 = Run("mxfp8", "no masters", 0), Run("mxfp8", "fp32 masters", 0)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(1, 128)) * 41)
    return collect([str(tmp_path / "text")])


def test_a_second_call_trains_only_what_is_missing(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PLAN", {"mxfp8": ("no masters",)})
    monkeypatch.setattr(bench, "SEEDS", {})
    file = tmp_path / "results.json"
    first = bench.measure(file, SMALL, corpus)
    trained = []
    monkeypatch.setattr(bench, "train", lambda run, *_: trained.append(run) or {"heldout": 1.0, "seconds": 0.0})
    monkeypatch.setattr(bench, "PLAN", {"mxfp8": ("fp32 masters", "no masters")})
    second = bench.measure(file, SMALL, corpus)
    assert trained == [FP32] and second[NO_MASTERS] == first[NO_MASTERS]
    with pytest.raises(ValueError, match="other settings"):
        bench.measure(file, replace(SMALL, steps=3), corpus)


def test_runs_of_one_seed_differ_in_the_optimizer_alone(corpus):
    windows = bench.Windows(corpus, SMALL.seq_length, SMALL.heldout)
    fp32, no_masters = (bench.train(run, SMALL, windows) for run in (FP32, NO_MASTERS))
    assert fp32["losses"][0] == no_masters["losses"][0]  # of the weights that both were born with
    assert fp32["heldout"] != no_masters["heldout"]
    assert bench.train(NO_MASTERS, SMALL, windows)["heldout"] == no_masters["heldout"]
    assert bench.train(NO_MASTERS._replace(seed=1), SMALL, windows)["losses"][0] != no_masters["losses"][0]
    assert (fp32["state_bytes"], no_masters["state_bytes"]) == (12, 8)


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
