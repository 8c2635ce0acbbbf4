"""Operands that kernels make as scaled products read them: swizzled scales, PyTorch's dtypes, and what makes them NaN.

Products are the stand-in of `tests.gemm.test_backend`, which reads scales where cuBLAS documents that they lie, so that
layers on kernels have the bits of layers without.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

import quantshard as qs
from quantshard import kernel_dispatch, numerics, private_torch
from quantshard.formats import E8M0, FORMATS, Orientation
from quantshard.gemm import backend, hardware, producers
from quantshard.gemm.operands import Operand, OperandUsage
from quantshard.gemm.producers import KernelPlan
from quantshard.kernels import graph_launch
from quantshard.kernels.quantize.swizzle import SwizzleRequest
from quantshard.modules import fused_operands
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import OperandRequest, gemm_operands, gradient_operands
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.numerics import swizzled
from quantshard.recipe import QuantSpec, TensorRole, resolve
from quantshard.tensor import observation
from quantshard.tensor.parameter_state import weight_state
from quantshard.tensor.storage import SECOND_SCALE, QuantizedStorage
from tests.covering import exhaustive
from tests.gemm.test_backend import BLACKWELL, HOPPER, stand_in

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
CAPABILITIES = dict.fromkeys(("current", "delayed", "block", "rowwise"), HOPPER) | dict.fromkeys(
    ("mxfp8", "nvfp4"), BLACKWELL
)
"""Of the GPUs that have the products of a recipe."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
    pytest.mark.usefixtures("kernels_on_cpu"),
    pytest.mark.skipif(DEVICE != "cpu", reason="of products that a stand-in takes the place of"),
]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, int]]]:
    """What the GPU is, under "is": tests set it."""
    gpu = {"is": BLACKWELL}
    monkeypatch.setattr(hardware, "capability_of", lambda device: gpu["is"])
    monkeypatch.setattr(private_torch, "scaled_mm", stand_in)
    yield gpu


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, BF16)


def stepped(module: nn.Module, x: Tensor, dy: Tensor, name: str) -> list[Tensor]:
    """Output, and gradients of input and parameters."""
    leaf = x.clone().requires_grad_()
    with qs.autocast(recipe=name):
        y = module(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], dy)]


@pytest.mark.parametrize("shape", [(1, 1), (130, 200), (256, 128)])
@pytest.mark.parametrize(
    ("name", "turned"),
    [
        ("mxfp8_32x32", False),
        ("mxfp8_32x32", True),
        ("nvfp4_16x16", False),
        ("nvfp4_16x16", True),
        ("mxfp8_1x32", False),
    ],
)
def test_a_stored_matrix_is_swizzled(name: str, turned: bool, shape: tuple[int, int]) -> None:
    """Two at once, of different shapes, the first of them poisoned, and of the poison another's scales."""
    stored = FORMATS[name].copies[Orientation.ROWWISE]
    for bad in (0.0, float("nan")):
        given = []
        for part, size in enumerate((shape, (64, 96))):
            parts = numerics.quantize(values(*size, seed=part).float(), FORMATS[name])
            amax = None if stored.amax is None else parts[stored.amax.name]
            other = swizzled(torch.full((size[0], 5), 127, dtype=torch.uint8)).view(E8M0.gemm_dtype)
            nan_flags = (torch.tensor(bad), other) if part == 0 else (None, None)
            given.append((size, parts[stored.codes.name], parts[stored.scale.name], amax, *nan_flags))
        theirs = copy.deepcopy(given)
        with kernel_dispatch.kernels_only_on():
            expected = kernel_dispatch.swizzle(stored, theirs, turned)
        for mine, one in zip(SwizzleRequest(stored, given, turned).finish(), expected, strict=True):
            for found, wanted in zip(mine, one, strict=True):
                assert (found is None) == (wanted is None)
                if found is not None and wanted is not None and found.dtype is torch.float32:
                    torch.testing.assert_close(found.view(-1), wanted.view(-1), rtol=0, atol=0, equal_nan=True)
                elif found is not None and wanted is not None:
                    assert found.dtype is wanted.dtype
                    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        mine, one = (each[0][5].view(torch.uint8) for each in (given, theirs))
        assert torch.equal(mine, one) and bool((mine == 0xFF).any()) == (bad != bad)


@pytest.mark.parametrize("name", CAPABILITIES)
@pytest.mark.parametrize("sizes", [(64, 128, 96), (50, 96, 80)], ids=["whole", "padded"])
def test_layers_have_the_bits_of_those_without_kernels(
    name: str, sizes: tuple[int, int, int], products: dict[str, tuple[int, int]]
) -> None:
    """And all of their gradients are NaN if one number of the output's is not finite."""
    products["is"] = CAPABILITIES[name]
    rows, features, outputs = sizes
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=name):
        layer = qs.Linear(features, outputs, bias=False, params_dtype=BF16, device=DEVICE)
    x = values(rows, features)
    for bad in (False, True):
        dy = values(rows, outputs, seed=1)
        if bad:
            dy[7, 9] = torch.inf
        found = []
        for types in (("cpu",), ()):
            with kernel_dispatch.kernels_only_on(*types):
                found.append(stepped(copy.deepcopy(layer), x, dy, name))
        for on_kernels, without in zip(*found, strict=True):
            torch.testing.assert_close(on_kernels, without, rtol=0, atol=0, equal_nan=True)
        assert bad == found[0][1].isnan().all() == found[0][2].isnan().all()


@pytest.mark.parametrize("name", ["rowwise", pytest.param("mxfp8", marks=pytest.mark.exhaustive), "nvfp4"])
def test_several_weights_are_read_at_once(
    name: str, products: dict[str, tuple[int, int]], launches: list[tuple[str, int]]
) -> None:
    """Both of a gated MLP's first layer, with a poison from one gradient to all; near what steps one by one give."""
    products["is"] = CAPABILITIES[name]
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=name):
        mlp = qs.LayerNormMLP(
            64, 96, activation="swiglu", normalization="RMSNorm", bias=False, params_dtype=BF16, device=DEVICE
        )
    x, dy = values(64, 64), values(64, 64, seed=1)
    found = []
    launches.clear()
    for types in (("cpu",), ()):
        with kernel_dispatch.kernels_only_on(*types):
            found.append(stepped(copy.deepcopy(mlp), x, dy, name))
    for on_kernels, without in zip(*found, strict=True):
        assert (on_kernels - without).norm() <= 2.0**-4 * without.norm()
    counted = Counter(kernel for kernel, _ in launches)
    assert counted["dequantize_kernel"] == (2 if name == "rowwise" else 0)  # weights that dgrad reads
    # of two layers, forward and backward: of nvfp4 the kernel that quantizes does it
    assert counted["swizzle_kernel"] == (4 if name == "mxfp8" else 0)
    assert counted["amax_kernel"] == (
        name != "mxfp8"
    )  # of the gradient, which is there; kernels measure what they make
    dy[7, 9] = torch.inf
    _, dx, _, *of_weights = stepped(mlp, x, dy, name)
    assert dx.isnan().all() and all(grad.isnan().all() for grad in of_weights)


@pytest.mark.parametrize(
    ("name", "kind", "apart", "most"),
    exhaustive(
        [("mxfp8", "plain", 1, 2), ("nvfp4", "plain", 0, 2), ("nvfp4", "biased", 1, 2), ("nvfp4", "gated", 0, 4)],
        [("nvfp4", "biased", 1, 2)],
    ),
)
def test_weights_are_laid_out_by_the_kernel_that_quantizes(
    name: str, kind: str, apart: int, most: int, products: dict[str, tuple[int, int]],
    launches: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the bits of launches of their own, which large ones get. Not where it makes the poison that weights take, as
    of MXFP8, nor where another kernel quantizes, as where a bias needs a sum."""
    products["is"] = CAPABILITIES[name]
    torch.manual_seed(0)
    options = {"params_dtype": BF16, "device": DEVICE}
    with qs.quantized_model_init(recipe=name):
        module: nn.Module = qs.Linear(160, 288, bias=kind == "biased", **options)
        if kind == "gated":
            module = qs.LayerNormMLP(160, 288, activation="swiglu", bias=False, **options)
    x, dy, found = values(160, 160), values(160, 160 if kind == "gated" else 288, seed=1), []
    for is_large in (False, True):
        monkeypatch.setattr(backend, "is_large", lambda codes, large=is_large: large)
        launches.clear()
        found.append(stepped(copy.deepcopy(module), x, dy, name))
        assert Counter(kernel for kernel, _ in launches)["swizzle_kernel"] == (most if is_large else apart)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("name", "frozen"),
    exhaustive(
        itertools.product(["rowwise", "nvfp4"], ["fc1_gate_weight", "fc1_up_weight", "fc1_gate_bias"]),
        [("rowwise", "fc1_gate_bias"), ("nvfp4", "fc1_up_weight")],
    ),
)
def test_a_frozen_weight_beside_another_changes_no_gradient(
    name: str, frozen: str, products: dict[str, tuple[int, int]]
) -> None:
    """Of the two that read one input, whose gradients one kernel makes."""
    products["is"] = CAPABILITIES[name]
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=name):
        mlp = qs.LayerNormMLP(
            32, 48, activation="swiglu", normalization="RMSNorm", bias=frozen == "fc1_gate_bias", params_dtype=BF16,
            device=DEVICE,
        )  # fmt: skip
    x, dy, found = values(32, 32), values(32, 32, seed=1), []
    for asked in ({}, {frozen}):
        module, leaf = copy.deepcopy(mlp), x.clone().requires_grad_()
        for parameter in asked:
            module.get_parameter(parameter).requires_grad_(False)
        with qs.autocast(recipe=name):
            module(leaf).backward(dy)
        grads = {key: parameter.grad for key, parameter in module.named_parameters() if key != frozen}
        found.append({"x": leaf.grad, **grads})
    for key, grad in found[0].items():
        assert grad is not None and torch.equal(grad, found[1][key]), key


@pytest.mark.parametrize(
    ("name", "bias"),
    exhaustive(itertools.product(["rowwise", "nvfp4"], [False, True]), [("rowwise", False), ("nvfp4", True)]),
)
def test_gradients_of_several_weights_are_those_of_each(
    name: str, bias: bool, products: dict[str, tuple[int, int]], launches: list[tuple[str, int]]
) -> None:
    """Four at once, each by the random words of its weight, where one launch has those of three; `bias`: with sums."""
    products["is"] = CAPABILITIES[name]
    torch.manual_seed(0)
    of_weights, call = [weight_state(None, DEVICE) for _ in range(4)], LinearContext(resolve(name), None, False)
    grads = [values(64, 96, seed=part) for part in range(4)]
    asked = [OperandUsage(True, True, bias)] * 4
    found, counted = [], []
    for together in (True, False):
        state = LinearState([copy.deepcopy(each) for each in of_weights], None, None, True)
        launches.clear()
        if together:
            made = [*gradient_operands(grads, call, state, asked)]
        else:
            made = [
                gemm_operands(grad, TensorRole.GRAD_OUTPUT, call, state, asked[part], part)
                for part, grad in enumerate(grads)
            ]
        found.append([parts for each in made for parts in (each.for_first_gemm, each.for_wgrad.operand, each.sums)])
        counted.append(len(launches))
    assert counted == [{"rowwise": 2, "nvfp4": 3}[name], 8]
    for one, other in zip(*found, strict=True):
        if isinstance(one, QuantizedStorage) and isinstance(other, QuantizedStorage):
            one, other = one.dequantize(), other.dequantize()
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("name", ["rowwise", "nvfp4"])
def test_what_a_kernel_makes_is_measured_as_what_is_there(
    name: str, bad: bool, products: dict[str, tuple[int, int]], launches: list[tuple[str, int]]
) -> None:
    """A gradient through an activation, one number of which may be infinite; with no launch that measures alone."""
    products["is"] = CAPABILITIES[name]
    torch.manual_seed(0)
    of_weight, call = weight_state(None, DEVICE), LinearContext(resolve(name), None, False)
    dh, gate, up = (values(160, 96, seed=part) for part in range(3))
    if bad:
        dh[7, 9] = torch.inf
    source = fused_operands.gated_gradient(dh, gate, "swiglu", up)
    found = []
    for given in (source, source.in_memory()):
        state = LinearState([copy.deepcopy(of_weight)], None, None, True)
        asked = OperandRequest(TensorRole.GRAD_OUTPUT, call, state, OperandUsage(True, True), 0, gate)
        launches.clear()
        found.append(asked.run(given))
        assert [kernel for kernel, _ in launches] == [
            "activate_backward_kernel" if given is source else "amax_kernel", "quantize_kernel",
        ]  # fmt: skip
    for one, other in zip(*[(each.for_first_gemm, each.for_wgrad.operand) for each in found], strict=True):
        assert isinstance(one, QuantizedStorage) and isinstance(other, QuantizedStorage)
        torch.testing.assert_close(one.dequantize(), other.dequantize(), rtol=0, atol=0, equal_nan=True)
        assert SECOND_SCALE in one.components or bool(one.dequantize().isnan().all()) == bad


ROLES, NAMES = (TensorRole.INPUT, TensorRole.GRAD_OUTPUT), ("current", "block", "rowwise", "mxfp8", "nvfp4")


@pytest.mark.parametrize(
    ("name", "role"),
    exhaustive(itertools.product(NAMES, ROLES), [(name, ROLES[turn % 2]) for turn, name in enumerate(NAMES)]),
)
def test_they_stand_for_the_same_values(name: str, role: TensorRole, products: dict[str, tuple[int, int]]) -> None:
    """As the operands that formats store, which who observes gets, and which are read where there is no product."""
    products["is"] = CAPABILITIES[name]
    torch.manual_seed(0)
    of_weight, call = weight_state(None, DEVICE), LinearContext(resolve(name), None, False)
    x, found = values(160, 96), []
    for stored in (False, True):
        state = LinearState([copy.deepcopy(of_weight)], None, None, True)
        with pytest.MonkeyPatch.context() as patch:
            if stored:
                patch.setattr(producers, "is_ready", lambda *_: False)
            made = gemm_operands(x, role, call, state, OperandUsage(True, True))
        found.append((made.for_first_gemm, made.for_wgrad.operand))
    for ready, before in zip(*found, strict=True):
        assert isinstance(ready, QuantizedStorage) and isinstance(before, QuantizedStorage)
        part = ready.spec.format.copies[Orientation.ROWWISE]
        assert ready.components[part.codes.name].dtype is part.codes.encoding.gemm_dtype
        assert (SECOND_SCALE in ready.components) == (part.amax is not None)
        assert torch.equal(ready.dequantize(), before.dequantize())
        with kernel_dispatch.kernels_only_on():
            assert torch.equal(ready.dequantize(), before.dequantize())


def test_what_is_not_ready(products: dict[str, tuple[int, int]]) -> None:
    """Squares under scales of 8 bits, which are laid out for every row when they are read; sizes that are padded; what
    others than products read; and what no product of the GPU reads."""
    mx, square, tensor = (QuantSpec(FORMATS[name]) for name in ("mxfp8_1x32", "mxfp8_32x32", "fp8_e4m3"))
    assert producers.is_ready(mx, (32, 64), BLACKWELL) and not producers.is_ready(square, (32, 64), BLACKWELL)
    assert not any(producers.is_ready(mx, shape, BLACKWELL) for shape in ((0, 64), (24, 64), (32, 72)))
    assert producers.is_ready(tensor, (32, 64), BLACKWELL) and not producers.is_ready(mx, (32, 64), HOPPER)
    for is_stored in (False, True):
        plan = KernelPlan(
            resolve("current"), TensorRole.INPUT, OperandUsage(True, True), values(32, 64), False, is_stored
        )
        assert plan.rowwise is not None and plan.rowwise.kernel_spec.ready == (not is_stored)


def test_a_second_scale_is_nan_for_a_gradient_that_is_not_finite(products: dict[str, tuple[int, int]]) -> None:
    """Also where all of a sum is under one scale; that of an input is what it was."""
    x = values(32, 96)
    x[3, 5] = -torch.inf
    call, state = (
        LinearContext(resolve("nvfp4"), None, False),
        LinearState([weight_state(None, DEVICE)], None, None, True),
    )
    for role in (TensorRole.GRAD_OUTPUT, TensorRole.INPUT):
        made = gemm_operands(x, role, call, state, OperandUsage(True, True))
        assert made.nan_flag is None
        found = made.for_first_gemm
        assert isinstance(found, QuantizedStorage)
        assert bool(found.components[SECOND_SCALE].isnan()) == (role is TensorRole.GRAD_OUTPUT)


def test_who_looks_at_operands_gets_what_formats_store(
    products: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An observer, and a graph of torch.compile."""

    class Looking:
        def see_operand(self, key: Tensor, role: TensorRole, for_wgrad: bool, values: Tensor, operand: Operand) -> None:
            seen.append(operand)

    seen: list[Operand] = []
    call, state = (
        LinearContext(resolve("mxfp8"), None, False),
        LinearState([weight_state(None, DEVICE)], None, None, True),
    )

    def made() -> list[Operand]:
        found = gemm_operands(values(32, 96), TensorRole.INPUT, call, state, OperandUsage(True, True))
        return [found.for_first_gemm, found.for_wgrad.operand]

    def scales(found: list[Operand]) -> set[torch.dtype]:
        stored = [each for each in found if isinstance(each, QuantizedStorage)]
        assert len(stored) == 2
        return {each.components[each.spec.format.copies[Orientation.ROWWISE].scale.name].dtype for each in stored}

    assert scales(made()) == {E8M0.gemm_dtype}
    launch = lambda kernel, grid, args, options: kernel[grid](*args, **options)  # noqa: E731
    monkeypatch.setattr(graph_launch, "record", launch)
    with graph_launch.traced_launches():
        assert scales(made()) == {torch.uint8}
    monkeypatch.setattr(observation, "active", Looking())
    assert scales(made()) == scales(seen) == {torch.uint8}
