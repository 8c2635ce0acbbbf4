"""What `convert` finds of a model besides its children: layers in lists, attributes, and layers that are more than
linear."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.optimizers import FusedAdam

SIZE = 32
X = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))


class Stages(nn.Module):
    """Its forward reads its layers from `stages`, which PyTorch does not list."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(SIZE, SIZE) for _ in range(3))
        layers = [self.first, self.second]
        kept: Any = {
            "list": layers, "tuple": tuple(layers), "dict": dict(enumerate(layers)), "nested": [("x", (layers,))],
            "ordered": OrderedDict(enumerate(layers)),
        }[kind]  # fmt: skip
        self.stages, self.kind = kept, kind
        self.__dict__["alias"] = self.last

    def layers(self) -> list[nn.Module]:
        kept: Any = self.stages
        ways: dict[str, Any] = {
            "dict": dict.values, "ordered": dict.values, "nested": lambda each: each[0][1][0],
        }  # fmt: skip
        return list(ways.get(self.kind, list)(kept))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers():
            x = layer(x).relu()
        return self.__dict__["alias"](x)


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "nested", "ordered"])
def test_layers_that_forward_reads_elsewhere_are_exchanged_and_train(kind: str) -> None:
    model = Stages(kind)
    qs.convert(model, "mxfp8")
    assert [*model.layers(), model.__dict__["alias"]] == [model.first, model.second, model.last]
    assert all(isinstance(layer, ConvertedLinear) for layer in model.children())
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
    before = [layer.weight.dequantize() for layer in model.children()]
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(map(torch.equal, before, (layer.weight.dequantize() for layer in model.children())))
    qs.revert(model)
    assert [*model.layers(), model.__dict__["alias"]] == [model.first, model.second, model.last]
    assert all(type(layer) is nn.Linear for layer in model.children())


def test_hooks_of_layers_go_over_with_their_handles() -> None:
    def fired(model: nn.Module) -> set[str]:
        log.clear()
        model(X.clone().requires_grad_()).sum().backward()
        model.load_state_dict(model.state_dict())
        return set(log)

    def noted(name: str) -> Any:
        return lambda *_: log.append(name)

    model, log = nn.Sequential(nn.Linear(SIZE, SIZE)), list[str]()
    kinds = (
        "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_pre_hook",
        "state_dict_post_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook",
    )  # fmt: skip
    handles = [getattr(model[0], f"register_{kind}")(noted(kind)) for kind in kinds]
    assert fired(model) == {*kinds}
    qs.convert(model, "mxfp8")
    assert fired(model) == {*kinds}
    qs.revert(model)
    assert fired(model) == {*kinds}
    qs.convert(model, "mxfp8")
    for handle in handles:
        handle.remove()
    assert fired(model) == set()


def test_hooks_of_weights_and_ties_by_memory_leave_a_layer() -> None:
    hooked, other, tied = (nn.Linear(SIZE, SIZE) for _ in range(3))
    hooked.weight.register_hook(lambda grad: 0 * grad)
    tied.weight.data = other.weight.data
    model = nn.Sequential(hooked, other, tied, nn.Linear(SIZE, SIZE))
    report = qs.convert(model, "mxfp8")
    assert [layer.name for layer in report.converted] == ["3"]
    reasons = {layer.name: layer.reason for layer in report.left}
    assert reasons["0"] == "its weight has hooks; register them after convert"
    assert (reasons["1"], reasons["2"]) == ("its weight is also that of 2", "its weight is also that of 1")
    model(X).sum().backward()
    assert model[0].weight.grad.abs().sum() == 0


def test_attributes_stay_both_ways() -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE))
    model[0].scale, model[0].marked = 3.0, ["yes"]
    marked = model[0].marked
    qs.convert(model, "mxfp8")
    assert (model[0].scale, model[0].marked) == (3.0, marked) and model[0].marked is marked
    model[0].scale = 4.0
    qs.revert(model)
    assert (model[0].scale, model[0].marked) == (4.0, marked)
    assert vars(model[0]).keys() - vars(nn.Linear(1, 1)).keys() == {"scale", "marked"}


def test_layers_that_are_more_than_linear_are_left() -> None:
    """What a converted layer would not compute, or not have, is no reason to convert it all the same."""
    patched, more, plain = (nn.Linear(SIZE, SIZE) for _ in range(3))
    patched.forward = lambda x: 0 * x  # type: ignore[method-assign]
    more.register_parameter("gain", nn.Parameter(torch.ones(SIZE)))
    more.register_buffer("count", torch.zeros(1))
    more.adapter = nn.Linear(SIZE, SIZE)
    model = nn.Sequential(patched, more, plain)
    report = qs.convert(model, "mxfp8")
    assert [layer.name for layer in report.converted] == ["1.adapter", "2"]
    reasons = {layer.name: layer.reason for layer in report.left}
    assert reasons == {
        "0": "its forward was replaced, for example by accelerate",
        "1": "it also has gain, count, adapter",
    }
    assert model[0](X).abs().sum() == 0 and {"1.gain", "1.count", "1.adapter.weight"} <= model.state_dict().keys()


@pytest.mark.parametrize("nested", [False, True])
def test_an_encoder_of_pytorch_is_evaluated(nested: bool) -> None:
    """In eval mode without gradients PyTorch has one operator for a layer, which reads the weights of its parts."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(SIZE, 4, 2 * SIZE, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested) if nested else layer
    x, mask = X.view(1, 4, SIZE).repeat(2, 1, 1), torch.tensor([[False] * 4, [False, False, False, True]])
    plain = model(x, src_key_padding_mask=mask)
    qs.convert(model, "mxfp8")
    with torch.no_grad():
        found = model.eval()(x, src_key_padding_mask=mask)
    assert (found - plain)[~mask].norm() < 0.2 * plain[~mask].norm()
    model.train()
    assert torch.equal(model(x, src_key_padding_mask=mask)[~mask], found[~mask])
