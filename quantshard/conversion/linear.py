"""A linear layer that takes the place of an `nn.Linear`, under the same names, and the way back."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.modules import Linear, quantized_model_init
from quantshard.modules.contexts import context
from quantshard.recipe import Recipe
from quantshard.tensor import components, requantize
from quantshard.tensor.storage import KEY


class _LinearInterface(nn.Linear):
    """What makes `isinstance(layer, nn.Linear)` hold, which PEFT and others ask, without nn.Linear's parameters."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class ConvertedLinear(Linear, _LinearInterface):
    """A `Linear` in the place of an `nn.Linear`. `recipe`: by which its GEMMs run where that
    around quantizes any."""

    recipe: Recipe | None = None

    def forward(self, inp: Tensor, **others: Any) -> Any:  # type: ignore[override]
        if self.recipe is None or not context.quantizes(context.current_setting()):
            return super().forward(inp, **others)
        with context.autocast_by(self.recipe):
            return super().forward(inp, **others)

    @torch.no_grad()
    def take_values(self, weight: Tensor, name: str, keep: bool) -> None:
        """Be filled with these values, on their device; `keep` them, on the CPU, for an optimizer's masters."""
        self.to_empty(device=weight.device)
        for name, tensor in self.weight_state("weight").items():
            if name != KEY:
                tensor.zero_()  # uninitialized memory
        requantize.requantize_([(self.weight, weight.detach())], names=[name])
        self._awaits_values = False
        if keep:
            components.storage_of(self.weight).high_precision = weight.detach().cpu().clone()


def convert_linear(old: nn.Linear, name: str, recipe: Recipe, keep_values: bool) -> ConvertedLinear:
    """A layer with the parameters of an `nn.Linear`, its weight quantized; on the meta device its values come later.

    The random key is made from the name, so that ranks that converted one model agree, whatever they drew before.
    """
    weight = old.weight
    with torch.random.fork_rng(devices=[]), quantized_model_init(True, recipe, keep_values):
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1)
        new = ConvertedLinear(
            old.in_features, old.out_features, bias=old.bias is not None, params_dtype=weight.dtype, device="meta"
        )
    if not weight.is_meta:
        new.take_values(weight, f"{name}.weight", keep_values)
    new.weight.requires_grad_(weight.requires_grad)
    new.weight.__dict__.update(weight.__dict__)  # as frameworks mark parameters
    new.bias = old.bias
    new.train(old.training)
    private_torch.take_hooks(new, old)
    return new


def plain_linear(old: ConvertedLinear) -> nn.Linear:
    """An `nn.Linear` of the values that the quantized weight stands for."""
    weight = old.weight
    new = nn.Linear(old.in_features, old.out_features, bias=False, device="meta", dtype=weight.dtype)
    values = (
        torch.empty(weight.shape, dtype=weight.dtype, device="meta") if weight.is_meta else weight.detach().dequantize()
    )
    new.weight = nn.Parameter(values, requires_grad=weight.requires_grad)
    new.weight.__dict__.update(weight.__dict__)
    new.bias = old.bias
    new.train(old.training)
    private_torch.take_hooks(new, old)
    return new
