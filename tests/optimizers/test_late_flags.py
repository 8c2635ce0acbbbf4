"""On a GPU no step waits for what the device finds out of its gradients: the next step counts and raises it.

Triton's interpreter runs the kernels, and flags come to the host as from a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quantshard import checkpoints
from quantshard.errors import NonFiniteGradientError
from quantshard.optimizers import ElementwiseOptimizer, FusedAdam, MasterWeights
from tests.covering import exhaustive
from tests.interpreter import kernels_on, prepared_once
from tests.late_flags import flags_come_late, read_flags
from tests.optimizers import test_lion_and_muon_on_kernels as of_others
from tests.optimizers.test_on_kernels import DEVICE, build, differing, everything, set_grads

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflows, in the interpreter


@pytest.fixture(autouse=True)
def _on_kernels() -> Iterator[None]:
    with prepared_once(), kernels_on(DEVICE):
        yield


def made(name: str, **options: Any) -> tuple[dict[str, Any], Any]:
    params, adam = build("mxfp8", **options)
    if name == "adam":
        return params, adam
    if name == "MasterWeights":
        return params, MasterWeights(torch.optim.SGD, list(params.items()), lr=0.01, **options)
    return params, of_others.BUILDERS[name](params, torch.float32, **options)


def stepped(params: dict[str, Any], optimizer: Any, number: int, bad: tuple[int, ...] = ()) -> None:
    set_grads(params, number)
    if number in bad:
        params["vector"].grad[3] = float("nan")
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "options", "deferred"),
    [
        ("adam", {}, True),
        pytest.param("adam", {"preset": "lean8"}, True, marks=pytest.mark.exhaustive),
        pytest.param("adam", {"ema_decay": 0.9}, True, marks=pytest.mark.exhaustive),
        ("lion", {}, True),
        ("muon", {}, True),
        ("adam", {"master_weights": False}, False),  # draws of the weights' own are counted on the host
        ("MasterWeights", {}, False),  # PyTorch's optimizer can be told by nobody but the host
    ],
)
def test_a_step_waits_for_no_flag_of_its_own(name: str, options: dict[str, Any], deferred: bool) -> None:
    """But each is read: by the next step, and the last by whoever asks for the count."""
    params, optimizer = made(name, **options)
    with flags_come_late():
        for number in range(3):
            with read_flags() as (begun, read):
                stepped(params, optimizer, number)
            assert len(begun) == 1, "flags of a step are sent once"
            assert begun.isdisjoint(read) == deferred
            assert len(read) == (0 if deferred and number == 0 else 1)
        with read_flags() as (begun, read):
            assert optimizer.skipped_steps == 0
        assert (len(begun), len(read)) == (0, int(deferred))


@pytest.mark.parametrize(
    ("name", "bad"),
    exhaustive(
        product(("adam", "lion", "muon"), ((1,), (0, 2), (1, 2), (3,))),
        [("adam", (1, 2)), ("lion", (0, 2))],
    ),
)
def test_bits_and_counts_are_those_of_a_host_that_waits(name: str, bad: tuple[int, ...]) -> None:
    """Four steps, of which some are skipped; the last is read by the state dict."""
    found = []
    for late in (False, True):
        params, optimizer = made(name)
        context = flags_come_late() if late else prepared_once()
        with context:
            for number in range(4):
                stepped(params, optimizer, number, bad)
                if late and number in bad:
                    assert optimizer._unread is not None
            counts = optimizer.state_dict()["param_groups"]
        held = {key: value for key, value in everything(params, optimizer).items() if not key.endswith(" writes")}
        found.append((held, [(group["step"], group["skipped_steps"]) for group in counts]))
    (expected, counted), (late_values, late_counts) = found
    assert not differing(late_values, expected)
    assert late_counts == counted == [(4 - len(bad), len(bad))] * len(counted)


def test_a_skipped_step_changes_nothing_while_nobody_knows() -> None:
    params, optimizer = made("adam")
    before = everything(params, optimizer)
    with flags_come_late():
        stepped(params, optimizer, 0, bad=(0,))
        assert [group["step"] for group in optimizer.param_groups] == [1, 1], "taken for made"
        assert optimizer.skipped_steps == 1
        assert [group["step"] for group in optimizer.param_groups] == [0, 0]
        assert optimizer.large_gradient == ""
    after = everything(params, optimizer)
    for counted in ("step", "skipped_steps", "skipped_in_a_row"):
        for number in (0, 1):
            after[f"{number} {counted}"] = before[f"{number} {counted}"]
    assert [key for key in differing(after, before) if not key.endswith(" writes")] == []


def bad_steps(optimizer: ElementwiseOptimizer, params: dict[str, Any], count: int) -> None:
    for number in range(count):
        stepped(params, optimizer, number, bad=tuple(range(count)))


def test_too_many_in_a_row_are_raised_by_the_next_step() -> None:
    """Once; who only counts is told nothing, as one rank may count alone."""
    params, optimizer = made("adam", max_skipped_in_a_row=2)
    with flags_come_late():
        bad_steps(optimizer, params, 2)
        assert optimizer.skipped_steps == 2
        with pytest.raises(NonFiniteGradientError, match=r"2 steps in a row .* first in vector"):
            stepped(params, optimizer, 2)
        stepped(params, optimizer, 3)
        assert optimizer.skipped_steps == 2
        assert [group["step"] for group in optimizer.param_groups] == [1, 1]
        assert [group["skipped_in_a_row"] for group in optimizer.param_groups] == [0, 0]


def test_a_state_dict_counts_and_leaves_the_error_to_the_next_step() -> None:
    """One rank alone may ask for a state dict, and would part from the others by an error."""
    params, optimizer = made("adam", max_skipped_in_a_row=2)
    with flags_come_late():
        bad_steps(optimizer, params, 2)
        groups = optimizer.state_dict()["param_groups"]
        assert [(group["step"], group["skipped_steps"]) for group in groups] == [(0, 2)] * 2
        with pytest.raises(NonFiniteGradientError, match="2 steps in a row"):
            stepped(params, optimizer, 2)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_load_is_the_way_out(tmp_path: Path, capturable: bool) -> None:
    """By `load_state_dict`, and by `checkpoints.load`, which asks for a state dict to fill."""
    model = torch.nn.Linear(6, 4, device=DEVICE)

    def step(value: float) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        optimizer.step()

    optimizer = FusedAdam(model.named_parameters(), lr=1e-2, max_skipped_in_a_row=2, capturable=capturable)
    with flags_come_late():
        step(1.0)
        saved = optimizer.state_dict()
        checkpoints.save(tmp_path / "checkpoint", model, optimizer)
        for way in ("checkpoint", "state dict"):
            step(math.nan)
            step(math.nan)
            if way == "checkpoint":
                checkpoints.load(tmp_path / "checkpoint", model, optimizer)
            else:
                optimizer.load_state_dict(saved)
            step(1.0)
            [group] = optimizer.state_dict()["param_groups"]
            assert (group["step"], group["skipped_steps"], group["skipped_in_a_row"]) == (2, 0, 0)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_first_step_that_was_skipped_leaves_nothing_to_lose(is_read: bool) -> None:
    """Parameters may be replaced, as by sharding the model, after it; also before anybody has read that."""
    params, optimizer = made("adam")
    with flags_come_late():
        stepped(params, optimizer, 0, bad=(0,))
        if is_read:
            assert optimizer.skipped_steps == 1
        for group in optimizer.param_groups:
            group["params"] = [torch.nn.Parameter(param.detach().clone()) for param in group["params"]]
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            param.grad = torch.zeros(param.shape, dtype=param.dtype, device=DEVICE)
        optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["step"] == 1


def test_a_group_that_is_added_counts_for_itself() -> None:
    params, optimizer = made("adam")
    with flags_come_late():
        stepped(params, optimizer, 0, bad=(0,))
        optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(2, 3, device=DEVICE)))]})
        assert [group["step"] for group in optimizer.param_groups] == [0, 0, 0]
        assert [group["skipped_steps"] for group in optimizer.param_groups] == [1, 1, 0]


def test_a_gradient_too_large_is_named_by_the_next_step() -> None:
    params, optimizer = made("adam")
    with flags_come_late():
        set_grads(params, 0)
        params["fp32"].grad[1, 1] = 1e30
        optimizer.step()
        with pytest.warns(UserWarning, match=r"gradient of fp32 is finite, but above .* the step before this one was"):
            stepped(params, optimizer, 1)
        assert optimizer.large_gradient == "fp32"
        assert optimizer.param_groups[0]["step"] == 1
