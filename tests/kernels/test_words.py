"""Random words that a kernel puts into memory: what optimizers round by that no kernel steps, as Muon and Lion."""

import pytest
import torch

pytest.importorskip("triton")

from quantshard import kernel_dispatch
from quantshard.optimizers import FusedAdam, Lion, Muon
from quantshard.optimizers.rounding import StateDraw, TensorRegion
from tests.tensor.test_tensor import same

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACES = [
    TensorRegion((35, 290), (0, 0), (35, 290)),
    TensorRegion((70, 290), (35, 4), (35, 281)),
    TensorRegion((70, 292), (33, 8), (37, 284)),
    TensorRegion((1 << 20, 1 << 14), ((1 << 20) - 3, 0), (3, 1 << 14)),  # beyond 2**32 elements
    TensorRegion((64, 64), (64, 0), (0, 64)),
    TensorRegion((1001,), (7,), (990,)),
    TensorRegion((), (), ()),
    TensorRegion((6, 5, 7), (2, 0, 0), (4, 5, 7)),
    TensorRegion((6, 5, 7), (2, 0, 3), (4, 5, 2)),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("step", [1, 16, 2**31, torch.tensor(3)], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_words_of_a_state_are_the_oracles(place, step, swapped):
    step = step.to(DEVICE) if isinstance(step, torch.Tensor) else step
    draw = StateDraw(0xFEDCBA9876543210, step, 6, swapped)
    with kernel_dispatch.kernels_only_on(DEVICE.type):
        found = draw.words(place, DEVICE)
    with kernel_dispatch.kernels_only_on():
        expected = draw.words(place, DEVICE)
    assert found.shape == place.shape and found.dtype == expected.dtype and same(found, expected)


@pytest.mark.parametrize("kind", [Lion, Muon])
def test_states_of_16_bits_take_one_launch_for_their_words(kind, launches):
    """Instead of the oracle's hundred operations for each; a master of float16 and a moment of bfloat16."""
    moment = {"exp_avg_dtype" if kind is Lion else "momentum_buffer_dtype": torch.bfloat16}

    def stepped():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(9, 12, device=DEVICE).bfloat16()) for _ in range(2)]
        optimizer = kind(params, lr=0.01, master_weight_dtype=torch.float16, **moment)
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


def test_adam_rounds_in_its_own_kernels(launches):
    param = torch.nn.Parameter(torch.randn(9, 12, device=DEVICE).bfloat16())
    param.grad = torch.randn_like(param)
    with kernel_dispatch.kernels_only_on(DEVICE.type):
        FusedAdam([param], preset="lean8").step()
    assert "words_kernel" not in [kernel for kernel, _ in launches]
