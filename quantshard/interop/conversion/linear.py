"""The linear layer that replaces an `nn.Linear` under the same names, and the reverse replacement."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.errors import CheckpointError
from quantshard.modules import Linear, quantized_model_init
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.gemms.compiled import TracedLinear
from quantshard.modules.gemms.functional import PreparedLinear
from quantshard.recipe import Recipe, stock_name
from quantshard.tensor import components, moves, requantize
from quantshard.tensor.components import FORMAT_SUFFIX, FORMAT_TAG_BYTES
from quantshard.tensor.parameter_state import RNG_KEY

_COMPILED = "_compiled_call_impl"
"""Attribute that `compile` sets on a module. It refers to that module, so it is not copied."""


class _LinearInterface(nn.Linear):
    """Makes `isinstance(layer, nn.Linear)` true, which PEFT and others check, without nn.Linear's parameters."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class PackedLoading(QuantizedModule):
    """Base of modules that also load packed weights, as written by `save_pretrained`."""

    def _load_from_state_dict(
        self, entries: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for name in self._weights:
            weight = entries.get(prefix + name)
            if isinstance(weight, Tensor) and is_packed(weight):
                try:
                    parts = unpack(getattr(self, name), weight, prefix + name)
                except CheckpointError as error:
                    error_msgs.append(str(error))
                    return
                entries = {**entries, **{prefix + name + suffix: part for suffix, part in parts.items()}}
        super()._load_from_state_dict(
            entries, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class ConvertedLinear(PackedLoading, Linear, _LinearInterface):  # type: ignore[misc]
    """A `Linear` that replaces an `nn.Linear`. `taken`: names of attributes that users had set on the `nn.Linear`."""

    taken: tuple[str, ...] = ()

    def prepare(self, x_shape: Sequence[int], device: torch.device) -> PreparedLinear | TracedLinear:
        """Prepare this layer for an input of this shape under the current recipe, for use in a fused step."""
        return self._prepare(self._layer, x_shape, device)

    @property
    def has_histories(self) -> bool:
        return any("history" in name for name, _ in self.named_buffers(recurse=False))

    @property
    def awaits_values(self) -> bool:
        """Whether the weight is on the meta device, or left it without getting values."""
        return self.weight.is_meta or self._awaits_values

    def leave_meta(self, device: torch.device) -> None:
        """Allocate what is on meta: no values, zero histories. Tensors that a framework has loaded are kept."""
        tensors = {**dict(self.named_buffers(recurse=False)), "bias": self.bias}
        loaded = {name: tensor for name, tensor in tensors.items() if tensor is not None and not tensor.is_meta}
        for name in loaded:
            setattr(self, name, None)
        self.to_empty(device=device)
        for name, tensor in loaded.items():
            setattr(self, name, tensor)
        for name, tensor in self.weight_state("weight").items():
            if name != RNG_KEY:
                # to_empty leaves memory uninitialized
                tensor.zero_()
        self._awaits_values = False

    @torch.no_grad()
    def take_values(self, weight: Tensor, name: str, keep: bool) -> None:
        """Quantize values, on their device, into the weight. `keep`: keep them on the CPU for the masters."""
        self.leave_meta(weight.device)
        requantize.requantize_([(self.weight, weight.detach())], names=[name])
        if keep:
            components.storage_of(self.weight).keep_initial_values(weight.detach().cpu().clone())


def empty_linear(
    old: nn.Linear, name: str, recipe: Recipe, around: Recipe | None, by_itself: bool, keep_values: bool
) -> ConvertedLinear:
    """Create a replacement for an `nn.Linear` on the meta device, with its weight in the recipe's format.

    The random key is derived from the name, so all ranks agree regardless of their RNG state.

    Args:
        around: the recipe shared by all layers, which then follow the surrounding autocast; None: each uses its own.
        by_itself: enter the layer's recipe if no autocast is active.
        keep_values: keep the values of a later `reset_parameters` for an optimizer's masters.
    """
    with seeded_by(name), quantized_model_init(True, recipe, keep_values):
        new = ConvertedLinear(
            old.in_features,
            old.out_features,
            bias=old.bias is not None,
            params_dtype=old.weight.dtype,
            device="meta",
            name=name,
        )
    set_recipes(new, recipe, around, by_itself)
    return new


@contextmanager
def seeded_by(name: str) -> Iterator[None]:
    """Seed torch's CPU generator by a layer's name, so that all ranks draw the same random keys."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1)
        yield


def set_recipes(module: Any, recipe: Recipe, around: Recipe | None, by_itself: bool) -> None:
    """Set the recipes of a converted module; see `empty_linear`."""
    # graphs of torch 2.11 accept only a name
    name_or_recipe = stock_name(recipe) or recipe
    module.recipe = None if recipe == around else name_or_recipe
    module.model_recipe = name_or_recipe if by_itself else None


def fill_linear(new: ConvertedLinear, old: nn.Linear, name: str, keep_values: bool) -> None:
    """Copy parameters (values except on meta), hooks and attributes from the `nn.Linear` that `new` replaces."""
    weight = old.weight
    if not weight.is_meta:
        new.take_values(weight, f"{name}.weight", keep_values)
    new.weight.requires_grad_(weight.requires_grad)
    new.weight.__dict__.update(moves.set_attributes(weight))  # marks set by frameworks
    new.bias = old.bias
    new.train(old.training)
    private_torch.take_hooks(new, old)
    new.taken = tuple(vars(old).keys() - vars(new).keys() - {_COMPILED})
    vars(new).update({name: vars(old)[name] for name in new.taken})


def leave_fast_path(converted: set[int], model: nn.Module) -> None:
    """Disable the fast path of PyTorch's transformer encoders: it reads converted weights in one operator."""
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            continue
        if any(id(part) in converted for part in module.modules()):
            is_layer = isinstance(module, nn.TransformerEncoderLayer)
            name, value = ("activation_relu_or_gelu", 0) if is_layer else ("use_nested_tensor", False)
            # the value PyTorch uses for unsupported activations or layers
            setattr(module, name, value)


def plain_linear(old: ConvertedLinear, tied: Tensor | None = None) -> nn.Linear:
    """Create an `nn.Linear` with the dequantized weight, or with the weight `tied` of another layer."""
    weight = old.weight
    new = nn.Linear(old.in_features, old.out_features, bias=False, device="meta", dtype=weight.dtype)
    if tied is None:
        values = torch.empty_like(new.weight) if weight.is_meta else weight.detach().dequantize()
        tied = nn.Parameter(values, requires_grad=weight.requires_grad)
        tied.__dict__.update(moves.set_attributes(weight))
    new.weight = tied
    new.bias = old.bias
    new.train(old.training)
    private_torch.take_hooks(new, old)
    vars(new).update({name: vars(old)[name] for name in old.taken if name in vars(old)})
    return new


def pack(entries: Mapping[str, Tensor]) -> Tensor:
    """Pack a weight's unsharded entries into one tensor of bytes, the format tag first, for file formats."""
    # with one dim, a reader of another format sees a wrong shape instead of wrong values
    ordered = [entries[FORMAT_SUFFIX], *(value for suffix, value in entries.items() if suffix != FORMAT_SUFFIX)]
    return torch.cat([value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for value in ordered])


def is_packed(value: Tensor) -> bool:
    """Return whether a state dict entry was made by `pack`; unpacked codes have two dims."""
    return value.dtype == torch.uint8 and value.ndim == 1


def unpack(param: Tensor, packed: Tensor, name: str) -> dict[str, Tensor]:
    """Unpack a weight to its unsharded tensors, keyed by suffix. `param`: the destination, which can be sharded."""
    live = components.state_of(param)
    tag, own_tag = packed[:FORMAT_TAG_BYTES], components.storage_of(param).spec.tag
    if len(tag) == FORMAT_TAG_BYTES and components.read_format_tag(tag) != own_tag:
        problem = f"{name} is stored as {components.read_format_tag(tag)!r}, but this model's weight is {own_tag!r}"
        raise CheckpointError(f"{problem}; load it with the recipe that it was saved with")
    sizes = {s: math.prod(v.shape) * v.element_size() for s, v in live.items() if s != FORMAT_SUFFIX}
    if len(packed) != FORMAT_TAG_BYTES + sum(sizes.values()):
        raise CheckpointError(f"{name} has {len(packed)} bytes, which do not fit {own_tag!r} {list(param.shape)}")
    pieces = packed[FORMAT_TAG_BYTES:].split(list(sizes.values()))
    # pieces can start at any byte, but a view as int64 needs alignment: clone
    tensors = [(s, live[s], piece.clone()) for s, piece in zip(sizes, pieces, strict=True)]
    return {FORMAT_SUFFIX: tag, **{s: piece.view(like.dtype).reshape(like.shape) for s, like, piece in tensors}}
