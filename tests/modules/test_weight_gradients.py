"""Weight gradients that do not reach autograd: `main_grad`, `backward_dw`, and passes for inputs and weights apart."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as stages
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import quantshard as qs
import quantshard.compat.transformer_engine.pytorch as te
from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam, MasterWeights, clip_grad_norm_
from quantshard.tools.observe import explain
from tests.interpreter import prepared_once

WIDTH, ROWS = 64, 32
DROPOUT = {"hidden_dropout": 0, "attention_dropout": 0}
KINDS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **o: qs.Linear(WIDTH, WIDTH, **o),
    "parts": lambda **o: qs.Linear(WIDTH, WIDTH, parameters_split=["a", "b"], **o),
    "norm and linear": lambda **o: qs.LayerNormLinear(WIDTH, WIDTH, **o),
    "mlp": lambda **o: qs.LayerNormMLP(WIDTH, 96, activation="swiglu", **o),
    "attention": lambda **o: qs.MultiheadAttention(WIDTH, 4, attention_dropout=0, input_layernorm=True, **o),
    "layer": lambda **o: qs.TransformerLayer(WIDTH, 96, 4, **DROPOUT, **o),
    "experts": lambda **o: qs.GroupedLinear(2, WIDTH, WIDTH, **o),
}
OPTIONS = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}
RECIPES = (None, "current", "delayed", "nvfp4")


def build(kind: str, recipe: str | None, **options: bool) -> nn.Module:
    torch.manual_seed(3)
    inside = contextlib.nullcontext() if recipe is None else qs.quantized_model_init(recipe=recipe)
    with inside:
        module = KINDS[kind](params_dtype=torch.bfloat16, **options)
    if options.get("fuse_wgrad_accumulation"):
        set_main_grads(module)
    return module


def set_main_grads(module: nn.Module) -> None:
    for param in weights(module):
        param.main_grad = torch.zeros(param.shape)


def weights(module: nn.Module) -> list[Any]:
    return [param for param in module.parameters() if param.ndim == 2]


def forward(module: nn.Module, recipe: str | None, step: int = 0, run: Callable[..., Any] | None = None) -> Any:
    """An input and the loss of a step."""
    x = torch.randn(ROWS, 1, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
    splits = ([12, 20],) if isinstance(module, qs.GroupedLinear) else ()
    with qs.autocast(enabled=recipe is not None, recipe=recipe or "current"):
        y = (module if run is None else run)(x, *splits)
    return x, y.float().square().mean()


def trained(
    module: nn.Module, recipe: str | None, steps: int = 2, run: Callable[..., Any] | None = None
) -> list[Tensor]:
    """Run backward for micro-batches, and the delayed products after each; return the gradients of the inputs."""
    dxs = []
    for step in range(steps):
        x, loss = forward(module, recipe, step, run)
        loss.backward()
        if any(getattr(part, "delay_wgrad_compute", False) for part in module.modules()):
            module.backward_dw()
        dxs.append(x.grad)
    return dxs


def check_same(module: nn.Module, expected: nn.Module) -> None:
    """The same gradients, in `main_grad` or `grad`, and the same histories and random states."""
    for (name, param), other in zip(module.named_parameters(), expected.parameters(), strict=True):
        for attribute in ("grad", "main_grad"):
            ours, theirs = getattr(param, attribute, None), getattr(other, attribute, None)
            assert (ours is None) == (theirs is None), (name, attribute)
            assert ours is None or torch.equal(ours, theirs), (name, attribute)
    for (name, value), other in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_is_the_gradient_before_rounding(kind: str, recipe: str | None) -> None:
    plain, module = build(kind, recipe), build(kind, recipe, fuse_wgrad_accumulation=True)
    (dx,), (expected,) = trained(module, recipe, 1), trained(plain, recipe, 1)
    assert torch.equal(dx, expected)
    for param, other in zip(module.parameters(), plain.parameters(), strict=True):
        if param.ndim != 2:
            assert torch.equal(param.grad, other.grad)
            continue
        assert param.grad is None
        # PyTorch's own BF16 product sums in another order
        rtol, atol = (2**-7, 2**-16 * float(other.grad.abs().max())) if recipe is None else (0, 0)
        torch.testing.assert_close(param.main_grad.bfloat16(), other.grad, rtol=rtol, atol=atol)
        if recipe != "delayed":  # whose first gradients saturate
            assert not torch.equal(param.main_grad, other.grad.float())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_delayed_products_have_the_bits_of_others(kind: str, recipe: str | None) -> None:
    for fuses in (False, True):
        module = build(kind, recipe, fuse_wgrad_accumulation=fuses, delay_wgrad_compute=True)
        expected = build(kind, recipe, fuse_wgrad_accumulation=fuses)
        assert module.need_backward_dw() and not expected.need_backward_dw()
        for ours, theirs in zip(trained(module, recipe), trained(expected, recipe), strict=True):
            assert torch.equal(ours, theirs)
        check_same(module, expected)


def test_products_wait_in_order() -> None:
    """Two backwards, then two calls; another call finds nothing."""
    module, expected = build("linear", "mxfp8", delay_wgrad_compute=True), build("linear", "mxfp8")
    for step in range(2):
        forward(module, "mxfp8", step)[1].backward()
    assert module.weight.grad is None and module.bias.grad is not None
    module.backward_dw()
    trained(expected, "mxfp8", 1)
    assert torch.equal(module.weight.grad, expected.weight.grad)
    module.backward_dw()
    forward(expected, "mxfp8", 1)[1].backward()
    module.backward_dw()
    check_same(module, expected)


@pytest.mark.parametrize("recipe", [None, "current"])
def test_micro_batches_add_float32_sums(recipe: str | None) -> None:
    module = build("linear", recipe, fuse_wgrad_accumulation=True)
    sums = []
    for step in range(3):
        single = build("linear", recipe, fuse_wgrad_accumulation=True)
        forward(single, recipe, step)[1].backward()
        sums.append(single.weight.main_grad)
    trained(module, recipe, 3)
    assert torch.equal(module.weight.main_grad, sums[0] + sums[1] + sums[2])
    if recipe is None:
        x, _ = forward(single, None, 2)
        y = single(x)
        dy = (2 * y.detach().float() / y.numel()).bfloat16().double()
        exact = dy.flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
        bound = (
            ROWS
            * torch.finfo(torch.float32).eps
            * (dy.flatten(0, 1).t().abs() @ x.detach().double().flatten(0, 1).abs())
        )
        assert ((sums[2] - exact).abs() <= bound).all()


def test_megatrons_flags() -> None:
    module = build("linear", "current", fuse_wgrad_accumulation=True)
    module.weight.grad_added_to_main_grad = False
    trained(module, "current", 1)
    assert module.weight.grad_added_to_main_grad and not module.weight.grad.any()
    once = module.weight.main_grad.clone()
    module.weight.overwrite_main_grad = True
    trained(module, "current", 1)
    assert torch.equal(module.weight.main_grad, once) and once.any()


def test_a_first_micro_batch_overwrites_main_grad() -> None:
    layer = te.TransformerLayer(WIDTH, 96, 4, fuse_wgrad_accumulation=True, **DROPOUT)
    set_main_grads(layer)
    x, seen = torch.randn(4, 1, WIDTH), []
    for is_first in (True, False, True, None):
        layer(x, is_first_microbatch=is_first).sum().backward()
        seen.append(layer.layernorm_mlp.fc1_weight.main_grad.clone())
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[0] + seen[0]) and torch.equal(seen[1], seen[3])


def test_not_a_number_reaches_main_grad_and_skips_the_step() -> None:
    module = build("linear", "current", fuse_wgrad_accumulation=True)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    before = module.weight.dequantize()
    _, loss = forward(module, "current")
    (loss * float("inf")).backward()
    assert not module.weight.main_grad.isfinite().any()
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
    assert torch.equal(module.weight.dequantize(), before)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_recomputed_layers(recipe: str) -> None:
    module, expected = (build("mlp", recipe, **OPTIONS) for _ in range(2))
    run = lambda x: checkpoint(module, x, use_reentrant=False)  # noqa: E731
    assert all(map(torch.equal, trained(module, recipe, run=run), trained(expected, recipe)))
    check_same(module, expected)


def test_compiled_functions_run_them_between_graphs() -> None:
    module, expected = (build("norm and linear", "current", **OPTIONS) for _ in range(2))
    assert all(
        map(
            torch.equal,
            trained(module, "current", run=torch.compile(module, backend="aot_eager")),
            trained(expected, "current"),
        )
    )
    check_same(module, expected)
    module.compile()
    assert all("between graphs" in row.fallbacks for row in explain(module).rows if row.gemm)
    if kernels.USABLE and not torch.cuda.is_available():
        with kernel_dispatch.kernels_only_on("cpu"):
            plain = build("norm and linear", "current")
            plain.compile()
            for layer, is_between in ((module, True), (plain, False)):
                found = ["between graphs" in row.fallbacks for row in explain(layer, recipe="current").rows if row.gemm]
                assert found == [is_between]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_in_two_passes(kind: str, recipe: str | None) -> None:
    """As zero-bubble schedules run it, with operands that the first pass made."""
    for options in ({}, {"fuse_wgrad_accumulation": True}):
        module, expected = build(kind, recipe, **options), build(kind, recipe, **options)
        for step in range(2):
            x, loss = forward(module, recipe, step)
            _, groups = stages.stage_backward_input([loss], None, [x], module.parameters())
            assert all(param.grad is None or step for param in module.parameters())
            stages.stage_backward_weight(module.parameters(), groups)
            dx, loss = forward(expected, recipe, step)
            loss.backward()
            assert torch.equal(x.grad, dx.grad)
        for param in weights(module) if options else ():
            assert not param.grad.any()  # the schedule needs one
            param.grad = None
        check_same(module, expected)


def test_passes_of_other_gradients_compute_their_own() -> None:
    module, expected = build("linear", "current"), build("linear", "current")
    x, loss = forward(module, "current")
    torch.autograd.grad(loss, x, retain_graph=True)
    (doubled,) = torch.autograd.grad(loss * 2, module.weight, retain_graph=True)
    loss.backward()
    trained(expected, "current", 1)
    assert torch.equal(module.weight.grad, expected.weight.grad) and torch.equal(doubled, expected.weight.grad * 2)


def optimizers(module: nn.Module) -> list[Any]:
    return [FusedAdam(module.parameters(), lr=1e-2), MasterWeights(torch.optim.SGD, module.parameters(), lr=1e-2)]


@pytest.mark.parametrize("number", range(2))
def test_optimizers_step_by_main_grad(number: int) -> None:
    module, expected = build("mlp", "current", fuse_wgrad_accumulation=True), build("mlp", "current")
    steppers = [optimizers(each)[number] for each in (module, expected)]
    trained(module, "current", 1)
    for param, other in zip(module.parameters(), expected.parameters(), strict=True):
        other.grad_dtype = None
        other.grad = (param.main_grad if param.ndim == 2 else param.grad).clone()
        if param.ndim == 2:  # a part of the gradient from elsewhere, as of tied weights
            param.main_grad, param.grad = param.main_grad / 2, (param.main_grad / 2).bfloat16()
            other.grad = param.main_grad + param.grad
    norms = [clip_grad_norm_(each, 1e-3) for each in (module, expected)]
    assert torch.equal(*norms)
    for stepper in steppers:
        stepper.step()
        stepper.zero_grad()
    assert not any(param.main_grad.any() or param.grad is not None for param in weights(module))
    for (name, value), other in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0, msg=name)


def test_refusals() -> None:
    module = build("linear", "current", fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(3)
    with pytest.raises(ConfigurationError, match=r"main_grad is torch\.float32 \[3\]; make it float32 \[64, 64\]"):
        forward(module, "current")
    del module.weight.main_grad
    with pytest.raises(ConfigurationError, match="set main_grad"):
        forward(module, "current")
    with torch.no_grad():
        forward_only = module(torch.zeros(1, WIDTH, dtype=torch.bfloat16))
    assert forward_only.shape == (1, WIDTH)
    computed = parametrizations.weight_norm(build("linear", None, delay_wgrad_compute=True))
    with pytest.raises(ConfigurationError, match="computed from other parameters"):
        forward(computed, None)


def test_frozen_weights_and_copies() -> None:
    module = build("experts", "current", **OPTIONS)
    module.weight1.requires_grad_(False)
    other = copy.deepcopy(module)
    trained(module, "current", 1)
    assert module.weight0.main_grad.any() and not module.weight1.main_grad.any()
    assert not other.weight0.main_grad.any()


def test_private_names() -> None:
    assert not private_torch.in_ddp_forward()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("kind", ["mlp", pytest.param("norm and linear", marks=pytest.mark.exhaustive), "experts"])
def test_on_kernels(kind: str) -> None:
    """Fused layers, and experts in one kernel: at once, delayed, and in two passes."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the CPU under Triton's interpreter only")
    with kernel_dispatch.kernels_only_on("cpu"), prepared_once():
        plain, fused, delayed, split = (
            build(kind, "current", **options)
            for options in ({}, {"fuse_wgrad_accumulation": True}, OPTIONS, {"fuse_wgrad_accumulation": True})
        )
        expected = trained(plain, "current", 1)
        for module in (fused, delayed):
            assert all(map(torch.equal, trained(module, "current", 1), expected))
        x, loss = forward(split, "current")
        _, groups = stages.stage_backward_input([loss], None, [x], split.parameters())
        stages.stage_backward_weight(split.parameters(), groups)
    for param, other in zip(weights(fused), weights(plain), strict=True):
        assert param.grad is None and torch.equal(param.main_grad.bfloat16(), other.grad)
        assert not torch.equal(param.main_grad, other.grad.float())
    for module in (delayed, split):
        assert all(torch.equal(p.main_grad, q.main_grad) for p, q in zip(weights(module), weights(fused), strict=True))


@pytest.mark.parametrize(
    ("option", "message"),
    [("delay_wgrad_compute", "call backward_dw"), ("fuse_wgrad_accumulation", "SGD does not read main_grad")],
)
def test_a_step_that_misses_weight_gradients_warns(option: str, message: str) -> None:
    layer = qs.Linear(16, 16, device="cpu", **{option: True})
    if option == "fuse_wgrad_accumulation":
        layer.weight.main_grad = torch.zeros(16, 16)
    layer(torch.ones(2, 16)).sum().backward()
    with pytest.warns(UserWarning, match=message):
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
