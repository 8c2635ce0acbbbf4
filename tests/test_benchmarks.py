"""The benchmark of optimizers, with a small model and two steps: what it trains, keeps, compares and refuses."""

import contextlib
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

import quantshard
from benchmarks import convert_models as converted
from benchmarks import host, moment_reach, power
from benchmarks import optimizers as bench
from benchmarks.optimizers import Compared, Run
from quantshard import checkpoints
from quantshard.optimizers import FusedAdam
from quantshard.tools.trainer.data import collect
from tests.covering import exhaustive
from tests.modules.graphed import rerun

__all__ = ["rerun"]

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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_option_trains_and_is_compared(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "BLOCK", 1)
    results = bench.measure(tmp_path / "results.json", SMALL, corpus)
    assert list(results) == bench.plan()
    assert {run.option for run in results} == set(bench.OPTIONS)
    assert results[Run("bf16", "remainders", 0)]["losses"] == results[Run("bf16", "fp32 masters", 0)]["losses"]
    rows = [line for line in bench.tables(results) if line.startswith("|")]
    assert len(rows) == 2 + sum(map(len, bench.PLAN.values()))
    bench.draw(tmp_path / "plot.svg", results)
    assert (tmp_path / "plot.svg").stat().st_size > 10_000


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


def test_noise_is_that_of_the_control_and_shrinks_with_seeds():
    control, other = Compared("mxfp8", bench.CONTROL, [3.0, -1.0]), Compared("nvfp4", "no masters", [7.0])
    noise = bench.noise_of([control, other, Compared("nvfp4", bench.CONTROL, [2.0])])
    assert noise == pytest.approx((14 / 3) ** 0.5)
    assert other.bound(noise) == pytest.approx(3.18 * noise)
    assert control.bound(noise) == pytest.approx(3.18 * noise / 2**0.5)


def test_converted_models_are_measured_beside_bf16(rerun):
    """Captured layers, whose graphs are run again here, train as eager ones do."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    }  # fmt: skip
    rows = []
    for variant in ("bf16", "current"):
        subject = replace(converted.MODELS["qwen3-8b"], sizes=sizes, batch=1, length=16)
        found = converted.measure(subject, variant, "eager", steps=1, device="cpu")
        assert found["last loss"] < found["first loss"]  # the layers train
        captured = converted.measure(subject, variant, "graphed", steps=1, device="cpu")
        assert [captured[name] for name in ("first loss", "last loss")] == [found["first loss"], found["last loss"]]
        rows.append({"model": "qwen3-8b", "variant": variant, "run": "eager", **found, "peak GiB": 1.0})
    rows[1]["step"] = rows[0]["step"] * 2
    assert [line.split(" | ")[4] for line in converted.table(rows)[2:]] == ["1.00", "2.00"]


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
    step, referred = host.Subject.step, WeakKeyDictionary[torch.nn.Module, int]()

    def littering(subject: host.Subject) -> None:
        for _ in range(2 * gc.get_threshold()[0]):
            module = torch.nn.Module()
            module.itself = [module]
            referred[module] = 1
        step(subject)

    monkeypatch.setattr(host.Subject, "step", littering)
    subject = host.Subject("linear", "bf16", 16, "cpu")
    counted = [host.counts(subject, Counter())["calls"] for _ in range(2)]
    gc.disable()
    try:
        assert counted == [host.counts(subject, Counter())["calls"]] * 2
    finally:
        gc.enable()


def test_readings_of_power_are_read() -> None:
    assert power.read("412.50, 1755\n698.01, 1410\n702.3, 1") == [(412.5, 1755), (698.01, 1410)]


def test_energy_is_that_of_steps_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many steps as all ranks agree on; what nvidia-smi does not say is told."""
    found = [power.Reading(*each) for each in ((500.0, 1500.0), (700.0, 1400.0), (720.0, 1300.0))]
    steps, agreed = list[int](), list[int]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(power, "readings", lambda: contextlib.nullcontext(found))
    monkeypatch.setattr(power, "WARM", 0.02)
    drawn = power.draw(lambda: steps.append(1), 0.05, 0.01, lambda count: agreed.append(count) or 3)
    assert agreed == [2, 5] and len(steps) == 6
    assert drawn.reading == (700.0, 1400.0) and drawn.joules == pytest.approx(0.64 * drawn.milliseconds)
    found.clear()
    with pytest.raises(ValueError, match=r"nvidia-smi said nothing in 0\.05 s"):
        power.draw(lambda: None, 0.05, 0.01)


@pytest.mark.exhaustive
def test_what_logging_costs_is_told():
    """In a process of its own, for a group of processes is made there."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.logging_cost", "--layers", "1", "--steps", "3", "--of-step-ms", "10"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.split("|")[1:-1] for line in found.stdout.splitlines() if line.startswith("| ")][1:]
    assert [" ".join(row[0].split()[-2:]) for row in rows] == [
        "a step", "and `--tensorboard`", "`--wandb`, offline", "sampled step"
    ]  # fmt: skip
    for _, middle, _, share in rows:
        assert float(middle) > 0 and abs(float(share.strip(" %")) - float(middle) / 100) < 0.1


def test_how_far_second_moments_reach(tmp_path, monkeypatch, capsys):
    """One element in each block of 128 below E4M3's smallest code beside the largest, one below UE5M3's too."""
    torch.manual_seed(0)
    with quantshard.quantized_model_init(recipe="current"):
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([quantshard.Linear(256, 8) for _ in range(2)])})
    optimizer = FusedAdam(model.named_parameters())
    for param in (param for param in model.parameters() if param.ndim == 2):
        values = torch.full((8, 256), 2.0**-5)
        values[:, ::128], values[:, 1::128], values[:, 2::128], values[3] = 1.0, 2.0**-18, 2.0**-40, 0.0
        optimizer.set_scaled_state(param, "exp_avg_sq", values)
    checkpoints.save(tmp_path / "c", model, optimizer)
    found = moment_reach.by_kind(tmp_path / "c")
    assert found == {"weight": moment_reach.Reach(2 * 7 * 256, (2 / 128, 1 / 128), -5.0)}
    monkeypatch.setattr("sys.argv", ["moment_reach.py", str(tmp_path / "c")])
    moment_reach.main()
    assert "| weight | 3,584 | 1.5625 | 0.7812 | -5.0 |" in capsys.readouterr().out
