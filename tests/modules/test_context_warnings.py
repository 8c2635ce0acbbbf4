"""What is said once: a context reaches no layer, a quantized weight trains outside of one, an input is wide."""

from __future__ import annotations

import contextlib
import importlib
import warnings
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard import errors
from quantshard.compat.transformer_engine.pytorch import quantization
from quantshard.modules.contexts import context_warnings


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process."""
    monkeypatch.setattr(errors, "_told", set())
    monkeypatch.setattr(context_warnings, "_seen_codes", set())
    yield


class Model(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), layer(32, 32)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


TOKENS = torch.arange(6)


def said(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(each.filename == __file__ for each in caught), "they point at the user's line"
    return [str(each.message) for each in caught]


def plain_linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs)


def build(layer: Callable[[int, int], nn.Module]) -> Model:
    with qs.quantized_model_init(recipe="mxfp8"):
        return Model(layer)


def quantized(dtype: torch.dtype = torch.float32) -> Model:
    return build(qs.Linear).to(dtype)


def test_a_model_of_others_built_in_the_context() -> None:
    (text,) = said(lambda: [build(plain_linear), build(plain_linear)])
    assert text.startswith("quantized_model_init(recipe='mxfp8'): no module of quantshard was built inside")
    assert "blocks.0.1, a torch.nn.Linear with a parameter [32, 32]" in text and "quantshard.convert(model" in text


def test_contexts_that_meant_no_layer_say_nothing() -> None:
    def run() -> None:
        quantized()
        with qs.quantized_model_init(recipe="mxfp8"):
            nn.Embedding(3, 4), nn.LayerNorm(4)
        with qs.quantized_model_init(enabled=False, recipe="mxfp8"), qs.quantized_model_init(recipe="bf16"):
            plain_linear(4, 4)
        with pytest.raises(KeyError), qs.quantized_model_init(recipe="mxfp8"):
            plain_linear(4, 4)
            raise KeyError

    assert said(run) == []


def ours_and_others(layer: Callable[[int, int], nn.Module]) -> nn.Module:
    with qs.quantized_model_init(recipe="mxfp8"):
        return nn.ModuleList([qs.Linear(32, 32), layer(32, 32)])


def test_a_context_with_one_of_ours_says_nothing() -> None:
    assert said(lambda: ours_and_others(plain_linear)) == []


def run_in_autocast(model: nn.Module) -> None:
    for _ in range(3):
        with qs.autocast(recipe="block"):
            model(TOKENS)


@qs.autocast(recipe="block")
def decorated(model: nn.Module) -> None:
    model(TOKENS)


class Loop:
    """As frameworks have one."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.batches = model, 2

    def step(self) -> None:
        with qs.autocast(recipe="block"):
            self.model(TOKENS)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (run_in_autocast, "model.blocks.0.1"),
        (lambda model: decorated(model), "model.blocks.0.1"),
        (lambda model: Loop(model).step(), "self.model.blocks.0.1"),
    ],
)
def test_a_model_of_others_run_in_the_context(run: Callable[[nn.Module], None], name: str) -> None:
    model = Model(plain_linear)
    (text,) = said(lambda: [run(model), run(model)])
    assert text.startswith(
        f"autocast(recipe='block'): no layer of quantshard ran inside, so nothing was quantized; {name}"
    )


def test_autocasts_that_meant_no_layer_say_nothing() -> None:
    errors.silence(context_warnings.PLAIN_WEIGHT)
    model, loss = Model(qs.Linear), nn.MSELoss()

    def run() -> None:
        x = model(TOKENS)
        with qs.autocast(recipe="mxfp8"):
            loss(x, torch.zeros_like(x))
        run_in_autocast(model)
        with qs.autocast(enabled=False):
            plain_linear(4, 4)(torch.zeros(4))

    assert said(run) == []


def test_quantized_weights_that_train_outside_are_told_with_the_layers_name() -> None:
    model = quantized()
    (text,) = said(lambda: [model(TOKENS), model(TOKENS), quantized()(TOKENS)])
    assert text.startswith("blocks.0.1.weight: in training, its GEMMs run in high precision, on dequantized values")


def test_what_is_meant_so_is_not_told() -> None:
    model = quantized()

    def run() -> None:
        with torch.no_grad():
            model(TOKENS)
        with qs.autocast(enabled=False):
            model(TOKENS)
        with qs.autocast(recipe="mxfp8"):
            out = qs.checkpoint(model, TOKENS)
        out.sum().backward()  # the second forward runs outside
        model.eval()(TOKENS)
        with qs.quantized_model_init(enabled=False):
            Model(qs.Linear)(TOKENS)

    assert said(run) == []


def test_a_part_of_a_converted_model_enters_its_recipe_by_itself() -> None:
    """Called past the model's forward, with the losses of that."""
    model = Model(plain_linear)
    qs.convert(model, "block")
    assert said(lambda: model.blocks[0](torch.ones(3, 32))) == []
    x = torch.randn(5, 32)
    with qs.autocast(recipe="block"):
        wanted = model.blocks[0](x)
    assert torch.equal(model.blocks[0](x), wanted)
    with qs.autocast(enabled=False):
        assert not torch.equal(model.blocks[0](x), wanted)
    other = Model(plain_linear)
    qs.convert(other, "block", autocast=False)
    (text,) = said(lambda: other(TOKENS))
    assert text.startswith("blocks.0.1.weight: in training")


def test_a_compiled_layer_tells_both() -> None:
    torch._dynamo.reset()
    layer = quantized().blocks[0][1].to(torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.randn(2, 32)).sum().backward()
    texts = sorted(str(each.message).split(":")[0] for each in caught)
    assert texts == ["Linear", "Linear.weight"]


def test_contexts_leave_compiled_functions_as_they_are() -> None:
    """One graph, compiled once, with and without contexts that were told of."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = Model(plain_linear)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    said(lambda: run_in_autocast(compiled))
    compiled(TOKENS)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_input_is_told(dtype: torch.dtype) -> None:
    model = quantized(dtype)
    layer, x = model.blocks[1][1], torch.randn(3, 32)

    def run() -> None:
        with qs.autocast(recipe="mxfp8"):
            assert layer(x).dtype == torch.float32
            assert layer(x).dtype == torch.float32

    (text,) = said(run)
    assert text.startswith("Linear: an input of float32 in a layer of ") and f"x.to({dtype})" in text


def test_inputs_that_fit_or_are_cast_are_not_told() -> None:
    def run() -> None:
        with qs.autocast(recipe="mxfp8"):
            quantized(torch.bfloat16)(TOKENS)
            quantized().blocks[0](torch.zeros(2, 32, dtype=torch.bfloat16))
            quantized(torch.bfloat16).to(torch.float32)(TOKENS)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = quantized(torch.bfloat16).blocks[0](torch.zeros(2, 32))
        assert found.dtype == torch.bfloat16

    assert said(run) == []


def test_variables_that_were_looked_at_are_let_go() -> None:
    """They would last as long as the function that trains."""
    kept = []

    def train(model: nn.Module, *, inside: bool) -> None:  # without an assert: pytest's look at locals()
        x = torch.zeros(3)
        alive = weakref.ref(x)
        with qs.autocast(recipe="block") if inside else contextlib.nullcontext():
            model(TOKENS)
        kept.append(x.numel())
        del x
        kept.append(alive())

    for make, inside in ((lambda: Model(plain_linear), True), (quantized, False)):
        assert len(said(lambda make=make, inside=inside: train(make(), inside=inside))) == 1
    assert kept == [3, None, 3, None]


def test_the_forward_has_no_hooks() -> None:
    """Which would slow each module, and keep torch.compile from taking a model as one graph."""
    found = torch.nn.modules.module
    with qs.autocast(recipe="mxfp8"):
        assert not found._global_forward_pre_hooks and not found._global_forward_hooks
    with qs.quantized_model_init(recipe="mxfp8"):
        assert found._global_parameter_registration_hooks and found._global_module_registration_hooks
    assert not found._global_parameter_registration_hooks and not found._global_module_registration_hooks


def test_what_a_function_has_by_locals_stays_as_it_is() -> None:
    """Many keep their hyperparameters so."""

    def train(lr: float) -> dict[str, object]:
        hyperparameters = locals()
        model = build(plain_linear)
        with qs.autocast(recipe="mxfp8"):
            model(TOKENS)
        return hyperparameters

    def train_by_vars(lr: float) -> dict[str, object]:
        hyperparameters = vars()
        model = build(plain_linear)
        with qs.autocast(recipe="mxfp8"):
            model(TOKENS)
        return hyperparameters

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(0.1) == {"lr": 0.1}
        assert train_by_vars(0.1)["lr"] == 0.1


def test_a_plain_parameter_in_the_place_of_a_quantized_weight_is_told_once() -> None:
    with qs.quantized_model_init(recipe="mxfp8"):
        layers = [qs.Linear(32, 32) for _ in range(2)]
    with pytest.warns(
        UserWarning, match=r"Linear.weight was mxfp8_32x32 and is now .*; .*weight.quantize_\(values\)"
    ) as told:
        for layer in layers:
            layer.weight = nn.Parameter(torch.zeros(32, 32))
    assert len(told) == 1


def test_weights_that_an_autocast_quantizes_each_time_are_told_once() -> None:
    layers = [qs.Linear(32, 32) for _ in range(2)]
    x = torch.zeros(32, 32)
    with qs.autocast(recipe="bf16"):
        layers[0](x)
    layers[0].eval()
    with qs.autocast(recipe="mxfp8"), torch.no_grad():
        layers[0](x)
    layers[0].train()
    with pytest.warns(UserWarning, match=r"Linear.weight: .*quantized anew.*quantized_model_init") as told:
        for layer in layers:
            with qs.autocast(recipe="mxfp8"):
                layer(x)
    assert len(told) == 1
    errors._told.clear()
    importlib.reload(quantization)  # where layers keep weights in high precision, as TransformerEngine's
    with warnings.catch_warnings(record=True) as told, qs.autocast(recipe="mxfp8"):
        warnings.simplefilter("always")
        layers[0](x)
    assert not told
