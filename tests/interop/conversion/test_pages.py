"""The chapters of docs/existing-models.md: their code runs, and their bytes are those of the tensors."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantshard as qs
from quantshard.optimizers import FusedAdam
from quantshard.recipe import Gemm, resolve
from quantshard.tensor import components
from tests.interop.frameworks.perceptron import FEATURES, Perceptron
from tests.pages import section, snippets

TORCHAO, BF16 = "docs/existing-models.md#from-torchao-float8", "docs/existing-models.md#from-bf16"


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, FEATURES, generator=generator), torch.arange(8) % 5)] * count


# From torchao --------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module) -> float:
    x, y = batches(1)[0]
    return F.cross_entropy(model(x.bfloat16()).float(), y).item()


def test_torchaos_script_runs_with_its_calls_exchanged() -> None:
    names: dict[str, Any] = {"model": Perceptron(), "batches": batches(5)}
    before = loss_of(Perceptron().bfloat16())
    exec(snippets(TORCHAO)[0], names)
    assert loss_of(names["model"]) < before
    assert [layer.recipe for layer in names["report"].converted] == ["current"] * 4


def test_the_same_layers_are_converted_as_by_torchao() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's imports
        float8 = pytest.importorskip("torchao.float8")
    names: dict[str, Any] = {"model": Perceptron(), "batches": []}
    exec(snippets(TORCHAO)[0], names)
    theirs = Perceptron().bfloat16()
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(theirs, module_filter_fn=names["wide"], config=config)
    swapped = [name for name, module in theirs.named_modules() if type(module).__name__ == "Float8Linear"]
    assert swapped == [layer.name for layer in names["report"].converted]
    assert loss_of(names["model"]) == pytest.approx(loss_of(theirs), abs=0.05)


def weight_gradient(recipe: Any) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    qs.convert(model, recipe)
    generator = torch.Generator().manual_seed(2)
    model(torch.randn(48, 64, generator=generator).bfloat16()).backward(
        torch.randn(48, 32, generator=generator).bfloat16()
    )
    return model[0].weight.grad


def test_a_recipe_whose_weight_gradient_is_in_high_precision() -> None:
    [name] = re.findall(r'recipe="(.*:bf16)"', section(TORCHAO))
    assert all(gemm is not Gemm.WGRAD for _, gemm in resolve(name).table)
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(48, size, generator=generator).bfloat16() for size in (64, 32))
    exact = dy.float().T @ x.float()
    ours, rowwise = (weight_gradient(recipe).float() - exact for recipe in (name, "rowwise"))
    assert ours.abs().max() < 0.05 * rowwise.abs().max() or ours.norm() < 0.2 * rowwise.norm()


# From BF16 -----------------------------------------------------------------------------------------------------------


def test_each_step_from_bf16_trains() -> None:
    """The masters of a converted model begin with the values from before."""
    names: dict[str, Any] = {"model": Perceptron()}
    before = torch.empty(0)
    for step, snippet in enumerate(snippets(BF16)):
        exec(snippet, names)
        weight, optimizer = names["model"].layers[0][0].weight, names["optimizer"]
        if step == 1:
            assert torch.equal(optimizer.state[weight]["master_param"], before)
        losses = []
        for x, y in batches(4):
            loss = F.cross_entropy(names["model"](x.bfloat16()).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        before = weight.detach().float() if step == 0 else before
    assert step == 2 and len(names["report"].converted) == 4


OPTIONS: dict[str, Any] = {
    "0": None,
    "1": {},
    "2": {},
    "3": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "4": {"preset": "lean8"},
    "5": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8, "master_weights": False},
}


def bytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values() if value.numel() > 8)


def measured(step: str) -> list[float]:
    """Bytes of weight, master, moments and gradient, by the tensors that there are."""
    model = nn.Sequential(nn.Linear(1024, 256, bias=False)).bfloat16()
    if step >= "2":
        qs.convert(model, "mxfp8")
    weight, count = model[0].weight, 1024 * 256
    options = OPTIONS[step]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters()) if options is None else FusedAdam(model.named_parameters(), **options)
    )
    model(torch.randn(4, 1024).bfloat16()).sum().backward()
    gradient = weight.grad.numel() * weight.grad.element_size()
    optimizer.step()
    state = {key: value for key, value in optimizer.state[weight].items() if isinstance(value, Tensor)}
    parts = {key: value for key, value in state.items() if key.startswith("master")}
    moments = {key: value for key, value in state.items() if key.startswith("exp_avg")}
    stored = components.state_of(weight) if step >= "2" else {"": weight}
    return [found / count for found in (bytes_of(stored), bytes_of(parts), bytes_of(moments), gradient)]


@pytest.mark.parametrize("step", OPTIONS)
def test_bytes_a_parameter(step: str) -> None:
    (row,) = re.findall(rf"^\| {step}\. .*$", section(BF16), re.M)
    *parts, total = (float(cell) for cell in row.strip("| ").split("|")[1:])
    found = measured(step)
    assert [round(part, 1) for part in found] == parts
    assert round(sum(found), 1) == pytest.approx(total, abs=0.051)
