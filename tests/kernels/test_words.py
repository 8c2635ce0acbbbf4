"""Random words that a kernel puts into memory: what optimizers round by that no kernel steps, as a user's own."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from quantshard import kernel_dispatch
from quantshard.numerics.states import StateSpec
from quantshard.optimizers import ElementwiseOptimizer, FusedAdam, Lion, Muon
from quantshard.optimizers.state import TensorRegion
from tests.tensor.test_tensor import same

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACES = [
    TensorRegion((35, 290), (0, 0), (35, 290)),
    TensorRegion((70, 290), (35, 4), (35, 281)),
    TensorRegion((70, 292), (33, 8), (37, 284)),
    TensorRegion((1 << 20, 1 << 14), ((1 << 20) - 3, (1 << 14) - 290), (3, 290)),  # beyond 2**32 elements
    TensorRegion((64, 64), (64, 0), (0, 64)),
    TensorRegion((1001,), (7,), (990,)),
    TensorRegion((), (), ()),
    TensorRegion((6, 5, 7), (2, 0, 0), (4, 5, 7)),
    TensorRegion((6, 5, 7), (2, 0, 3), (4, 5, 2)),
]


STEPS = [1, 16, 2**31, torch.tensor(3)]


def cells():
    """(place, step, swapped); a quarter by default: each pair of place and `swapped`, and of step and `swapped`."""
    for (i, place), (j, step), swapped in product(enumerate(PLACES), enumerate(STEPS), (False, True)):
        marks = pytest.mark.exhaustive if (i + j + 2 * swapped) % 4 else ()
        yield pytest.param(place, step, swapped, marks=marks, id=f"{place}-{step}-{swapped}")


@pytest.mark.parametrize(("place", "step", "swapped"), [*cells()])
def test_words_of_a_state_are_the_oracles(place, step, swapped):
    step = step.to(DEVICE) if isinstance(step, torch.Tensor) else step
    with kernel_dispatch.kernels_only_on(DEVICE.type):
        found = place.random_bits(0xFEDCBA9876543210, step, 6, swapped, DEVICE)
    with kernel_dispatch.kernels_only_on():
        expected = place.random_bits(0xFEDCBA9876543210, step, 6, swapped, DEVICE)
    assert found.shape == place.shape and found.dtype == expected.dtype and same(found, expected)


class Momentum(ElementwiseOptimizer):
    """A user's formula, which no kernel knows."""

    states = (StateSpec("momentum_buffer"),)

    def update(self, param, grad, master, states, settings):
        momentum = settings["momentum"] * states["momentum_buffer"] + grad
        return master - settings["lr"] * momentum, {"momentum_buffer": momentum}


def test_states_of_16_bits_take_one_launch_for_their_words(launches):
    """Instead of the oracle's hundred operations for each; a master of float16 and a moment of bfloat16."""

    def stepped():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(9, 12, device=DEVICE).bfloat16()) for _ in range(2)]
        dtypes = {"momentum_buffer": torch.bfloat16}
        optimizer = Momentum(
            params, {"lr": 0.01, "momentum": 0.9}, state_dtypes=dtypes, master_weight_dtype=torch.float16
        )
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        return [value for param in params for value in (param.detach(), *optimizer.state[param].values())]

    with kernel_dispatch.kernels_only_on():
        expected = stepped()
    launches.clear()
    with kernel_dispatch.kernels_only_on(DEVICE.type):
        found = stepped()
    assert all(map(same, found, expected))
    assert [kernel for kernel, _ in launches].count("words_kernel") == 2 * 2


@pytest.mark.parametrize("kind", [FusedAdam, Lion, Muon])
def test_optimizers_with_kernels_round_in_these(kind, launches):
    param = torch.nn.Parameter(torch.randn(9, 12, device=DEVICE).bfloat16())
    param.grad = torch.randn_like(param)
    with kernel_dispatch.kernels_only_on(DEVICE.type):
        kind([param], preset="lean8").step()
    names = [kernel for kernel, _ in launches]
    assert "words_kernel" not in names and "step_kernel" in names
