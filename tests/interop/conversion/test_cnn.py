"""A plain network of convolutions and linear layers, converted: what is left, trained, saved, loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantshard as qs
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components

RECIPES = ("mxfp8", "current", "nvfp4")


class Convolutions(nn.Module):
    """Images [batch, 3, 16, 16] -> logits [batch, 10]; linear layers of sizes that no block divides."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4),
            nn.Conv2d(8, 13, 3, padding=1), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.squeeze = nn.Linear(13 * 16, 7)
        self.widen = nn.Linear(7, 50, bias=False)
        self.single = nn.Linear(50, 1)
        self.classifier = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.widen(F.relu(self.squeeze(self.features(images)))))
        return self.classifier(x) * torch.sigmoid(self.single(x))


def converted(recipe: str, seed: int = 0) -> tuple[Convolutions, qs.ConversionReport]:
    torch.manual_seed(seed)
    model = Convolutions()
    return model, qs.convert(model, recipe)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(12, 3, 16, 16, generator=generator), torch.arange(12) % 10
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_convolutions_stay_and_linear_layers_of_any_size_are_converted(recipe: str) -> None:
    model, report = converted(recipe)
    assert [layer.name for layer in report.converted] == ["squeeze", "widen", "single"]
    assert [layer.shape for layer in report.converted] == [(7, 208), (50, 7), (1, 50)]
    assert [(layer.name, layer.reason.split(";")[0]) for layer in report.left] == [("classifier", "the head")]
    assert {type(module) for module in model.features} >= {nn.Conv2d, nn.BatchNorm2d}


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_is_saved_and_goes_on(recipe: str, tmp_path: Path) -> None:
    model, _ = converted(recipe)
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
    weights = {name: p for name, p in model.named_parameters() if components.quantized_local(p) is not None}
    before = {name: {k: v.clone() for k, v in components.state_of(p).items()} for name, p in weights.items()}
    losses = trained(model, optimizer, 5)
    assert losses[-1] < losses[0]
    for name, parameter in weights.items():
        now = components.state_of(parameter)
        assert any(not torch.equal(now[key], value) for key, value in before[name].items()), name
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert all(id(parameter) in held for parameter in weights.values()) and len(weights) == 3
    qs.checkpoints.save(tmp_path / "step-5", model, optimizer)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    on = trained(model, optimizer, 3)
    again, _ = converted(recipe, seed=9)
    other = FusedAdam(again.named_parameters(), lr=1e-2)
    qs.checkpoints.load(tmp_path / "step-5", again, other)
    assert all(torch.equal(saved[key], value) for key, value in again.state_dict().items())
    assert trained(again, other, 3) == on


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_exported_by_reverting_and_by_values(recipe: str) -> None:
    model, _ = converted(recipe)
    values = qs.checkpoints.high_precision_state_dict(model)
    assert qs.revert(model) == 3
    plain = Convolutions()
    plain.load_state_dict(values)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_convolutions_alone_are_refused() -> None:
    with pytest.raises(qs.errors.ConfigurationError, match=r"it has no torch\.nn\.Linear"):
        qs.convert(nn.Sequential(nn.Conv2d(3, 4, 3)), "mxfp8")
