"""Stacks of experts' weights beside `GroupedLinear`, a parameter for each expert: the same bits, also transposed."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantshard as qs
from quantshard import kernel_dispatch
from quantshard.interop.conversion import experts
from quantshard.modules.gemms import functional, stacked
from quantshard.modules.gemms.row_exchange import ExpertCodes
from quantshard.recipe import TensorRole
from quantshard.tensor.parameter_state import RNG_KEY
from tests.covering import exhaustive
from tests.weights import quantize_weight

EXPERTS, IN, OUT = 3, 128, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Stack(nn.Module):
    """The attributes that transformers gives an experts module."""

    has_gate = has_bias = True
    num_experts = EXPERTS

    def __init__(self, values: Tensor, bias: Tensor, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.config = SimpleNamespace(_experts_implementation="eager")
        self.gate_up_proj = nn.Parameter(values.mT.contiguous() if is_transposed else values)
        self.gate_up_proj_bias = nn.Parameter(bias)
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, 128, 128, dtype=values.dtype, device=values.device))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def both(recipe: Any, is_transposed: bool, sizes: tuple[int, int]) -> tuple[Any, qs.GroupedLinear]:
    """A stack and single weights of the same values and random keys."""
    out_features, in_features = sizes
    values = draw(0, EXPERTS, out_features, in_features) * torch.tensor([1.0, 30.0, 0.01]).view(-1, 1, 1).bfloat16().to(
        DEVICE
    )
    bias = draw(1, EXPERTS, out_features)
    stack: Any = Stack(values, bias, is_transposed)
    experts.convert_experts(stack, "stack", qs.recipe.resolve(recipe), None, True, False)
    with qs.quantized_model_init(recipe=recipe):
        single = qs.GroupedLinear(EXPERTS, in_features, out_features, params_dtype=torch.bfloat16, device=DEVICE)
    for index in range(EXPERTS):
        weight: Any = getattr(single, f"weight{index}")
        weight.quantize_(values[index])
        key = stack.gate_up_proj.quantized_storage.state[RNG_KEY] + index
        weight.quantized_storage.state[RNG_KEY].copy_(key)
        getattr(single, f"bias{index}").data.copy_(bias[index])
    return stack, single


def compare(recipe: Any, is_transposed: bool, counts: list[int], sizes: tuple[int, int] = (OUT, IN)) -> None:
    stack, single = both(recipe, is_transposed, sizes)
    out_features, in_features = sizes
    for step in range(2):
        x, dy = draw(2 + step, sum(counts), in_features), draw(9 + step, sum(counts), out_features)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with qs.autocast(recipe=recipe):
            y = stack.multiply("gate_up_proj", a, counts, "gate_up_proj_bias")
            z = single(b, counts)
        y.backward(dy)
        z.backward(dy)
        assert torch.equal(y, z) and torch.equal(a.grad, b.grad)
    weight_grad = stack.gate_up_proj.grad.mT if is_transposed else stack.gate_up_proj.grad
    for index in range(EXPERTS):
        assert torch.equal(weight_grad[index], getattr(single, f"weight{index}").grad), index
        assert torch.equal(stack.gate_up_proj_bias.grad[index], getattr(single, f"bias{index}").grad), index
    assert stack.weight_state("gate_up_proj")["draws"] == single.weight_state("weight0")["draws"]


def check_components(recipe: Any) -> None:
    """The last matrix has values so small that its scale would be infinite."""
    spec = qs.recipe.resolve(recipe).weight
    values = draw(5, 3, 64, 41) * torch.tensor([1.0, 30.0, 1e-38]).view(-1, 1, 1).bfloat16().to(DEVICE)
    stack = quantize_weight(values, spec).quantized_storage
    for index, matrix in enumerate(values):
        single = quantize_weight(matrix, spec).quantized_storage
        for name, part in stack.matrix(index).components.items():
            assert torch.equal(part, single.components[name]), (index, name)


RECIPES = ["current", "block", "rowwise", "mxfp8", "nvfp4", qs.recipe.MXFP8BlockScaling(enable_2d_quantization=False)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: getattr(recipe, "name", recipe))
def test_each_matrix_has_the_codes_and_scales_of_its_own(recipe: Any) -> None:
    if recipe != "block":  # whose blocks have 128 rows
        check_components(recipe)


@pytest.mark.parametrize("recipe", ["current", "rowwise", "mxfp8"])
def test_codes_and_scales_of_kernels(recipe: str, kernels_on_cpu: None) -> None:
    check_components(recipe)


@pytest.mark.parametrize("counts", [[7, 0, 30], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: getattr(recipe, "name", recipe))
def test_each_expert_has_the_bits_of_its_own_weight(recipe: Any, counts: list[int]) -> None:
    compare(recipe, False, counts)


@pytest.mark.parametrize(
    ("recipe", "is_transposed", "sizes"),
    [
        ("current", False, (33, 41)),
        # a GPU sums a transposed product of odd sizes in another order
        *([] if DEVICE == "cuda" else [("current", True, (33, 41))]),
        ("rowwise", False, (33, 41)),
        ("mxfp8", False, (64, 41)),
        ("mxfp8", True, (41, 64)),
        ("nvfp4", False, (48, 41)),
    ],
)
def test_sizes_that_divide_by_nothing(recipe: str, is_transposed: bool, sizes: tuple[int, int]) -> None:
    """Except that blocks must end with each matrix's rows, as stored."""
    compare(recipe, is_transposed, [7, 0, 30], sizes)


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
def test_transposed_weights(recipe: str) -> None:
    compare(recipe, True, [7, 0, 30])


@pytest.mark.parametrize(
    ("recipe", "is_transposed"),
    exhaustive(
        product(["current", "block", "mxfp8"], [False, True]),
        [("current", False), ("current", True), ("block", True), ("mxfp8", False)],
    ),
)
def test_in_kernels(recipe: str, is_transposed: bool, kernels_on_cpu: None, launches: list[tuple[str, int]]) -> None:
    """All experts of a stack in one kernel, for forward, dgrad and wgrad."""
    compare(recipe, is_transposed, [7, 0, 30])
    names = [name for name, _ in launches]
    wanted = ("rows_of_codes_kernel", "weights_of_codes_kernel")
    rows, weights = wanted if recipe == "current" else ("rows_kernel", "weights_by_blocks_kernel")
    assert names.count(rows) == 8 and names.count(weights) == 4


def test_sums_in_tensor_cores_and_few_rows_in_evaluation(kernels_on_cpu: None, launches: list[tuple[str, int]]) -> None:
    """Evaluation of few rows copies no weights, in a stack and in single weights."""
    params = qs.recipe.MMParams(use_split_accumulator=False)
    recipe = qs.recipe.Float8CurrentScaling(fp8_gemm_fprop=params, fp8_gemm_dgrad=params, fp8_gemm_wgrad=params)
    compare(recipe, False, [7, 0, 30])
    stack, single = both(recipe, False, (OUT, IN))
    for module in (stack, single):
        module.train(False)
        launches.clear()
        with qs.autocast(recipe=recipe), torch.no_grad():
            if module is single:
                single(draw(2, 37, IN), [7, 0, 30])
            else:
                stack.multiply("gate_up_proj", draw(2, 37, IN), [7, 0, 30], "gate_up_proj_bias")
        names = [name for name, _ in launches]
        assert "rows_kernel" in names and "rows_of_codes_kernel" not in names


@pytest.mark.parametrize("sizes", [(OUT, IN), (33, 41)])
def test_experts_one_by_one_have_scales_that_cublas_accepts(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes scales at multiples of 16 bytes."""
    seen, real = [], functional.backend.matmul

    def matmul(a: Any, b: Any, *args: Any, **options: Any) -> Tensor:
        seen.extend(part.components["scale_inv"].data_ptr() % 16 for part in (a, b))
        return real(a, b, *args, **options)

    monkeypatch.setattr(functional.backend, "matmul", matmul)
    monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", set[str]())
    compare("current", False, [7, 0, 30], sizes)
    assert len(seen) > 40 and not any(seen)
    spec = qs.recipe.resolve("current").activations[TensorRole.INPUT][0]
    assert spec is not None
    rows = ExpertCodes(torch.zeros(5, 16, dtype=torch.uint8), torch.ones(4), spec)
    operands: list[Any] = list(stacked._split(rows, [1, 0, 3, 1]))
    assert not any(part.for_first_gemm.components["scale_inv"].data_ptr() % 16 for part in operands)


@pytest.mark.parametrize(
    ("recipe", "is_transposed", "is_list"),
    [
        ("fp8-weights", True, True),
        ("fp8-weights", True, False),
        ("mxfp8-weights", False, False),
        ("nvfp4-weights", False, True),
        pytest.param("mxfp8-weights", False, True, marks=pytest.mark.exhaustive),
        pytest.param("nvfp4-weights", False, False, marks=pytest.mark.exhaustive),
    ],
)
def test_recipes_of_weights_multiply_all_experts_at_once(
    recipe: str, is_transposed: bool, is_list: bool, kernels_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In BF16, without waiting for counts; products of single experts sum in another order, so to BF16's rounding."""
    products: list[Tensor] = []
    real = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *given, **options: products.append(y := real(*given, **options)) or y)
    stack, single = both(recipe, is_transposed, (OUT, IN))
    counts = [7, 0, 30]
    x, dy = draw(2, sum(counts), IN), draw(9, sum(counts), OUT)
    found = []
    for module in (stack, single):
        a = x.clone().requires_grad_()
        with qs.autocast(recipe=recipe, strict=True):
            rows = counts if is_list else torch.tensor(counts, device=DEVICE)
            y = module(a, rows) if module is single else stack.multiply("gate_up_proj", a, rows, "gate_up_proj_bias")
        y.backward(dy)
        found.append([y.detach(), a.grad])
    weights = torch.stack([getattr(single, f"weight{index}").grad for index in range(EXPERTS)])
    biases = torch.stack([getattr(single, f"bias{index}").grad for index in range(EXPERTS)])
    found[0] += [stack.gate_up_proj.grad.mT if is_transposed else stack.gate_up_proj.grad, stack.gate_up_proj_bias.grad]
    for one, other in zip(found[0], [*found[1], weights, biases], strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert (one.float() - other.float()).norm() <= 2**-8 * other.float().norm()
    # a list of `GroupedLinear` goes one by one, as in BF16
    assert len(products) == (3 if is_list else 6)


@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4"])
def test_one_by_one_in_kernels(recipe: str, kernels_on_cpu: None) -> None:
    compare(recipe, False, [7, 0, 30])
