"""Warnings shown once: a quantized weight trains outside of autocast, a wide input, a weight quantized each time."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard import errors
from quantshard.compat.transformer_engine.pytorch import quantization


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


def test_quantized_weights_that_train_outside_are_told() -> None:
    model = quantized()
    (text,) = said(lambda: [model(TOKENS), model(TOKENS), quantized()(TOKENS)])
    assert text.startswith("Linear.weight: its GEMMs run in high precision, on dequantized values")


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
    assert text.startswith("blocks.0.1.weight: its GEMMs run")


def test_a_compiled_layer_tells_both() -> None:
    torch._dynamo.reset()
    layer = quantized().blocks[0][1].to(torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.randn(2, 32)).sum().backward()
    texts = sorted(str(each.message).split(":")[0] for each in caught)
    assert texts == ["Linear", "Linear.weight"]


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


def test_weights_that_an_autocast_quantizes_each_time_are_told_once() -> None:
    layers = [qs.Linear(32, 32) for _ in range(2)]
    x = torch.zeros(32, 32)
    with qs.autocast(recipe="bf16"):
        layers[0](x)
    layers[0].eval()
    with qs.autocast(recipe="mxfp8"), torch.no_grad():
        layers[0](x)
    layers[0].train()
    with pytest.warns(UserWarning, match=r"Linear.weight: .*requantized.*quantized_model_init") as told:
        for layer in layers:
            with qs.autocast(recipe="mxfp8"):
                layer(x)
    assert len(told) == 1
    errors._warned_topics.clear()
    importlib.reload(quantization)  # where layers keep weights in high precision, as TransformerEngine's
    with warnings.catch_warnings(record=True) as told, qs.autocast(recipe="mxfp8"):
        warnings.simplefilter("always")
        layers[0](x)
    assert not told
