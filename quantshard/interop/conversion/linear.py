"""A linear layer that takes the place of an `nn.Linear`, under the same names, and the way back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.errors import CheckpointError
from quantshard.interop.conversion import packing
from quantshard.modules import Linear, quantized_model_init
from quantshard.modules.gemms.compiled import TracedLinear
from quantshard.modules.gemms.functional import PreparedLinear
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.recipe import Recipe, stock_name
from quantshard.tensor import components, requantize
from quantshard.tensor.storage import KEY

FOREIGN = ("weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
"""Names, in other programs' layouts, of what belongs to a weight, and is none of ours."""

_COMPILED = "_compiled_call_impl"
"""What `compile` leaves in a module; it calls that module."""


class _LinearInterface(nn.Linear):
    """What makes `isinstance(layer, nn.Linear)` hold, which PEFT and others ask, without nn.Linear's parameters."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class ConvertedLinear(Linear, _LinearInterface):  # type: ignore[misc]
    """A `Linear` in the place of an `nn.Linear`. `taken`: names of attributes that somebody had set on that one."""

    taken: tuple[str, ...] = ()

    def checked_input(self, x: Tensor) -> Tensor:
        """The input as it computes with it."""
        return self._input(x)

    def ready(self, x_shape: Sequence[int], device: torch.device) -> PreparedLinear | TracedLinear:
        """Itself for an input of this shape, by the recipe in force, as a part of a step with other layers."""
        return self._ready(self._layer, x_shape, device)

    def state_by(self, recipe: Recipe) -> LinearState:
        """Its state under a recipe."""
        return self._linear_state(self._layer.weights, recipe)

    @property
    def has_histories(self) -> bool:
        """Whether its input is scaled by past amaxes."""
        return any("history" in name for name, _ in self.named_buffers(recurse=False))

    @property
    def awaits_values(self) -> bool:
        """Whether its weight is on the meta device still, or left it without values."""
        return self.weight.is_meta or self._awaits_values

    def leave_meta(self, device: torch.device) -> None:
        """Give what is on the meta device memory on another: the weight without values, its state, histories of zeros;
        a framework may have loaded a bias or a history already, which stays."""
        own = {**dict(self.named_buffers(recurse=False)), "bias": self.bias}
        loaded = {name: tensor for name, tensor in own.items() if tensor is not None and not tensor.is_meta}
        for name in loaded:
            setattr(self, name, None)
        self.to_empty(device=device)
        for name, tensor in loaded.items():
            setattr(self, name, tensor)
        for name, tensor in self.weight_state("weight").items():
            if name != KEY:
                tensor.zero_()  # uninitialized memory
        self._awaits_values = False

    @torch.no_grad()
    def take_values(self, weight: Tensor, name: str, keep: bool) -> None:
        """Be filled with these values, on their device; `keep` them, on the CPU, for an optimizer's masters."""
        self.leave_meta(weight.device)
        requantize.requantize_([(self.weight, weight.detach())], names=[name])
        if keep:
            components.storage_of(self.weight).keep_initial_values(weight.detach().cpu().clone())

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """As any module of ours; a weight may be packed, as `save_pretrained` writes it."""
        key = f"{prefix}weight"
        foreign = [name for name in FOREIGN if prefix + name in state_dict]
        if foreign:
            error_msgs.append(
                f"{prefix}{foreign[0]} is of another program's layout, which load_state_dict does not read; use "
                "from_pretrained, or quantshard.layouts.load"
            )
            return
        packed = state_dict.get(key)
        if isinstance(packed, Tensor) and packing.is_packed(packed):
            try:
                parts = packing.unpack(self.weight, packed, key)
            except CheckpointError as error:
                error_msgs.append(str(error))
                return
            state_dict = {**state_dict, **{key + suffix: part for suffix, part in parts.items()}}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def empty_linear(
    old: nn.Linear, name: str, recipe: Recipe, around: Recipe | None, by_itself: bool, keep_values: bool
) -> ConvertedLinear:
    """A layer for the place of an `nn.Linear`, on the meta device, its weight of the recipe's format.

    The random key is made from the name, so that ranks that converted one model agree, whatever they drew before.

    Args:
        old: the layer, which is not changed.
        name: its name in the model.
        recipe: its own.
        around: the recipe of all layers, which then run by the autocast around them; None: each runs by its own.
        by_itself: enter its recipe where no autocast was entered.
        keep_values: keep those of a later `reset_parameters`, for an optimizer's masters.
    """
    with torch.random.fork_rng(devices=[]), quantized_model_init(True, recipe, keep_values):
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1)
        new = ConvertedLinear(
            old.in_features, old.out_features, bias=old.bias is not None, params_dtype=old.weight.dtype, device="meta"
        )
    known = stock_name(recipe) or recipe  # a graph of torch 2.11 takes a name only
    new.recipe = None if recipe == around else known
    new.model_recipe = known if by_itself else None
    return new


def fill_linear(new: ConvertedLinear, old: nn.Linear, name: str, keep_values: bool) -> None:
    """Give a layer the parameters, hooks and marks of the `nn.Linear` in whose place it comes; on the meta device its
    values come later."""
    weight = old.weight
    if not weight.is_meta:
        new.take_values(weight, f"{name}.weight", keep_values)
    new.weight.requires_grad_(weight.requires_grad)
    new.weight.__dict__.update(components.set_attributes(weight))  # as frameworks mark parameters
    new.bias = old.bias
    new.train(old.training)
    private_torch.take_hooks(new, old)
    new.taken = tuple(vars(old).keys() - vars(new).keys() - {_COMPILED})
    vars(new).update({name: vars(old)[name] for name in new.taken})


def leave_fast_path(converted: set[int], model: nn.Module) -> None:
    """Have transformer encoders of PyTorch compute by their layers, of which some are converted (identities), in eval
    mode too, where one operator would read their weights."""
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            continue
        if any(id(part) in converted for part in module.modules()):
            is_layer = isinstance(module, nn.TransformerEncoderLayer)
            name, value = ("activation_relu_or_gelu", 0) if is_layer else ("use_nested_tensor", False)
            setattr(module, name, value)  # as where an activation, or a layer, is of another kind


def _plain_weight(weight: Tensor) -> nn.Parameter:
    empty = weight.is_meta
    values = torch.empty(weight.shape, dtype=weight.dtype, device="meta") if empty else weight.detach().dequantize()
    new = nn.Parameter(values, requires_grad=weight.requires_grad)
    new.__dict__.update(components.set_attributes(weight))
    return new


def plain_linear(old: ConvertedLinear, tied: Tensor | None = None) -> nn.Linear:
    """An `nn.Linear` of the values that the quantized weight stands for; `tied`: the parameter that has them already,
    where another layer has the same weight."""
    weight = old.weight
    new = nn.Linear(old.in_features, old.out_features, bias=False, device="meta", dtype=weight.dtype)
    new.weight = _plain_weight(weight) if tied is None else tied
    new.bias = old.bias
    new.train(old.training)
    private_torch.take_hooks(new, old)
    vars(new).update({name: vars(old)[name] for name in old.taken if name in vars(old)})
    return new
