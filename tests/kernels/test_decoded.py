"""Operands that nobody keeps, of products that are emulated: values in place of codes change no bit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

import quantshard as qs
from quantshard import recipe
from quantshard.gemm import hardware, operands, producers
from quantshard.gemm.operands import OperandUsage
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import GemmOperands, gemm_operands
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.recipe import TensorRole
from quantshard.tensor.parameter_state import weight_state
from quantshard.tensor.storage import QuantizedStorage

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
    pytest.mark.usefixtures("kernels_on_cpu"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16


@contextmanager
def emulated(yes: bool) -> Iterator[None]:
    """Within it operands are taken to be of products that are emulated, or of native ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producers, "products_read_values", lambda *_: yes)
        yield


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, BF16)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "rowwise"])
@pytest.mark.parametrize("role", [TensorRole.INPUT, TensorRole.GRAD_OUTPUT])
def test_they_are_what_their_codes_stand_for(name: str, role: TensorRole) -> None:
    """Of an input what wgrad reads is kept, as codes; tokens and features fill no tile."""
    torch.manual_seed(0)
    of_weight, call = weight_state(None, DEVICE), LinearContext(recipe.resolve(name), None, False)
    x, passing = values(70, 96), 2 if role is TensorRole.GRAD_OUTPUT else 1

    def made(yes: bool) -> GemmOperands:
        state = LinearState([copy.deepcopy(of_weight)], None, None, True)
        with emulated(yes):
            return gemm_operands(x, role, call, state, OperandUsage(True, True, num_transient=passing if yes else 0))

    found, before = made(True), made(False)
    assert found.for_wgrad.transposed and before.for_wgrad.transposed
    for number, (one, other) in enumerate(
        ((found.for_first_gemm, before.for_first_gemm), (found.for_wgrad.operand, before.for_wgrad.operand)), start=1
    ):
        assert isinstance(other, QuantizedStorage)
        if number > passing:
            assert isinstance(one, QuantizedStorage)
            assert all(torch.equal(one.components[part], stored) for part, stored in other.components.items())
        else:
            assert isinstance(one, Tensor) and one.dtype is BF16
            assert torch.equal(one, other.dequantize(dtype=BF16))


def stepped(module: nn.Module, x: Tensor, dy: Tensor, name: str) -> list[Tensor]:
    """Output, and gradients of input and parameters."""
    with qs.autocast(recipe=name):
        y = module(x.requires_grad_())
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def build(name: str, fused: bool) -> nn.Module:
    torch.manual_seed(0)
    made = {"bias": not fused, "params_dtype": BF16, "device": "cpu"}
    with qs.quantized_model_init(recipe=name):
        if fused:
            return qs.LayerNormMLP(64, 96, activation="swiglu", normalization="RMSNorm", **made).to(DEVICE)
        return qs.Linear(64, 96, **made).to(DEVICE)


@pytest.fixture(params=["mxfp8", pytest.param("nvfp4", marks=pytest.mark.skipif(DEVICE == "cpu", reason="a GPU's"))])
def name(request: pytest.FixtureRequest) -> str:
    """NVFP4, emulated on a CPU, is multiplied as float32, which these values are not."""
    found: str = request.param
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_layers_have_the_same_bits(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where gradients are large, and quantized one after the other."""
    x, dy = values(48, 64), values(48, 64 if fused else 96, seed=1)
    results = []
    for yes, large in ((False, operands.LARGE), (True, operands.LARGE), (True, 0)):
        monkeypatch.setattr(operands, "LARGE", large)
        with emulated(yes):
            results.append(stepped(build(name, fused), x.clone(), dy, name))
    for same in zip(*results, strict=True):
        assert all(torch.equal(found, same[0]) for found in same)


def test_what_is_decoded_apart(name: str, launches: list[tuple[str, int]]) -> None:
    """Weights, forward and backward, and the inputs of wgrad: of three weights no more than nine times."""
    with emulated(True):
        stepped(build(name, True), values(48, 64), values(48, 64, seed=1), name)
    assert Counter(kernel for kernel, _ in launches)["dequantize_kernel"] <= 9


@pytest.mark.parametrize("yes", [False, True])
def test_a_gradient_that_is_not_finite_makes_all_gradients_nan(name: str, yes: bool) -> None:
    dy = values(48, 64, seed=1)
    dy[7, 9] = torch.inf
    module = build(name, True)
    names = [found for found, _ in module.named_parameters()]
    with emulated(yes):
        _, dx, *of_parameters = stepped(module, values(48, 64), dy, name)
    assert dx.isnan().all()
    grads = dict(zip(names, of_parameters, strict=True))
    assert all(grads[part].isnan().all() for part in names if not part.startswith("layer_norm"))


def test_which_hardware_has_no_product_of_an_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capability without a product of a format; none of what is no NVIDIA GPU, or of another dtype."""
    reads_values, cells = producers.products_read_values, dict[str, recipe.QuantSpec | None]()
    for recipe_name in ("mxfp8", "nvfp4", "current", "block"):
        cells[recipe_name], _ = recipe.resolve(recipe_name).activations[TensorRole.GRAD_OUTPUT]
    hopper = {found: reads_values(cell, BF16, (9, 0)) for found, cell in cells.items()}
    assert hopper == {"mxfp8": True, "nvfp4": True, "current": False, "block": False}
    blackwell = {found: reads_values(cell, BF16, (10, 0)) for found, cell in cells.items()}
    assert blackwell == {"mxfp8": False, "nvfp4": False, "current": False, "block": True}
    others = ((None, BF16), ((9, 0), torch.float32))
    assert not any(reads_values(cell, dtype, capability) for cell in cells.values() for capability, dtype in others)
    assert not reads_values(None, BF16, (9, 0))
    rowwise, role, usage = recipe.resolve("rowwise"), TensorRole.GRAD_OUTPUT, OperandUsage(True, True, num_transient=2)
    monkeypatch.setattr(hardware, "capability_of", lambda device: (9, 0))
    plan = producers.KernelPlan(rowwise, role, usage, values(32, 64), False, False)
    assert (
        plan.rowwise is not None
        and plan.rowwise.kernel_spec.decoded
        and plan.columnwise is not None
        and not plan.columnwise.kernel_spec.decoded
    )
    monkeypatch.undo()
    assert hardware.capability_of(torch.device("cpu")) is None
