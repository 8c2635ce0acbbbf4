"""GroupedLinear in one process: each expert is the `Linear` of its weight and its tokens, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.modules.contexts import pending_amaxes
from tests.covering import exhaustive, in_turns
from tests.distributed.models import RECIPES

IN, OUT = 33, 40  # divide by nothing
ALL_RECIPES: dict[str, Any] = {**RECIPES, "bf16": "bf16"}
SPLITS = {
    "one expert is empty": [7, 0, 1, 4],
    "one token": [0, 1, 0, 0],
    "all tokens on one expert": [0, 12, 0, 0],
    "no token": [0, 0, 0, 0],
}


def grouped(recipe: Any, experts: int = 4, quantized: bool = True, **options: Any) -> qs.GroupedLinear:
    torch.manual_seed(3)
    with qs.quantized_model_init(quantized, recipe=recipe):
        return qs.GroupedLinear(experts, IN, OUT, params_dtype=torch.bfloat16, **options)


def linears(recipe: Any, experts: int, quantized: bool) -> list[qs.Linear]:
    """The same weights, from the same seed."""
    torch.manual_seed(3)
    with qs.quantized_model_init(quantized, recipe=recipe):
        return [qs.Linear(IN, OUT, params_dtype=torch.bfloat16) for _ in range(experts)]


def values(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step)).bfloat16()


def key_of(expert: int, key: str) -> str:
    if key.endswith(("input_amax_history", "grad_output_amax_history")):
        return f"gemm{expert}_{key}"
    return key.replace("weight", f"weight{expert}").replace("bias", f"bias{expert}")


@pytest.mark.parametrize(
    ("splits", "recipe", "quantized"),
    exhaustive(product(SPLITS, ALL_RECIPES, [True, False]), in_turns(SPLITS, ALL_RECIPES, [True, False])),
)
def test_each_expert_is_a_linear_of_its_own(splits: str, recipe: str, quantized: bool) -> None:
    """Outputs, gradients (zeros for an expert without tokens), scales, amax histories and counts of random draws."""
    rule, rows = ALL_RECIPES[recipe], SPLITS[splits]
    together, apart = grouped(rule, quantized=quantized), linears(rule, len(rows), quantized)
    for step in range(2):
        x, dy = values(step, sum(rows), IN), values(10 + step, sum(rows), OUT)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with qs.autocast(recipe=rule):
            y = together(a, rows)
            z = torch.cat([linear(part) for linear, part in zip(apart, b.split(rows), strict=True)])
        y.backward(dy)
        z.backward(dy)
        assert torch.equal(y, z) and torch.equal(a.grad, b.grad)
        for expert, linear in enumerate(apart):
            for name in ("weight", "bias"):
                grad = getattr(together, f"{name}{expert}").grad
                assert torch.equal(grad, getattr(linear, name).grad)
                assert grad.count_nonzero() == 0 or rows[expert]
    state = together.state_dict()
    wanted = {key_of(i, key): value for i, linear in enumerate(apart) for key, value in linear.state_dict().items()}
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], value) for key, value in wanted.items())


def test_draws_are_counted_without_tokens_too() -> None:
    """Ranks have different tokens, and one count in the checkpoint."""
    layer = grouped("nvfp4")
    with qs.autocast(recipe="nvfp4"):
        layer(values(0, 12, IN), [12, 0, 0, 0]).float().sum().backward()
    assert [int(layer.state_dict()[f"weight{expert}_draws"]) for expert in range(4)] == [1, 1, 1, 1]


def test_an_amax_of_no_tokens_is_not_recorded() -> None:
    recipe = RECIPES["delayed"]
    layer = grouped(recipe)
    for step in range(2):
        with qs.autocast(recipe=recipe):
            layer(values(step, 12, IN), [12 - step, 0, step, 0]).float().square().sum().backward()
    seen = [layer.get_buffer(f"gemm{i}_input_amax_history").count_nonzero().item() for i in range(4)]
    assert seen == [2, 0, 1, 0]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_recomputation_gives_the_same_bits(recipe: str, reentrant: bool) -> None:
    rule = ALL_RECIPES[recipe]
    is_equal_when_recomputed(grouped(rule), grouped(rule), rule, reentrant, lambda step: values(step, 12, IN))


def is_equal_when_recomputed(
    kept: qs.GroupedLinear, again: qs.GroupedLinear, rule: Any, reentrant: bool, data: Callable[[int], Tensor]
) -> None:
    """Two equal layers, one of them under activation recomputation: outputs, gradients and states of two steps."""
    for step in range(2):
        a, b = (data(step).requires_grad_() for _ in range(2))
        with qs.autocast(recipe=rule):
            y = kept(a, [7, 0, 1, 4])
            z = qs.checkpoint(again, b, [7, 0, 1, 4], use_reentrant=reentrant)
        y.float().square().sum().backward()
        z.float().square().sum().backward()
        assert torch.equal(y, z) and torch.equal(a.grad, b.grad)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(kept.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(kept.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
def test_compiled_for_changing_splits(recipe: str) -> None:
    rule = ALL_RECIPES[recipe]
    kept = grouped(rule, experts=2)
    compiled = copy.deepcopy(kept)
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def forward(x: Tensor, splits: list[int]) -> Tensor:
        return compiled(x, splits)

    for step, splits in enumerate(([7, 1], [5, 2], [2, 3], [0, 9])):
        x = values(step, sum(splits), IN)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with qs.autocast(recipe=rule):
            y = kept(a, splits)
        with qs.autocast(recipe=rule):
            z = forward(b, splits)
        y.float().square().sum().backward()
        z.float().square().sum().backward()
        assert torch.equal(y, z) and torch.equal(a.grad, b.grad)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(kept.parameters(), compiled.parameters(), strict=True))
    pairs = zip(kept.state_dict().values(), compiled.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert not pending_amaxes.forward_amaxes() and not pending_amaxes.backward_amaxes


def test_ways_to_call() -> None:
    layer, x = grouped("current"), values(0, 3, 4, IN)
    with qs.autocast(recipe="current"):
        wanted = layer(x.reshape(12, IN), [7, 0, 1, 4])
        assert torch.equal(layer(x, torch.tensor([7, 0, 1, 4])), wanted.view(3, 4, OUT))
        assert torch.equal(layer(x, (7, 0, 1, 4)), wanted.view(3, 4, OUT))
        out, biases = grouped("current", return_bias=True)(x, [7, 0, 1, 4])
        assert torch.equal(out, grouped("current", bias=False)(x, [7, 0, 1, 4]))
        assert [bias.shape for bias in biases] == [(OUT,)] * 4
        assert grouped("current", bias=False, return_bias=True)(x, [7, 0, 1, 4])[1] is None


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([7, 0, 5], "has 3 entries that sum to 12; give 4 counts"),
        ([7, 0, 1, 5], "has 4 entries that sum to 13; give 4 counts, of 12 rows in total"),
        ([13, -1, 0, 0], "give 4 counts"),
        (torch.zeros(4, dtype=torch.int64, device="meta"), "on meta; give ints"),
    ],
)
def test_splits_that_do_not_fit(splits: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        grouped("current")(values(0, 12, IN), splits)


def test_an_unknown_parallel_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use one of"):
        grouped("current", parallel_mode="diagonal")


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dict_brings_every_bit_back(recipe: str) -> None:
    rule = RECIPES[recipe]
    layer = grouped(rule)
    with qs.autocast(recipe=rule):
        layer(values(0, 12, IN), [7, 0, 1, 4]).float().square().sum().backward()
    torch.manual_seed(9)
    with qs.quantized_model_init(recipe=rule):
        other = qs.GroupedLinear(4, IN, OUT, params_dtype=torch.bfloat16)
    saved = {key: value.clone() for key, value in layer.state_dict().items()}
    other.load_state_dict(saved)
    assert all(torch.equal(value, saved[key]) for key, value in other.state_dict().items())


def test_explain_has_a_row_for_each_expert() -> None:
    layer = grouped("mxfp8")
    optimizer = qs.optimizers.FusedAdam(layer.named_parameters())
    rows = {row.name: row for row in qs.explain(layer, optimizer, recipe="mxfp8").rows}
    assert list(rows) == [name for i in range(4) for name in (f"weight{i}", f"bias{i}")]
    assert all(rows[f"weight{i}"].gemm == "emulated" and rows[f"weight{i}"].shape == (OUT, IN) for i in range(4))


def test_dispatch_and_combine_without_a_mesh() -> None:
    """Each token times the sum of weight * (expert + 1) over its experts."""
    x, weights = values(0, 6, 5).float().requires_grad_(), torch.rand(6, 2).requires_grad_()
    chosen = torch.tensor([[0, 2], [2, 0], [1, 2], [0, 2], [2, 1], [0, 1]])
    sent = qs.dispatch_tokens(x, chosen, 4)
    assert sent.m_splits == [4, 3, 5, 0]
    factor = torch.arange(1.0, 5).repeat_interleave(torch.tensor(sent.m_splits)).unsqueeze(-1)
    y = sent.combine(sent.tokens * factor, weights)
    wanted = x * (weights * (chosen + 1)).sum(-1, keepdim=True)
    assert torch.allclose(y, wanted)
    found = torch.autograd.grad(y.square().sum(), (x, weights))
    for gradient, other in zip(found, torch.autograd.grad(wanted.square().sum(), (x, weights)), strict=True):
        assert torch.allclose(gradient, other, rtol=1e-5, atol=1e-5)
