"""torch.autocast: a module computes in its dtype and returns it, with the bits of a call on an input cast by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantshard as qs
from tests.covering import exhaustive

# Dynamo itself makes an instance of every autograd.Function that it traces
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")

SIZE, TOKENS = 64, 6
RECIPES = ["bf16", "delayed", "current", "block", "rowwise", "mxfp8", "nvfp4"]
BF16, FP16 = torch.bfloat16, torch.float16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


class Experts(qs.GroupedLinear):
    """Whose splits are those of the test."""

    def forward(self, inp: Tensor) -> Any:
        return super().forward(inp, [TOKENS - 2, 0, TOKENS + 2])


class WithResidual(qs.LayerNormMLP):
    """All of whose outputs are returned."""

    def forward(self, inp: Tensor) -> Any:
        return super().forward(inp, residual=inp.detach().flip(0))


class Core(nn.Module):
    """Only the core attention; it has no weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend = qs.DotProductAttention(4, SIZE // 4, attention_backend="math")

    def forward(self, inp: Tensor) -> Tensor:
        heads = inp.unflatten(-1, (4, -1))
        return self.attend(heads, heads.detach(), heads.detach().flip(0))


# other backends of attention do not repeat their gradients on GPUs
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attention_backend": "math"}
MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": partial(qs.Linear, SIZE, 48),
    "Linear of parts": partial(qs.Linear, SIZE, 48, parameters_split=["a", "b"], separate_outputs=True),
    "Linear returning bias": partial(qs.Linear, SIZE, 48, return_bias=True),
    "GroupedLinear": partial(Experts, 3, SIZE, 48),
    "GroupedLinear returning biases": partial(Experts, 3, SIZE, 48, return_bias=True),
    "LayerNorm": partial(qs.LayerNorm, SIZE),
    "RMSNorm": partial(qs.RMSNorm, SIZE, zero_centered_gamma=True),
    "LayerNormLinear": partial(qs.LayerNormLinear, SIZE, 48, return_layernorm_output=True, return_bias=True),
    "LayerNormLinear in one": partial(qs.LayerNormLinear, SIZE, 48, normalization="RMSNorm"),
    "LayerNormMLP": partial(qs.LayerNormMLP, SIZE, 96, return_bias=True),
    "LayerNormMLP, gated": partial(WithResidual, SIZE, 96, activation="swiglu", recompute_activation=True),
    "DotProductAttention": Core,
    "MultiheadAttention": partial(
        qs.MultiheadAttention, SIZE, 4, num_gqa_groups=2, attention_dropout=0.0, attention_backend="math"
    ),
    "TransformerLayer": partial(qs.TransformerLayer, SIZE, 96, 4, **NO_DROPOUT),
    "TransformerLayer, output_layernorm": partial(
        qs.TransformerLayer, SIZE, 96, 4, output_layernorm=True, **NO_DROPOUT
    ),
    "TransformerLayer, parallel": partial(qs.TransformerLayer, SIZE, 96, 4, parallel_attention_mlp=True, **NO_DROPOUT),
}


def build(kind: str, recipe: str, stored: bool, device: str = "cpu", seed: int = 0) -> nn.Module:
    """Float32 parameters, all of them values of bfloat16 and of float16, and no constants."""
    torch.manual_seed(seed)
    with qs.quantized_model_init(enabled=stored, recipe=recipe):
        module = MODULES[kind](device=device)
    with torch.no_grad():
        for number, param in enumerate(module.parameters()):
            if param.ndim == 1:
                noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
                param += (noise / 8).to(device)
            if type(param) is nn.Parameter:
                param.copy_(param.to(FP16).to(BF16))
    return module


def data(device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, 2, SIZE, generator=torch.Generator().manual_seed(seed)).to(device)


def tensors(found: Any) -> list[Tensor]:
    """All in what a module returns."""
    if isinstance(found, Tensor):
        return [found]
    return [tensor for part in found or () for tensor in tensors(part)]


def run(
    module: Callable[[Tensor], Any],
    x: Tensor,
    recipe: str,
    *contexts: AbstractContextManager[Any],
    params: Sequence[Tensor] | None = None,
    backward_inside: bool = False,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs of a module in contexts, and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    with ExitStack() as stack:
        for context in (qs.autocast(recipe=recipe), *contexts):
            stack.enter_context(context)
        found = tensors(module(x))
        loss = sum(part.float().square().sum() for part in found)
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return found, [x.grad, *(param.grad for param in (module.parameters() if params is None else params))]


def assert_alike(ones: Sequence[Tensor | None], others: Sequence[Tensor | None], what: object = "") -> None:
    for index, (one, other) in enumerate(zip(ones, others, strict=True)):
        if one is None or other is None:
            assert one is other, (what, index)
        else:
            assert one.dtype == other.dtype and torch.equal(one, other), (what, index)


def cast_by_hand(module: nn.Module, dtype: torch.dtype, recipe: str, device: str = "cpu") -> Any:
    """What `run` gives without torch.autocast."""
    found, (of_x, *others) = run(module, data(device).to(dtype), recipe)
    return found, [of_x.float(), *others]


LAYERS = [kind for kind in MODULES if kind.startswith("TransformerLayer")]
OTHERS = [
    (kind, recipe)
    for (i, kind), (j, recipe) in product(enumerate(MODULES), enumerate(RECIPES))
    if kind not in LAYERS and (i + j) % 3 == 0
]
"""What layers consist of, with every third recipe; and each recipe in one of the layers, in turns."""
IN_TURNS = [(LAYERS[turn % len(LAYERS)], recipe) for turn, recipe in enumerate(RECIPES)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "recipe"), exhaustive(product(MODULES, RECIPES), OTHERS + IN_TURNS))
def test_the_bits_are_those_of_an_input_cast_by_hand(kind: str, recipe: str, device: str) -> None:
    for stored, dtype in ((True, BF16), (False, BF16), (False, FP16))[: 3 if recipe in ("bf16", "current") else 2]:
        context = torch.autocast(device, dtype)
        found, grads = run(build(kind, recipe, stored, device), data(device), recipe, context)
        want, want_grads = cast_by_hand(build(kind, recipe, stored, device), dtype, recipe, device)
        assert all(out.dtype == dtype for out in found)
        assert all(grad is None or grad.dtype == torch.float32 for grad in grads)  # as their tensors
        assert_alike(found, want, (stored, dtype))
        assert_alike(grads, want_grads, (stored, dtype))


TWO = ((("bf16", BF16), ("nvfp4", FP16)), (("bf16", FP16), ("block", BF16)))


@pytest.mark.parametrize(
    ("kind", "cells"),
    exhaustive(product(MODULES, TWO), [(kind, TWO[turn % 2]) for turn, kind in enumerate(MODULES)]),
)
def test_the_outputs_are_those_of_the_module_cast_by_hand(kind: str, cells: Sequence[tuple[str, torch.dtype]]) -> None:
    """Where casting loses nothing of the parameters."""
    for recipe, dtype in cells:
        found, grads = run(build(kind, recipe, False), data(), recipe, torch.autocast("cpu", dtype))
        want, want_grads = run(build(kind, recipe, False).to(dtype), data().to(dtype), recipe)
        assert_alike(found, want, (recipe, dtype))
        assert_alike([grads[0].to(dtype)], want_grads[:1], (recipe, dtype))  # of the input


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_plain_layer_is_what_pytorchs_is(device: str, dtype: torch.dtype) -> None:
    ours, theirs = build("Linear", "bf16", False, device), nn.Linear(SIZE, 48, device=device)
    theirs.load_state_dict({"weight": ours.weight, "bias": ours.bias})
    for options in ({}, {"cache_enabled": False}):
        for module in (ours, theirs):
            module.zero_grad()
        found, want = (
            run(module, data(device), "bf16", torch.autocast(device, dtype, **options)) for module in (ours, theirs)
        )
        assert_alike(found[0], want[0], options)
        assert_alike(found[1], want[1], options)


@contextmanager
def of_another_device() -> Iterator[None]:
    """Whether there is such a device or not, which torch.autocast asks."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before)


@pytest.mark.parametrize("kind", MODULES)
def test_what_does_not_cast(kind: str) -> None:
    """One that is disabled, also within another, and one of another device."""
    recipe = "current"
    want = run(build(kind, recipe, False), data(), recipe)
    disabled = torch.autocast("cpu", BF16, enabled=False)
    for contexts in ([disabled], [of_another_device()], [torch.autocast("cpu", BF16), disabled]):
        found = run(build(kind, recipe, False), data(), recipe, *contexts)
        assert_alike([*found[0], *found[1]], [*want[0], *want[1]])


def test_the_innermost_casts() -> None:
    want = cast_by_hand(build("LayerNormMLP", "mxfp8", True), FP16, "mxfp8")
    inner = torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False), torch.autocast("cpu", FP16)
    found = run(build("LayerNormMLP", "mxfp8", True), data(), "mxfp8", *inner)
    assert_alike([*found[0], *found[1]], [*want[0], *want[1]])


def test_double_precision_stays() -> None:
    """As in PyTorch."""
    x = data().double()
    with torch.autocast("cpu", BF16):
        assert qs.Linear(SIZE, 8, params_dtype=torch.float64, device="cpu")(x).dtype == torch.float64
        assert nn.Linear(SIZE, 8, dtype=torch.float64)(x).dtype == torch.float64
        assert qs.LayerNorm(SIZE, device="cpu")(x).dtype == torch.float64


def test_on_the_meta_device() -> None:
    with torch.autocast("cpu", BF16):
        out = qs.LayerNormLinear(SIZE, 8, device="meta")(data("meta"))
    assert out.is_meta and out.dtype == torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP, gated"])
def test_backward_inside(kind: str, recipe: str) -> None:
    """Of what is ours, nothing is rounded that is not rounded outside; attention is PyTorch's."""
    stored = recipe != "bf16"
    runs = [
        run(build(kind, recipe, stored), data(), recipe, torch.autocast("cpu", BF16), backward_inside=inside)
        for inside in (False, True)
    ]
    assert_alike(runs[0][1], runs[1][1])


@pytest.mark.parametrize(
    ("recipe", "reentrant"),
    exhaustive(product(RECIPES, [False, True]), [(recipe, turn % 2 == 1) for turn, recipe in enumerate(RECIPES)]),
)
def test_recomputed(recipe: str, reentrant: bool) -> None:
    """The second forward casts as the first, and it runs outside."""
    runs = []
    for recompute in (False, True):
        layer = build("TransformerLayer", recipe, recipe != "bf16")
        forward = partial(qs.checkpoint, layer, use_reentrant=reentrant) if recompute else layer
        params = list(layer.parameters())
        runs.append(run(forward, data(), recipe, torch.autocast("cpu", BF16), params=params))
    assert_alike([*runs[0][0], *runs[0][1]], [*runs[1][0], *runs[1][1]])


@pytest.mark.parametrize(
    ("kind", "recipe", "inside"),
    [("Linear", "nvfp4", True), pytest.param("GroupedLinear", "delayed", False, marks=pytest.mark.exhaustive),
     ("RMSNorm", "bf16", True), pytest.param("LayerNormMLP", "current", False, marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_compiled(kind: str, recipe: str, inside: bool) -> None:
    torch._dynamo.reset()

    def compiled(module: nn.Module, dtype: torch.dtype, enabled: bool) -> tuple[Callable[..., Any], Any]:
        def within(x: Tensor) -> Any:
            with torch.autocast("cpu", dtype, enabled=enabled):
                return module(x)

        around = torch.autocast("cpu", dtype, enabled=enabled and not inside)
        return torch.compile(within if inside else module, backend="aot_eager"), around

    module = build(kind, recipe, True)
    for dtype, enabled in ((BF16, True), (FP16, False), (FP16, True))[: 3 if kind == "Linear" else 2]:
        want = run(build(kind, recipe, True), data(), recipe, torch.autocast("cpu", dtype, enabled=enabled))
        module.load_state_dict(build(kind, recipe, True).state_dict())
        module.zero_grad()
        function, around = compiled(module, dtype, enabled)
        found = run(function, data(), recipe, around, params=list(module.parameters()))
        assert_alike([*found[0], *found[1]], [*want[0], *want[1]], (dtype, enabled))


def test_between_pytorchs_layers() -> None:
    """A training step of a float32 model, as one that knows nothing of us writes it."""
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe="mxfp8"):
        layers = [nn.Linear(SIZE, SIZE), qs.LayerNormLinear(SIZE, SIZE, device="cpu"), nn.LayerNorm(SIZE)]
    model = nn.Sequential(*layers, qs.RMSNorm(SIZE, device="cpu"), nn.Linear(SIZE, 3))
    optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", BF16), qs.autocast(recipe="mxfp8"):
            out = model(data())
            assert out.dtype == BF16
            loss = F.cross_entropy(out.flatten(0, 1), torch.arange(2 * TOKENS) % 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
