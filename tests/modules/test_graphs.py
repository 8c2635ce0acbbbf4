"""`make_graphed_callables` without a GPU: what it takes and refuses, and, with graphs that run their work again instead
of launching it, that a replay leaves with histories, draws and gradients what the eager pass leaves. Graphs themselves:
tests/modules/test_make_graphed.py."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import quantshard as qs
import quantshard.compat.transformer_engine.pytorch as te
from quantshard import kernel_dispatch, kernels
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules.contexts import pending_amaxes
from quantshard.modules.graphs import callables, recorder as recorders
from quantshard.modules.graphs.module_graph import ModuleGraph, copied_gradients
from quantshard.modules.graphs.recorder import GraphRecorder
from quantshard.optimizers import FusedAdam, MasterWeights
from tests.covering import exhaustive
from tests.distributed.models import RECIPES, bits
from tests.distributed.pool import run_ranks
from tests.interpreter import prepared_once
from tests.modules.graphed import (
    HIDDEN,
    MODULES,
    TOKENS,
    Failing,
    RerunRecorder,
    Training,
    assert_same,
    module_of,
    rerun,
)
from tests.pages import snippets

__all__ = ["rerun"]

X = torch.zeros(TOKENS, 1, HIDDEN, dtype=torch.bfloat16)


def built(name: str, recipe: str, **options: Any) -> nn.Module:
    return module_of(name, RECIPES[recipe], "cpu", **options)


def pair(name: str, recipe: str, **options: Any) -> tuple[Training, Training]:
    eager, graphed = (Training(recipe, [built(name, recipe)], **options) for _ in range(2))
    return eager, graphed


# What replays leave behind -------------------------------------------------------------------------------------------


def test_all_captures_warm_up_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch and this package keep for a stream would else grow with each capture."""
    entered: list[Any] = []

    def stream(given: Any) -> AbstractContextManager[None]:
        entered.append(given)
        return nullcontext()

    for name, fake in {
        "Stream": object, "stream": stream, "device": lambda _: nullcontext(), "synchronize": lambda: None
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    for index in (8, 8, 9):  # of GPUs that are not there
        with GraphRecorder(torch.device("cuda", index), pool=0).warming():
            pass
    one, again, other = entered
    assert one is again and one is not other


def test_gradients_are_copied() -> None:
    grads = [torch.arange(4.0), None, -torch.zeros(3), torch.ones(2, 5, dtype=torch.bfloat16).T, torch.ones(0)]
    copies = copied_gradients(grads)
    for result, grad in zip(copies, grads, strict=True):
        if result is None or grad is None:
            assert result is grad
        else:
            assert torch.equal(result, grad) and torch.equal(result.signbit(), grad.signbit())
            assert result.stride() == grad.stride()
            assert result.numel() == 0 or result.data_ptr() != grad.data_ptr()


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param(name, recipe, marks=() if turn % 4 == 3 * (turn // 4 % 2) else pytest.mark.exhaustive)
        for turn, (name, recipe) in enumerate(itertools.product(MODULES, ["delayed", "current", "mxfp8", "nvfp4"]))
    ],
)
def test_replays_have_the_bits_of_eager(rerun: None, name: str, recipe: str) -> None:
    """A replay whose amaxes were lost, or noted twice, would scale by others from the second step on."""
    eager, graphed = pair(name, recipe)
    graphed.capture()
    assert_same(eager, graphed, steps=3)
    if recipe == "delayed":
        assert any("amax_history" in key for key in graphed.model.state_dict())


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_replays_of_kernels(rerun: None, recipe: str) -> None:
    """Fused steps, which note amaxes and draw words by kernels of their own."""
    if not kernels.USABLE or torch.cuda.is_available():
        pytest.skip("kernels run on the CPU under Triton's interpreter only")
    with kernel_dispatch.kernels_only_on("cpu"), prepared_once():
        eager, graphed = pair("LayerNormMLP", recipe)
        graphed.capture(num_warmup_iters=1)
        assert_same(eager, graphed, steps=2)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
def test_several_modules(rerun: None, recipe: str) -> None:
    eager, graphed = (
        Training(recipe, [built(name, recipe) for name in ("LayerNormMLP", "Linear", "TransformerLayer")])
        for _ in range(2)
    )
    graphed.capture(several=True)
    assert_same(eager, graphed, steps=3)


def test_plain_weights(rerun: None) -> None:
    """Whose amaxes are noted in each forward."""
    eager, graphed = (Training("delayed", [built("LayerNormMLP", "delayed", quantized=False)]) for _ in range(2))
    graphed.capture()
    assert_same(eager, graphed, steps=3)


@pytest.mark.parametrize("optimizer", ["MasterWeights", "AdamW"])
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_other_optimizers_write_in_place(rerun: None, recipe: str, optimizer: str) -> None:
    def make(params: Any, **options: Any) -> Any:
        if optimizer == "MasterWeights":
            return MasterWeights(torch.optim.AdamW, params, **options)
        return torch.optim.AdamW([param for _, param in params], **options)

    eager, graphed = pair("Linear", recipe, optimizer=make)
    graphed.capture()
    assert_same(eager, graphed, steps=3)


def test_several_forwards_in_one_autocast(rerun: None) -> None:
    """Their amaxes are merged."""
    found = []
    for captured in (False, True):
        training = Training("delayed", [built("LayerNormMLP", "delayed")])
        if captured:
            training.capture()
        for _ in range(3):
            with qs.autocast(recipe=RECIPES["delayed"]):
                for scale in (1, 5, 2):
                    (training.model(training.data(scale) * scale).float().sum() / 9).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        found.append(bits(training.model, training.optimizer))
    assert found[0] == found[1]


def test_an_autocast_inside_of_the_callable(rerun: None) -> None:
    """It ends in the callable, and with it the step of its histories."""
    found = []
    for captured in (False, True):
        layer = built("Linear", "delayed")

        class Inside(nn.Module):
            def __init__(self, layer: nn.Module) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: Tensor) -> Any:
                with qs.autocast(recipe=RECIPES["delayed"]):
                    return self.layer(x)

        module = Inside(layer)
        if captured:
            qs.make_graphed_callables(module, (X,), enabled=False)
        for number in range(3):
            module(X + number).float().sum().backward()
        found.append({**bits(module), "grad": str(layer.weight.grad.float().sum())})
    assert found[0] == found[1]


def test_checkpointing_inside(rerun: None) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module, used: bool) -> None:
            super().__init__()
            self.inner, self.used = inner, used

        def forward(self, x: Tensor) -> Any:
            return qs.checkpoint(self.inner, x, preserve_rng_state=False) if self.used else self.inner(x)

    eager, graphed = (
        Training("delayed", [Checkpointed(built("LayerNormMLP", "delayed"), used)]) for used in (False, True)
    )
    graphed.capture()
    assert_same(eager, graphed, steps=3)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_capturing_leaves_no_trace(rerun: None, recipe: str) -> None:
    """Histories that are not at zero, draws that are under way, gradients, buffers, random numbers, pending amaxes."""
    training = Training(recipe, [built("TransformerLayer", recipe, dropout=0.1), nn.BatchNorm1d(1).to(X.dtype)])
    training.run(2)
    training.forward(training.data(1)).float().sum().backward()
    held = [param.grad for param in training.model.parameters()]
    with qs.autocast(recipe=RECIPES[recipe]):
        training.model(training.data(2))
        pending = pending_amaxes.forward_amaxes()
        waiting = bool(pending)
        before, grads = bits(training.model, training.optimizer), [grad.clone() for grad in held]
        random = torch.get_rng_state()
        training.capture()
        assert pending_amaxes.forward_amaxes() is pending and bool(pending) == waiting
        assert torch.equal(random, torch.get_rng_state())
        assert bits(training.model, training.optimizer) == before
    for param, kept, grad in zip(training.model.parameters(), held, grads, strict=True):
        assert param.grad is kept and torch.equal(kept, grad)


def test_dropout_draws_what_eager_draws(rerun: None) -> None:
    found = []
    for captured in (False, True):
        training = Training("current", [built("TransformerLayer", "current", dropout=0.2)])
        torch.manual_seed(3)
        if captured:
            training.capture()
        found.append((training.run(2), training.seen))
    assert found[0][0] == found[1][0] and all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


# Calls ---------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    total: Tensor
    others: dict[str, Any]


def several_results(x: Tensor, scale: float = 1.0, parts: Any = None) -> Pair:
    return Pair(x * scale, {"parts": [part + 1 for part in parts], "none": None, "scale": scale, "sign": x > 0})


def test_functions_with_structured_arguments_and_results(rerun: None) -> None:
    sample = torch.ones(3, requires_grad=True)
    graphed = qs.make_graphed_callables(
        several_results, (sample,), sample_kwargs={"scale": 2.0, "parts": (sample, torch.ones(2))}, enabled=False
    )
    x, parts = torch.arange(3.0).requires_grad_(), (torch.ones(3, requires_grad=True), torch.arange(2.0))
    found, expected = (call(x, parts=parts, scale=2.0) for call in (graphed, several_results))
    assert type(found) is Pair and torch.equal(found.total, expected.total)
    assert torch.equal(found.others["parts"][1], parts[1] + 1) and found.others["none"] is None
    assert found.others["scale"] == 2.0 and torch.equal(found.others["sign"], x > 0)
    assert not found.others["sign"].requires_grad and not found.others["parts"][1].requires_grad
    (found.total.sum() + found.others["parts"][0].sum()).backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and torch.equal(parts[0].grad, torch.ones(3))
    assert torch.equal(sample, torch.ones(3)) and sample.grad is None


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.zeros(2, 1, HIDDEN, dtype=X.dtype),), {}, r"argument 0 = \[2, 1, 64\]"),
        ((X.float(),), {}, "torch.float32"),
        ((X.clone().requires_grad_(),), {}, "requires_grad"),
        ((), {}, r"called with argument 0 = None, but captured with \[96"),
        ((X,), {"rotary_pos_emb": torch.zeros(1)}, "rotary_pos_emb"),
        ((None,), {}, "argument 0 = None"),
    ],
)
def test_a_call_that_differs_is_refused(rerun: None, args: Any, kwargs: Any, message: str) -> None:
    model = qs.make_graphed_callables(built("TransformerLayer", "current"), (X,), recipe="current")
    with qs.autocast(recipe="current"), pytest.raises(ConfigurationError, match=message):
        model(*args, **kwargs)


def test_constants_and_hints(rerun: None) -> None:
    def scaled(x: Tensor, scale: float, is_first_microbatch: Any = None) -> Tensor:
        return x * scale

    kwargs = {"scale": 2, "is_first_microbatch": True}
    graphed = qs.make_graphed_callables(
        scaled, (torch.ones(2, requires_grad=True),), sample_kwargs=kwargs, enabled=False
    )
    assert graphed(torch.ones(2), scale=2, is_first_microbatch=False).tolist() == [2.0, 2.0]
    with pytest.raises(ConfigurationError, match="scale = 3, but captured with 2"):
        graphed(torch.ones(2), scale=3)


def test_a_call_elsewhere_is_refused(rerun: None) -> None:
    model = qs.make_graphed_callables(built("Linear", "current"), (X,), recipe="current")
    for around in (qs.autocast(enabled=False), qs.autocast(recipe="current", strict=True)):
        with around, pytest.raises(ConfigurationError, match="captured under current"):
            model(X)
    with pytest.raises(ConfigurationError, match="no autocast"):
        model(X)


def test_without_gradients_and_in_eval_mode_it_runs_eagerly(rerun: None) -> None:
    model = qs.make_graphed_callables(built("Linear", "current"), (X,), recipe="current")
    small = torch.ones(3, HIDDEN, dtype=X.dtype)
    with torch.no_grad():
        assert model(small).shape == (3, HIDDEN)
    assert model.eval()(small).shape == (3, HIDDEN)
    with qs.autocast(recipe="current"), pytest.raises(ConfigurationError):
        model.train()(small)


def test_reset_and_copies(rerun: None) -> None:
    model = built("LayerNormMLP", "current")
    plain = model.forward
    qs.make_graphed_callables(model, (X,), recipe="current")
    with pytest.raises(ConfigurationError, match=r"is captured, or has another forward; call its forward\.reset"):
        qs.make_graphed_callables(model, (X,), recipe="current")
    twin = copy.deepcopy(model)
    assert twin.forward.__self__ is twin
    with torch.no_grad():
        for param in model.parameters():
            if not isinstance(param, qs.QuantizedTensor):
                param.zero_()
    assert twin(X + 1).any() and not model.eval()(X + 1).any()
    assert model.state_dict().keys() == twin.state_dict().keys()
    model.forward.reset()
    assert model.forward == plain
    qs.make_graphed_callables(twin.train(), (X,), recipe="current")


def changes() -> dict[str, Callable[[nn.Module], Any]]:
    def replaced(model: nn.Module) -> None:
        model.layer_norm_weight = nn.Parameter(model.layer_norm_weight.detach().clone())

    def data(model: nn.Module) -> None:
        model.layer_norm_weight.data = model.layer_norm_weight.detach().clone()

    def components(model: nn.Module) -> None:
        model.fc2_weight.data = model.fc2_weight.detach().clone()

    return {
        "layer_norm_weight": replaced,
        "layer_norm_weight's data": data,
        "fc2_weight": components,
        "fc1_gate_weight": lambda model: model.fc1_gate_weight.requires_grad_(False),
        "input_amax_history": lambda model: model.register_buffer(
            next(name for name, _ in model.named_buffers()), torch.zeros(4)
        ),
    }


@pytest.mark.parametrize("name", changes())
def test_what_is_replaced_is_named(rerun: None, name: str) -> None:
    model = built("LayerNormMLP", "delayed")
    qs.make_graphed_callables(model, (X,), recipe=RECIPES["delayed"])
    changes()[name](model)
    with qs.autocast(recipe=RECIPES["delayed"]), pytest.raises(ConfigurationError, match="was replaced") as error:
        model(X)
    assert name.split("'")[0] in str(error.value)


def test_a_new_key_is_named_where_words_are_drawn(rerun: None) -> None:
    model = built("Linear", "nvfp4")
    qs.make_graphed_callables(model, (X,), recipe="nvfp4")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    with qs.autocast(recipe="nvfp4"):
        model(X)
    state["weight_key"] += 1
    model.load_state_dict(state)
    with qs.autocast(recipe="nvfp4"), pytest.raises(ConfigurationError, match="weight was replaced"):
        model(X)


def test_a_backward_whose_activations_are_gone_is_refused(rerun: None) -> None:
    parts = tuple(built(name, "current") for name in ("Linear", "LayerNormMLP"))
    x = X.clone().requires_grad_()
    qs.make_graphed_callables(parts, [(x,), (x,)], recipe="current")

    def call(*which: int) -> Tensor:
        y = x
        with qs.autocast(recipe="current"):
            for index in which:
                y = parts[index](y)
        return y.float().sum()

    first, second = call(0, 1), call(0, 1)
    second.backward(retain_graph=True)
    for gone in (first, second):
        with pytest.raises(UnsupportedOperationError, match="overwritten"):
            gone.backward()
    later, earlier = call(1), call(0)
    earlier.backward()
    with pytest.raises(UnsupportedOperationError, match="overwritten"):
        later.backward()
    earlier, later = call(0), call(1)
    later.backward()
    earlier.backward()


def test_a_changed_output_is_refused(rerun: None) -> None:
    model = qs.make_graphed_callables(built("Linear", "current"), (X,), recipe="current")
    with qs.autocast(recipe="current"):
        y = model(X)
    y.add_(1)
    with pytest.raises(UnsupportedOperationError, match="changed in place"):
        y.float().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_around_is_refused(rerun: None, reentrant: bool) -> None:
    model = qs.make_graphed_callables(built("Linear", "current"), (X,), recipe="current")
    x = X.clone().requires_grad_()
    with pytest.raises((UnsupportedOperationError, ConfigurationError)), qs.autocast(recipe="current"):
        qs.checkpoint(model, x.detach() if not reentrant else x, use_reentrant=reentrant).float().sum().backward()


def test_hooks_of_the_module_itself_run(rerun: None) -> None:
    model, seen = built("Linear", "current"), []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    qs.make_graphed_callables(model, (X,), recipe="current")
    assert seen == []
    with qs.autocast(recipe="current"):
        model(X).float().sum().backward()
    assert seen == ["forward"]


# What is refused before ----------------------------------------------------------------------------------------------


def hooked(model: nn.Module) -> nn.Module:
    model[0].register_forward_hook(lambda *_: None)
    return model


def watched(model: nn.Module) -> nn.Module:
    model[0].bias.register_hook(lambda grad: grad)
    return model


def compiled(model: nn.Module) -> nn.Module:
    model[0].compile()
    return model


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no CUDA": (lambda: (linear(), (X,)), {}, "tensors are on cpu, but a CUDA graph is of one GPU"),
    "hooks inside": (lambda: (hooked(linear()), (X,)), {}, r"Sequential\.0 has hooks"),
    "compiled inside": (lambda: (compiled(linear()), (X,)), {}, r"Sequential\.0 has hooks or was compiled"),
    "hook of a parameter": (lambda: (watched(linear()), (X,)), {}, r"Sequential\.0\.bias has a hook"),
    "a recipe for a flag": (lambda: (linear(), (X,)), {"enabled": "current"}, "must be True or False"),
    "one tensor": (lambda: (linear(), X), {}, r"give one tuple of sample_args"),
    "too few": (lambda: ((linear(), linear()), ((X,),)), {}, "give one tuple of sample_args"),
    "no callable": (lambda: (3, (X,)), {}, "is no module or function"),
    "own forward": (lambda: (patched(linear()), (X,)), {}, "or has another forward"),
}


def linear() -> nn.Module:
    return nn.Sequential(qs.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu"))


def patched(model: nn.Module) -> nn.Module:
    model.forward = lambda x: x
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, options, message = REFUSED[name]
    with pytest.raises(ConfigurationError, match=message) as error:
        qs.make_graphed_callables(*make(), **options)
    assert "\n" not in str(error.value)


def test_refused_while_it_is_captured(rerun: None) -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return object()

    outside = nn.Parameter(torch.ones(2))
    x = torch.ones(2)
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (Odd(2, 2), (x,), {}, "Odd: a object cannot be in a graph"),
        (lambda x: x * outside, (x,), {}, "pass each tensor that requires gradients"),
        (nn.Bilinear(2, 2, 2), (x, object()), {}, "Bilinear: a object cannot be in a graph"),
        (nn.Linear(2, 2), (x,), {"cache": object()}, "Linear: a object cannot be in a graph"),
    ]
    for subject, sample, kwargs, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            qs.make_graphed_callables(subject, sample, sample_kwargs=kwargs, enabled=False)


def test_unused_parameters_are_allowed_on_request(rerun: None) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    with pytest.raises(RuntimeError, match="appears to not have been used"):
        qs.make_graphed_callables(Half(), (torch.ones(2),), enabled=False)
    model = qs.make_graphed_callables(Half(), (torch.ones(2),), enabled=False, allow_unused_input=True)
    model(torch.ones(2)).sum().backward()
    assert model.unused.weight.grad is None and model.used.weight.grad is not None


def test_torch_autocast_must_not_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    with pytest.raises(ConfigurationError, match="cache_enabled=False"):
        qs.make_graphed_callables(linear(), (X,))


def sharded_refusals(_: object) -> list[str]:
    """What is said of a module that FSDP2 shards, of a layer in it, of a gathered one and of DDP."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    whole, inner, gathered = (nn.Sequential(linear()) for _ in range(3))
    for model in (whole, inner, gathered):
        fully_shard(model)
    gathered.unshard()
    said = []
    replica = DistributedDataParallel(linear())
    for subject in (whole, inner[0], gathered[0], replica):
        try:
            qs.make_graphed_callables(subject, (X,))
        except (UnsupportedOperationError, ConfigurationError) as error:
            said.append(str(error))
    return said


@pytest.mark.distributed
def test_sharded_parameters_are_refused() -> None:
    """1 rank."""
    (said,) = run_ranks(1, sharded_refusals, None)
    assert len(said) == 4 and all("parameters that FSDP2 shards" in text for text in said[:3])
    assert "quantshard.StepGraph" in said[0] and "DistributedDataParallel" in said[3]


def test_the_page(rerun: None) -> None:
    """The snippet of docs/performance.md trains."""
    (snippet,) = snippets("docs/performance.md#layers-make_graphed_callables")
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["loss"].isfinite() and names["step"] == 5 and len(names["optimizer"].state) == 12
    assert all(isinstance(layer.forward, ModuleGraph) for layer in names["layers"])


# Several ranks -------------------------------------------------------------------------------------------------------


def layer_of(recipe: str, mesh: Any, device: str) -> nn.Module:
    torch.manual_seed(5)
    with qs.quantized_model_init(recipe=RECIPES[recipe]):
        return qs.TransformerLayer(
            HIDDEN, 160, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", activation="swiglu",
            params_dtype=torch.bfloat16, device=device, set_parallel_mode=mesh is not None, tp_mesh=mesh,
            sequence_parallel=mesh is not None,
        )  # fmt: skip


def trained_on_ranks(recipe: str, way: str, captured: bool, device: str = "cpu") -> dict[str, str]:
    """Bits after three steps on data of each rank's own, or of rows of its own under sequence parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    tp = way == "tensor parallel"
    layer = layer_of(recipe, init_device_mesh(device, (2,), mesh_dim_names=("tp",)) if tp else None, device)
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(callables, "GraphRecorder", RerunRecorder)
            patch.setattr(callables.recorders, "graph_device", lambda *_: torch.device("cpu"))
        x = torch.randn(16, 1, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank())).to(device).bfloat16()
        if captured:
            qs.make_graphed_callables(layer, (x,), recipe=RECIPES[recipe])
        model = layer if tp else DistributedDataParallel(layer, init_sync=False)
        optimizer = FusedAdam(layer.named_parameters(), lr=1e-2)
        for number in range(3):
            with qs.autocast(recipe=RECIPES[recipe]):
                y = model(x * (1 + number))
            y.float().sin().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return bits(layer, optimizer)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("recipe", "way"),
    exhaustive(
        itertools.product(["delayed", "nvfp4"], ["DDP", "tensor parallel"]),
        [("delayed", "tensor parallel"), ("nvfp4", "DDP")],
    ),
)
def test_replicas_and_tensor_parallelism(recipe: str, way: str) -> None:
    """2 ranks."""
    eager, captured = (run_ranks(2, trained_on_ranks, recipe, way, captured) for captured in (False, True))
    assert eager == captured and eager[0] == eager[1]


# TransformerEngine's names -------------------------------------------------------------------------------------------


def test_transformer_engines_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("quantshard.modules.make_graphed_callables", lambda *args, **kwargs: seen.update(kwargs))
    te.make_graphed_callables(linear(), (X,), fp8_enabled=True, fp8_recipe="mxfp8", fp8_weight_caching=True)
    assert seen["enabled"] is True and seen["recipe"] == "mxfp8"
    te.make_graphed_callables(linear(), (X,), _order=None, retain_graph_in_backward=False)
    assert seen["enabled"] is False and seen["recipe"] is None
    te.make_graphed_callables(linear(), (X,), enabled=True, recipe="block")
    assert seen["enabled"] is True and seen["recipe"] == "block"
    with pytest.raises(ConfigurationError, match="_order"):
        te.make_graphed_callables(linear(), (X,), _order=[1, -1])
    with pytest.raises(ConfigurationError, match="old or its new name"):
        te.make_graphed_callables(linear(), (X,), recipe="block", fp8_recipe="block")


def test_the_device_is_asked_of_samples_too() -> None:
    with pytest.raises(ConfigurationError, match="no device"):
        qs.make_graphed_callables(lambda: None, ())


@pytest.mark.parametrize("way", ["cat", "add"])
def test_a_leaf_further_up_accumulates(rerun: None, way: str) -> None:
    """As a soft prompt or positions in front of the first captured layer, over two micro-batches."""
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        layer = built("Linear", "current")
        if captured:
            qs.make_graphed_callables(layer, (torch.zeros_like(X, requires_grad=True),), recipe=RECIPES["current"])
        leaf = torch.zeros_like(X if way == "add" else X[:1]).requires_grad_()
        for step in range(2):
            x = torch.full_like(X if way == "add" else X[1:], step + 1.0)
            with qs.autocast(recipe=RECIPES["current"]):
                y = layer(x + leaf if way == "add" else torch.cat([leaf, x]))
            (y.float() * (step + 1)).square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


# What is written over, replaced or lost is told ----------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
def test_what_autograd_saved_of_a_result_is_written_over(rerun: None, trained: bool) -> None:
    """A head keeps a captured layer's result for its own backward, which the next replay changes."""
    layer, head = built("Linear", "current").requires_grad_(trained), nn.Linear(HIDDEN, 2).to(X.dtype)
    qs.make_graphed_callables(layer, (X,), recipe="current")
    with qs.autocast(recipe="current"):
        first, second = (head(layer(X + number)).float().sum() for number in (1, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()
    second.backward()
    assert head.weight.grad.isfinite().all()


def test_a_parameter_that_is_returned_counts_no_change(rerun: None) -> None:
    """Optimizers take over what others write, which they know by it."""

    class Tied(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.weight.T

    module = Tied(3, 3)
    qs.make_graphed_callables(module, (torch.ones(2, 3),), enabled=False)
    before = module.weight._version
    y, weight = module(torch.ones(2, 3))
    assert module.weight._version == before and torch.equal(weight, module.weight.T)
    (y.sum() + weight.sum()).backward()
    assert torch.equal(module.weight.grad, torch.full((3, 3), 3.0))


def test_callables_of_two_calls_in_one_pool(rerun: None) -> None:
    """Either may lie in the other's activations."""
    first, second, apart = (built("Linear", "current") for _ in range(3))
    for layer, pool in ((first, (7, 7)), (second, (7, 7)), (apart, (8, 8))):
        qs.make_graphed_callables(layer, (X,), recipe="current", pool=pool)

    def call(layer: nn.Module) -> Tensor:
        with qs.autocast(recipe="current"):
            y: Tensor = layer(X).float().sum()
        return y

    y = call(first)
    call(apart).backward()
    y.backward()
    for early, late in ((first, second), (second, first)):
        lost, kept = call(early), call(late)
        with pytest.raises(UnsupportedOperationError, match="overwritten"):
            lost.backward()
        kept.backward()


@pytest.mark.parametrize("change", ["module", "hook"])
def test_what_is_put_inside_after_the_capture_is_named(rerun: None, change: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    qs.make_graphed_callables(model, (torch.ones(2),), enabled=False)
    model.register_forward_hook(lambda *_: None)  # its own runs
    model(torch.ones(2))
    if change == "hook":
        model[1].register_forward_hook(lambda *_: None)
    else:
        model[1] = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="the module was" if change == "module" else "1 was replaced"):
        model(torch.ones(2))


def test_an_empty_constant_is_not_a_missing_one(rerun: None) -> None:
    def total(x: Tensor, parts: Any = (1.0,)) -> Tensor:
        return x * sum(parts)

    x = torch.ones(2, requires_grad=True)
    graphed = qs.make_graphed_callables(total, (x,), sample_kwargs={"parts": ()}, enabled=False)
    assert not graphed(x, parts=()).any()
    with pytest.raises(ConfigurationError, match=r"argument parts = None, but captured with \(\);"):
        graphed(x)


@pytest.mark.parametrize("runs", [0, 1, 2, 4])
def test_a_failed_capture_leaves_counts_of_draws_where_they_were(
    rerun: None, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """It fails in the first run, in those that a graph's counts are for, and in the capture."""

    def moved(model: nn.Module) -> None:
        for state in (
            each.quantized_storage.state for each in model.parameters() if hasattr(each, "quantized_storage")
        ):
            state["draws"] = state["draws"].clone()

    monkeypatch.setattr(recorders, "capturable_", moved)
    module = Failing(built("Linear", "nvfp4"), runs)
    state = module.inner.weight.quantized_storage.state
    held, before = state["draws"], bits(module)
    with pytest.raises(ValueError, match="enough"):
        qs.make_graphed_callables(module, (X,), recipe="nvfp4")
    assert state["draws"] is held and bits(module) == before
    module.runs = 9
    qs.make_graphed_callables(module, (X,), recipe="nvfp4")
    assert state["draws"] is not held and bits(module) == before


def test_a_flag_for_each_callable(rerun: None) -> None:
    parts = tuple(built("Linear", "current") for _ in range(2))
    expected = [copy.deepcopy(part) for part in parts]
    te.make_graphed_callables(parts, ((X,), (X,)), enabled=(False, True), recipe="current")
    x = torch.randn(X.shape, generator=torch.Generator().manual_seed(1)).to(X.dtype)
    for modules in (parts, expected):
        y = modules[0](x)
        with qs.autocast(recipe="current"):
            z = modules[1](x)
        assert not torch.equal(y, z)
        found = (y.detach(), z.detach()) if modules is parts else found  # noqa: F821
    assert torch.equal(found[0], y) and torch.equal(found[1], z)
    with qs.autocast(recipe="current"), pytest.raises(ConfigurationError, match="captured under"):
        parts[0](x)


@pytest.mark.parametrize("enabled", [(True,), "current", (True, "current"), 1])
def test_a_flag_that_is_none_is_refused(enabled: Any) -> None:
    for call in (qs.make_graphed_callables, te.make_graphed_callables):
        with pytest.raises(ConfigurationError, match="enabled"):
            call((linear(), linear()), ((X,), (X,)), enabled=enabled)


def test_transformer_engines_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the signature that has old names and new."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr("quantshard.modules.make_graphed_callables", lambda *args, **kwargs: seen.update(kwargs))
    te.make_graphed_callables(linear(), (X,), 3, False, None, True, None, "mxfp8", None, True)
    assert seen["enabled"] is True and seen["recipe"] == "mxfp8" and "pool" not in seen
    new = (True, None, "block", None, True, None, None, (1, 2))
    te.make_graphed_callables(linear(), (X,), 3, False, None, *[None] * 5, *new)
    assert seen["enabled"] is True and seen["recipe"] == "block" and seen["pool"] == (1, 2)
    with pytest.raises(ConfigurationError, match="fp8_calibrating"):
        te.make_graphed_callables(linear(), (X,), 3, False, None, False, True)
