"""Where there are kernels the whole library runs on them, with the bits of the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard import kernel_dispatch, numerics
from quantshard.formats import FORMATS, Orientation, Scaling
from quantshard.numerics import RandomBits
from quantshard.optimizers import FusedAdam
from quantshard.recipe import TensorRole, resolve
from quantshard.tensor.parameter_state import AMAX_HISTORY
from tests.covering import exhaustive
from tests.distributed.models import RECIPES
from tests.interpreter import prepared_once

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from quantshard.gemm import producers
from quantshard.kernels import launch
from tests import oracle

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # compiled kernels read no tensors of the CPU


@pytest.fixture(autouse=True)
def _on_the_oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At first the oracle runs, also on a GPU."""
    monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", set())
    with prepared_once():
        yield


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """From the call on kernels are used; it returns a list that grows with the names of those that Triton launches. A
    GPU's are launched by Triton once, and directly from then on."""

    def start() -> list[str]:
        used: list[str] = []
        real = KernelInterface.__getitem__

        def noted(kernel: Any, grid: tuple[int, ...]) -> Any:
            used.append(kernel.fn.__name__)
            return real(kernel, grid)

        monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {DEVICE})
        monkeypatch.setattr(launch, "_VARIANTS", {})
        monkeypatch.setattr(KernelInterface, "__getitem__", noted)
        return used

    return start


def trained(recipe: qs.recipe.Recipe) -> dict[str, Tensor]:
    """Of two steps of a layer: all tensors of the model and the optimizer, the outputs and the input's gradient."""
    torch.manual_seed(3)
    with qs.quantized_model_init(recipe=recipe), kernel_dispatch.kernels_only_on():  # born as where there are none
        model = nn.Sequential(qs.Linear(40, 70, params_dtype=torch.bfloat16, device="cpu")).to(DEVICE)
    optimizer = FusedAdam(model.named_parameters(), lr=0.1, exp_avg_sq_dtype=torch.uint8)
    found: dict[str, Tensor] = {}
    for step in range(2):
        x = torch.randn(21, 40, generator=torch.Generator().manual_seed(step)).bfloat16().to(DEVICE).requires_grad_()
        with qs.autocast(recipe=recipe):
            y = model(x)
        y.float().square().sum().backward()
        found |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
        optimizer.step()
        optimizer.zero_grad()
    states = {
        f"{number}.{key}": t for number, held in optimizer.state_dict()["state"].items() for key, t in held.items()
    }
    return found | dict(model.state_dict()) | states


@pytest.mark.parametrize(
    "name",
    exhaustive([(name,) for name in RECIPES if name != "bf16"], [("delayed",), ("nvfp4",)]),
)
def test_training_has_the_oracles_bits(name: str, on_kernels: Callable[[], list[str]]) -> None:
    expected = trained(RECIPES[name])
    used = on_kernels()
    found = trained(RECIPES[name])
    recipe = resolve(RECIPES[name])
    inputs = [cell for (role, _), cell in recipe.table.items() if role is not TensorRole.WEIGHT]
    measured = any(producers.needs_amax(cell) and not cell.scaling.history for cell in inputs)
    assert {"quantize_kernel", "dequantize_kernel", "step_kernel"} <= set(used)
    assert ("amax_kernel" in used) == measured
    assert found.keys() == expected.keys() and any(AMAX_HISTORY in key for key in found) == (name == "delayed")
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def test_what_has_no_kernel_goes_to_the_oracle(on_kernels: Callable[[], list[str]]) -> None:
    """16-bit codes, float64, words as a tensor, and tensors of other devices."""
    x, row = torch.randn(5, 7).to(DEVICE), FORMATS["mxfp8_1x32"].copies[Orientation.ROWWISE]
    words = RandomBits(5, 1, 2, (5, 7))
    grids = oracle.encode_scales(numerics.amaxes(x, FORMATS["mxfp8_1x32"]), FORMATS["mxfp8_1x32"], Scaling())
    expected = numerics.quantize_codes(x, row, grids, (0, 0), words.tensor(DEVICE))
    assert torch.equal(kernel_dispatch.quantize_codes(x, row, grids, (0, 0), words), expected)
    used = on_kernels()
    assert torch.equal(kernel_dispatch.quantize_codes(x, row, grids, (0, 0), words.tensor(DEVICE)), expected)
    kernel_dispatch.block_amax(x.double(), (1, 32))
    kernel_dispatch.block_amax(x.to("meta"), (1, 32))
    assert used == []
    assert torch.equal(kernel_dispatch.quantize_codes(x, row, grids, (0, 0), words), expected)
    assert used == ["quantize_kernel"]


@pytest.mark.parametrize("recipe", exhaustive([("delayed",), ("current",), ("block",)], [("block",)]))
def test_a_compiled_layer_runs_on_kernels(recipe: str, on_kernels: Callable[[], list[str]]) -> None:
    """What its operator keeps of the input is then quantized transposed, and the shapes in the graph must say so."""

    def run(compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        with qs.quantized_model_init(recipe=RECIPES[recipe]):
            model = qs.Linear(40, 70, params_dtype=torch.bfloat16, device="cpu").to(DEVICE)
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        x = torch.randn(21, 40, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE).requires_grad_()
        with qs.autocast(recipe=RECIPES[recipe]):
            y = call(x)
        y.float().square().sum().backward()
        return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in model.named_parameters()}}

    used = on_kernels()
    eager, compiled = run(False), run(True)
    assert "quantize_kernel" in used
    assert [name for name in eager if not torch.equal(eager[name], compiled[name])] == []
