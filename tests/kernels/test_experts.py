"""GroupedLinear on kernels: what all experts compute at once has the bits of one by one, products aside."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import quantshard as qs
from benchmarks import host
from quantshard.errors import ConfigurationError, FallbackError, UnsupportedOperationError
from quantshard.gemm import predictions
from quantshard.modules import grouped_linear
from quantshard.recipe import Recipe, resolve
from tests.covering import exhaustive
from tests.distributed.models import RECIPES
from tests.modules.test_grouped_linear import is_equal_when_recomputed
from tests.weights import quantize_weight

pytest.importorskip("triton")

from quantshard.modules.gemms import grouped

pytestmark = [
    pytest.mark.usefixtures("kernels_on_cpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),  # Dynamo's
]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
PACKAGE = str(Path(qs.__file__).parent)
IN, OUT = 33, 40  # divide by nothing
AT_ONCE: dict[str, Recipe] = {
    "delayed": resolve(RECIPES["delayed"]),
    "most recent": qs.recipe.DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
    "current": resolve("current"),
    "block": resolve("block"),
    "block, scales of any value": qs.recipe.Float8BlockScaling(use_f32_scales=True),
    "mxfp8": resolve("mxfp8"),
    "E4M3 alone": qs.recipe.Float8CurrentScaling(fp8_format="E4M3", use_power_2_scales=True),
}
OTHERS = (
    "rowwise", "mxfp8 two copies", "nvfp4", "bf16", "current/fprop:bf16", "delayed/wgrad:bf16", "block/dgrad:current",
)  # fmt: skip
"""Recipes whose experts are computed one by one."""
SPLITS = {
    "one expert is empty": [7, 0, 1, 4],
    "one token": [0, 1, 0, 0],
    "more than a tile": [3, 70, 0, 9],
    "no token": [0, 0, 0, 0],
}
CASES = [("more than a tile", recipe) for recipe in AT_ONCE]
CASES += [(splits, recipe) for splits in SPLITS for recipe in ("delayed", "block") if splits != "more than a tile"]
FEWER = [("more than a tile", recipe) for recipe in ("delayed", "mxfp8")]
FEWER += [("one expert is empty", "most recent"), ("one expert is empty", "block, scales of any value")]
FEWER += [("one token", "E4M3 alone"), ("one token", "block"), ("no token", "current")]
"""Each recipe, and each way to split with a scale for each expert and for each block, but for no tokens."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many experts each call computed at once."""
    found: list[int] = []
    real = grouped.grouped_linear
    monkeypatch.setattr(grouped, "grouped_linear", lambda x, layer: found.append(len(layer.weights)) or real(x, layer))
    return found


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function with experts computed one by one."""

    def run(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(grouped_linear, "LARGEST_GROUPED", -1)
            return function()

    return run


def experts(recipe: Recipe, count: int = 4, **options: Any) -> qs.GroupedLinear:
    torch.manual_seed(3)
    with qs.quantized_model_init(recipe=recipe):
        return qs.GroupedLinear(count, IN, OUT, params_dtype=torch.bfloat16, device="cpu", **options).to(DEVICE)


def histories(layer: qs.GroupedLinear) -> list[Tensor]:
    return [buffer for name, buffer in layer.named_buffers() if "history" in name]


def values(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step)).bfloat16().to(DEVICE)


def stepped(layer: qs.GroupedLinear, recipe: Recipe, splits: Sequence[int] | Tensor, step: int) -> list[Tensor]:
    """The output, and gradients of the input and of the parameters."""
    rows = int(sum(splits))
    x = values(step, rows, IN).requires_grad_()
    with qs.autocast(recipe=recipe):
        y = layer(x, splits)
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), values(10 + step, rows, OUT))]


def close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Roundings of float32 sums, or, on a GPU, of what FP8 tensor cores keep of them."""
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a.float() - b.float()).norm() <= (2.0**-7 if ON_GPU else 2.0**-9) * b.float().norm()


@pytest.mark.parametrize(("splits", "recipe"), exhaustive(dict.fromkeys(CASES + FEWER), FEWER))
def test_experts_at_once_are_those_one_by_one(splits: str, recipe: str, calls: list[int], apart: Callable) -> None:
    """Histories to the bit, so scales of delayed scaling too; outputs and gradients within the roundings of sums."""
    rule, rows = AT_ONCE[recipe], SPLITS[splits]
    together, other = experts(rule), experts(rule)
    steps = 2 if histories(together) else 1
    for step in range(steps):
        close(stepped(together, rule, rows, step), apart(lambda step=step: stepped(other, rule, rows, step)))
    assert calls == [4] * steps
    pairs = zip(together.state_dict().items(), other.state_dict().items(), strict=True)
    assert all(name == of and torch.equal(value, same) for (name, value), (of, same) in pairs)


class Ops(TorchDispatchMode):
    """Counts operations; views launch nothing, nor does a look at the key of a weight, which is on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._local_scalar_dense.default:
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", exhaustive([(r,) for r in ("delayed", "current", "block", "mxfp8")], [("delayed",)]))
def test_launches_do_not_grow_with_experts(recipe: str, launches: list[tuple[str, int]]) -> None:
    rule, found = AT_ONCE[recipe], []
    for count in (2, 3):
        layer = experts(rule, count)
        for step in range(2):
            launches.clear()
            with Ops() as ops:
                stepped(layer, rule, [2] * count, step)
        found.append((len(launches), dict(ops.seen)))
    assert found[0] == found[1] and found[0][0] <= 13


def own_calls(step: Callable[[], object]) -> int:
    """How many functions of the package a step calls."""
    found = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call" and PACKAGE in frame.f_code.co_filename

    with torch.autograd.set_multithreading_enabled(False):  # backward on this thread, whose calls are seen
        sys.setprofile(called)
        try:
            step()
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.skipif(ON_GPU, reason="counted where kernels do nothing")
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_no_function_is_called_for_each_expert(recipe: str) -> None:
    """1 process: forward and backward, in training, with biases and splits that no step had before."""
    rule, found = AT_ONCE[recipe], []
    with host.without_device():
        for count in (8, 40):
            layer = experts(rule, count)
            for step in range(3):
                stepped(layer, rule, [2] * count, step)
            splits = [1, 3] * (count // 2)
            found.append(own_calls(lambda layer=layer, splits=splits: stepped(layer, rule, splits, 3)))
    assert found[0] == found[1]


@pytest.mark.parametrize(("splits", "recipe"), exhaustive(dict.fromkeys(CASES + FEWER), FEWER[::6]))
def test_counts_on_the_device_give_the_same_bits(splits: str, recipe: str, calls: list[int]) -> None:
    """As counts that the host knows: outputs, gradients, histories; also where rows are few for their experts."""
    rule, rows = AT_ONCE[recipe], SPLITS[splits]
    known, read = experts(rule), experts(rule)
    for step in range(2 if histories(known) else 1):
        wanted = stepped(known, rule, rows, step)
        found = stepped(read, rule, torch.tensor(rows, device=DEVICE), step)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(torch.equal(*pair) for pair in zip(read.buffers(), known.buffers(), strict=True))
    assert set(calls) == {4}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", SPLITS)
def test_plain_weights_and_counts_on_the_device(splits: str, bias: bool) -> None:
    """By PyTorch's grouped product, which sums in another order; a gradient may be one number for all."""
    rows = SPLITS[splits]
    torch.manual_seed(3)
    layer = qs.GroupedLinear(4, 48, OUT, bias=bias, params_dtype=torch.bfloat16, device=DEVICE)
    x = values(0, sum(rows), 48).requires_grad_()
    found, wanted = (
        [y.detach(), *torch.autograd.grad(y.float().sum(), (x, *layer.parameters()))]
        for y in (layer(x, torch.tensor(rows, device=DEVICE)), layer(x, rows))
    )
    close(found, wanted)
    for (name, _), grad in zip(layer.named_parameters(), found[2:], strict=True):
        assert rows[int(name[-1])] or not grad.count_nonzero()


def test_a_gradient_that_is_not_finite_stays_with_its_expert() -> None:
    """Of plain weights too."""
    torch.manual_seed(3)
    layer = qs.GroupedLinear(4, 48, OUT, params_dtype=torch.bfloat16, device=DEVICE)
    dy = values(1, 12, OUT)
    dy[7, 5] = torch.inf  # the third expert's
    y = layer(values(0, 12, 48), torch.tensor([7, 0, 1, 4], device=DEVICE))
    found = torch.autograd.grad(y, tuple(layer.parameters()), dy)
    for (name, _), grad in zip(layer.named_parameters(), found, strict=True):
        assert bool(grad.isfinite().all()) == (name[-1] != "2"), name


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
def test_counts_on_the_device_are_read_where_experts_go_one_by_one(recipe: str, calls: list[int]) -> None:
    """Not in silence: strict refuses. Rows of 33 elements are not aligned for PyTorch's product."""
    rule, rows = resolve(RECIPES.get(recipe, recipe)), SPLITS["one expert is empty"]

    def layer() -> qs.GroupedLinear:
        torch.manual_seed(3)
        with qs.quantized_model_init(recipe != "bf16", recipe=rule):
            return qs.GroupedLinear(4, IN, OUT, params_dtype=torch.bfloat16, device=DEVICE)

    counts = torch.tensor(rows, device=DEVICE)
    found, wanted = (stepped(layer(), rule, given, 0) for given in (counts, rows))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and not calls
    with pytest.raises(FallbackError), qs.autocast(recipe=rule, strict=True):
        layer()(values(0, 12, IN), counts)


def test_counts_on_the_device_are_checked() -> None:
    layer, x = experts(AT_ONCE["current"]), values(0, 12, IN)
    with qs.autocast(recipe=AT_ONCE["current"]):
        for wrong in (torch.ones(3, dtype=torch.int64), torch.ones(4, 1, dtype=torch.int64), torch.full((4,), 3.0)):
            with pytest.raises(ConfigurationError, match=r"m_splits is torch.* give ints \[4\]"):
                layer(x, wrong.to(DEVICE))
        if not ON_GPU:
            with pytest.raises(ConfigurationError, match=r"on meta; give ints \[4\] on cpu"):
                layer(x, torch.ones(4, dtype=torch.int64, device="meta"))


def test_counts_of_other_integers_and_of_what_the_host_knows() -> None:
    """Of one expert, or of no rows, they are known, and checked all the same."""
    rule, rows = AT_ONCE["current"], SPLITS["one expert is empty"]
    wanted = stepped(experts(rule), rule, rows, 0)
    for dtype in (torch.int16, torch.uint8):
        found = stepped(experts(rule), rule, torch.tensor(rows, dtype=dtype, device=DEVICE), 0)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(stepped(experts(rule, 1), rule, torch.tensor([4], device=DEVICE), 0)[0]) == 4
    if not ON_GPU:  # where an assertion of the device ends the process
        with qs.autocast(recipe=rule):
            for layer, x, wrong in (
                (experts(rule, 1), values(0, 4, IN), [999]),
                (experts(rule), values(0, 0, IN), [5, 7, 0, 0]),
            ):
                with pytest.raises(RuntimeError, match=r"m_splits does not sum to the [04] rows of the input"):
                    layer(x, torch.tensor(wrong))


def test_tokens_of_one_rank_are_dispatched_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels run: the rows, counts, outputs and gradients of a dispatch that counts on the host."""
    tokens, chosen = values(0, 9, 8).requires_grad_(), torch.tensor([2, 0, 3, 0, 2, 2, 3, 0, 0], device=DEVICE)
    chosen, weights = torch.stack([chosen, (chosen + 2) % 4], 1), torch.rand(9, 2, device=DEVICE)

    def moved() -> tuple[qs.Dispatch, list[Tensor]]:
        sent = qs.dispatch_tokens(tokens, chosen, 4)
        out = sent.combine(sent.tokens * 2, weights)
        return sent, [sent.tokens, out, *torch.autograd.grad(out.float().square().sum(), tokens)]

    read, found = moved()
    assert isinstance(read.m_splits, Tensor) and read.m_splits.device.type == DEVICE
    monkeypatch.setattr("quantshard.kernel_dispatch.has_kernels", lambda x: False)
    known, wanted = moved()
    assert read.m_splits.tolist() == known.m_splits and len(set(known.m_splits)) > 1
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.skipif(ON_GPU, reason="what a device asserts ends the process")
@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_that_there_is_not_is_told(wrong: int) -> None:
    with pytest.raises(RuntimeError, match="entries of experts are not in 0 to 3"):
        qs.dispatch_tokens(values(0, 2, 8), torch.tensor([0, wrong], device=DEVICE), 4)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "bf16"])
def test_a_captured_step_is_computed_at_once(recipe: str, calls: list[int]) -> None:
    """1 process: forward and backward as a CUDA graph, whose replays have the bits of eager steps, histories too, each
    with other counts than the one before."""
    rule, plain = AT_ONCE.get(recipe, resolve("bf16")), recipe == "bf16"

    def layer() -> qs.GroupedLinear:
        torch.manual_seed(3)
        with qs.quantized_model_init(not plain, recipe=rule):
            return qs.GroupedLinear(4, 48, OUT, params_dtype=torch.bfloat16, device=DEVICE)

    eager, captured = layer(), layer()
    rows = torch.tensor(SPLITS["more than a tile"], device=DEVICE)
    static, dy = values(0, int(rows.sum()), 48).requires_grad_(), values(1, int(rows.sum()), OUT)

    def step(layer: qs.GroupedLinear, x: Tensor, counts: Sequence[int] | Tensor) -> list[Tensor]:
        with qs.autocast(recipe=rule):
            y = layer(x, counts)
        return [y, *torch.autograd.grad(y, (x, *layer.parameters()), dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for each in (eager, captured):
            step(each, static, rows)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(captured, static, rows)
    assert plain or calls == [4] * 3
    for number, counts in enumerate(([3, 70, 0, 9], [0, 0, 82, 0], [20, 21, 19, 22])):
        x = values(2 + number, sum(counts), 48) * (1 + number)
        wanted = step(eager, x.requires_grad_(), rows.new_tensor(counts) if plain else counts)
        with torch.no_grad():
            static.copy_(x)
        rows.copy_(rows.new_tensor(counts))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(torch.equal(*pair) for pair in zip(captured.buffers(), eager.buffers(), strict=True))


def test_weights_that_moved_are_read_where_they_are(apart: Callable) -> None:
    """What was remembered of them holds no longer: new values in other memory, or other parameters."""
    rule, rows = AT_ONCE["current"], SPLITS["one expert is empty"]
    layer, x = experts(rule), values(0, 12, IN)

    def forward() -> Tensor:
        with qs.autocast(recipe=rule), torch.no_grad():
            return layer(x, rows)

    first = forward()
    kept = layer.weight2  # so that its memory is not given to another
    layer.weight2.data = quantize_weight(values(7, OUT, IN).float(), rule.weight, dtype=torch.bfloat16)
    second = forward()
    assert (first != second).any(1).tolist() == [row == 7 for row in range(12)]  # the third expert's
    close([second], [apart(forward)])
    layer.weight2 = torch.nn.Parameter(quantize_weight(values(8, OUT, IN).float(), rule.weight, dtype=torch.bfloat16))
    third = forward()
    assert (third != second).any(1).tolist() == [row == 7 for row in range(12)]
    close([third], [apart(forward)])
    del kept


def test_a_copy_of_a_layer_reads_its_own_weights() -> None:
    rule, rows = AT_ONCE["current"], SPLITS["one expert is empty"]
    layer, x = experts(rule), values(0, 12, IN)
    with qs.autocast(recipe=rule), torch.no_grad():
        before = layer(x, rows)
        copied = copy.deepcopy(layer)
        copied.weight2.quantize_(values(7, OUT, IN).float())
        assert torch.equal(layer(x, rows), before)
        assert (copied(x, rows) != before).any(1).tolist() == [row == 7 for row in range(12)]
    pickle.dumps(layer._reader)  # which has references that cannot be


def test_parts_of_a_layer_may_need_no_gradient(calls: list[int], apart: Callable) -> None:
    rule, rows = AT_ONCE["current"], SPLITS["one expert is empty"]
    layer, x, dy = experts(rule), values(0, 12, IN), values(1, 12, OUT)

    def gradients() -> list[Tensor]:
        with qs.autocast(recipe=rule):
            y = layer(x, rows)
        return [y.detach(), *torch.autograd.grad(y, [p for p in layer.parameters() if p.requires_grad], dy)]

    close(gradients(), apart(gradients))
    for frozen in (layer.weight1, layer.bias0):
        frozen.requires_grad_(False)
    close(gradients(), apart(gradients))
    for weight in (layer.weight0, layer.weight2, layer.weight3):
        weight.requires_grad_(False)
    close(gradients(), apart(gradients))
    with torch.no_grad(), qs.autocast(recipe=rule):
        close([layer(x, rows)], [apart(lambda: layer(x, rows))])
    assert calls == [4, 4, 4, 4]


def test_ways_to_call_at_once(calls: list[int]) -> None:
    rule, x = AT_ONCE["current"], values(0, 3, 4, IN)
    with qs.autocast(recipe=rule):
        wanted = experts(rule)(x.view(12, IN), [7, 0, 1, 4])
        assert torch.equal(experts(rule)(x, torch.tensor([7, 0, 1, 4])), wanted.view(3, 4, OUT))
        out, biases = experts(rule, return_bias=True)(x, [7, 0, 1, 4])
        assert torch.equal(out, experts(rule, bias=False)(x, [7, 0, 1, 4]))
        assert [bias.shape for bias in biases] == [(OUT,)] * 4
    assert calls == [4] * 4


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_gradient_that_is_not_finite_poisons_its_expert_alone(recipe: str) -> None:
    rule, rows = AT_ONCE[recipe], [7, 0, 1, 4]
    layer = experts(rule, bias=False)
    x, dy = values(0, 12, IN).requires_grad_(), values(1, 12, OUT)
    dy[7, 5] = torch.inf  # the third expert's
    with qs.autocast(recipe=rule):
        y = layer(x, rows)
    dx, *dws = torch.autograd.grad(y, (x, *layer.parameters()), dy)
    assert dx[7].isnan().all() and dx[:7].isfinite().all() and dx[8:].isfinite().all()
    assert [bool(dw.isnan().all()) for dw in dws] == [False, False, True, False]
    assert all(dw.isfinite().all() for number, dw in enumerate(dws) if number != 2)


@pytest.mark.parametrize(
    ("recipe", "reentrant"),
    exhaustive(
        product(["delayed", "current", "mxfp8"], [True, False]),
        [("delayed", True)],
    ),
)
def test_recomputation_at_once_gives_the_same_bits(recipe: str, reentrant: bool, calls: list[int]) -> None:
    rule = AT_ONCE[recipe]
    is_equal_when_recomputed(experts(rule), experts(rule), rule, reentrant, lambda step: values(step, 12, IN))
    assert calls == [4] * 6


def test_amaxes_of_two_calls_in_one_autocast_are_merged(apart: Callable) -> None:
    rule = AT_ONCE["delayed"]
    together, other = experts(rule), experts(rule)

    def twice(layer: qs.GroupedLinear) -> None:
        with qs.autocast(recipe=rule):
            y = layer(values(0, 12, IN), [7, 0, 1, 4]).sum() + layer(3 * values(1, 12, IN), [0, 2, 9, 1]).square().sum()
        y.backward()

    twice(together)
    apart(lambda: twice(other))
    assert all(torch.equal(*pair) for pair in zip(together.buffers(), other.buffers(), strict=True))


def test_gradients_of_weights_are_parts_of_one_tensor() -> None:
    """Autograd takes them as they are: a copy of each would be a launch and twice the memory."""
    layer = experts(AT_ONCE["current"])
    with qs.autocast(recipe=AT_ONCE["current"]):
        layer(values(0, 12, IN), [7, 0, 1, 4]).sum().backward()
    assert (
        len({param.grad.untyped_storage().data_ptr() for name, param in layer.named_parameters() if "weight" in name})
        == 1
    )


@pytest.mark.parametrize("options", [{"params_dtype": torch.float64}, {"params_dtype": torch.float16}])
def test_what_kernels_do_not_read_goes_one_by_one(options: dict[str, Any], calls: list[int]) -> None:
    rule = AT_ONCE["current"]
    with qs.quantized_model_init(recipe=rule):
        layer = qs.GroupedLinear(2, IN, OUT, device=DEVICE, **options)
    with qs.autocast(recipe=rule):
        y = layer(values(0, 12, IN), [7, 5])
    assert calls == [2] * (options["params_dtype"] is torch.float16) and y.dtype is torch.bfloat16


def test_second_derivatives_are_refused() -> None:
    rule = AT_ONCE["current"]
    x = values(0, 12, IN).requires_grad_()
    with qs.autocast(recipe=rule):
        y = experts(rule)(x, [7, 0, 1, 4])
    with pytest.raises(UnsupportedOperationError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_strict_and_explain_tell_of_experts_one_by_one(monkeypatch: pytest.MonkeyPatch, apart: Callable) -> None:
    """Where they could be computed at once, but for the recipe."""
    monkeypatch.setattr(predictions, "gemm_path", lambda cell, device, recipe=None: ("native", "tried"))
    two_copies = resolve(RECIPES["mxfp8 two copies"])

    def strictly(rule: Recipe, count: int = 4) -> None:
        with qs.autocast(recipe=rule, strict=True):
            experts(rule, count)(values(0, 12, IN), [12, *[0] * (count - 1)])

    with pytest.raises(FallbackError, match=r"GroupedLinear.weight0: experts are quantized .* one after another"):
        strictly(two_copies)
    apart(lambda: strictly(two_copies))  # large ones
    strictly(two_copies, 1)
    strictly(AT_ONCE["block"])
    rows = {name: qs.explain(experts(rule), recipe=rule).rows for name, rule in (("two", two_copies), *AT_ONCE.items())}
    assert all(row.fallbacks == ("one expert at a time",) for row in rows.pop("two") if "weight" in row.name)
    assert not any(row.fallbacks for of in rows.values() for row in of)


@pytest.mark.parametrize(
    "recipe",
    exhaustive(
        [(name,) for name in OTHERS],
        [(name,) for name in ("rowwise", "mxfp8 two copies", "nvfp4", "block/dgrad:current")],
    ),
)
def test_other_recipes_go_one_by_one(recipe: str, calls: list[int]) -> None:
    rule = resolve(RECIPES.get(recipe, recipe))
    with qs.autocast(recipe=rule):
        experts(rule)(values(0, 12, IN), [7, 0, 1, 4])
    assert not calls


def test_what_goes_one_by_one(calls: list[int], apart: Callable) -> None:
    """Large experts, one expert, weights in high precision, and none quantizing."""
    rule = AT_ONCE["current"]

    def forward(layer: qs.GroupedLinear, splits: list[int], rule: Recipe = rule) -> None:
        with qs.autocast(recipe=rule):
            layer(values(0, sum(splits), IN), splits)

    apart(lambda: forward(experts(rule), [7, 0, 1, 4]))
    forward(experts(rule, 1), [7])
    forward(experts(rule), [7, 0, 1, 4], resolve("bf16"))
    torch.manual_seed(3)
    plain = qs.GroupedLinear(2, IN, OUT, params_dtype=torch.bfloat16, device=DEVICE)
    forward(plain, [7, 2])
    assert not calls
    assert grouped_linear.is_faster_together(128 * 128, 128, (2048, 768))
    assert not grouped_linear.is_faster_together(8 * 2048, 8, (14336, 4096))
