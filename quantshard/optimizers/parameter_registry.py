"""Validation of an optimizer's parameters, and detection of parameters that others replaced in its groups.

Some libraries shard a model after its optimizer was built and put the new parameters into the optimizer's groups
(accelerate under FSDP2). States are stored by parameter, so an undetected replacement would silently stop training or
drop masters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quantshard.collectives import process_groups
from quantshard.errors import ConfigurationError
from quantshard.tensor import components

UPDATES, VALUES = "updates that were made", "values that were loaded or set"
"""Progress that states can hold and new states would lose."""


class ParameterSwap(NamedTuple):
    """A parameter `old` that `new` replaced, at a position of a group."""

    old: Tensor
    new: Tensor
    group: int
    position: int


def checked_params(optimizer: str, params: Iterable[Any]) -> list[Any]:
    """Return an optimizer's argument `params` as a list.

    Raises:
        ConfigurationError: it is a module, a tensor or a dict, or empty.
    """
    if isinstance(params, nn.Module):
        raise ConfigurationError(
            f"{optimizer}(a {type(params).__name__}): give its parameters, model.parameters() or, for names in "
            "messages and checkpoints, model.named_parameters()"
        )
    if isinstance(params, Tensor | dict):
        raise ConfigurationError(
            f"{optimizer}(params={type(params).__name__}): give a list of parameters, (name, parameter) pairs or groups"
        )
    entries = list(params)
    if not entries:
        raise ConfigurationError(
            f"{optimizer}(params): there is no parameter; if it is a generator, such as model.parameters(), something "
            "has consumed it before: give a new one, or a list"
        )
    return entries


def checked_group(optimizer: str, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group to add, with its parameters in a list.

    Raises:
        ConfigurationError: the group has no parameters, or one twice.
    """
    if not isinstance(group, Mapping) or "params" not in group:
        raise ConfigurationError(
            f"{optimizer}: group {number} has no entry 'params'; it is a dict of 'params' and options, as "
            "{'params': model.parameters(), 'lr': 1e-3}"
        )
    raw_params = group["params"]
    params = [raw_params] if isinstance(raw_params, Tensor) else list(raw_params)
    positions: dict[int, int] = {}
    for position, entry in enumerate(params):
        param = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if not isinstance(param, Tensor):
            raise ConfigurationError(
                f"{optimizer}: group {number} has a {type(param).__name__} among its parameters, at {position}; give "
                "tensors, or (name, tensor) pairs"
            )
        first = positions.setdefault(id(param), position)
        if first != position:
            raise ConfigurationError(
                f"{optimizer}: group {number} has one parameter twice, at {first} and {position}, so a step would "
                "update it twice; give each once, as model.parameters() does with tied weights"
            )
    return {**group, "params": params}


class ParameterRegistry:
    """The parameters that an optimizer knows, by group and position.

    Args:
        optimizer: class name of the optimizer, for messages.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._held: list[list[Tensor]] = []
        self._stored_as: dict[Tensor, tuple[torch.dtype, torch.Size, bool]] = {}

    def add(self, params: Iterable[Tensor]) -> None:
        """Append a group."""
        self._held.append(list(params))

    def record_states(self, param: Tensor, of_any_dtype: bool) -> None:
        """Record that states were created for the parameter as it is now. `of_any_dtype`: they do not depend on its
        bits."""
        self._stored_as[param] = param.dtype, param.shape, of_any_dtype

    def recast(self) -> list[Tensor]:
        """Return parameters whose dtype changed since their states were created, because the model was cast."""
        items = self._stored_as.items()
        return [param for param, (dtype, shape, _) in items if param.dtype is not dtype and param.shape == shape]

    def check_stored(self, param: Tensor, name: str) -> None:
        """Check that a parameter still has the shape and dtype for which its states were created.

        `Module.half` and transformers' resizing of embeddings replace a parameter's data, which its version does not
        show.

        Raises:
            ConfigurationError: the shape changed, or the dtype changed to one that the states do not fit.
        """
        dtype, shape, of_any_dtype = self._stored_as[param]
        is_wider = param.dtype is torch.float64 and components.quantized_local(param) is None
        if param.shape == shape and (param.dtype is dtype or (of_any_dtype and not is_wider)):
            return
        changed, old, new = "dtype", str(dtype), str(param.dtype)
        if param.shape != shape:
            changed, old, new = "shape", str(tuple(shape)), str(tuple(param.shape))
        raise ConfigurationError(
            f"{self._optimizer}: {name} had {changed} {old} when its states were made and has {new} now, which they do "
            "not fit; give it what it had, or build a new optimizer, after the model is cast or resized"
        )

    def replaced(
        self, groups: list[dict[str, Any]], names: Mapping[Tensor, str], kept: Callable[[], str]
    ) -> list[ParameterSwap]:
        """Return the parameters that others replaced in the groups, and register the new ones.

        `kept`: describes the progress that would be lost, empty without any. It is called only if parameters were
        replaced, and then on all ranks.

        Raises:
            ConfigurationError: progress would be lost, or groups or parameters were added, removed or moved.
        """
        if len(groups) == len(self._held) and all(
            len(group["params"]) == len(known_params) and all(map(operator.is_, group["params"], known_params))
            for group, known_params in zip(groups, self._held, strict=True)
        ):
            return []
        self._check_sizes([len(group["params"]) for group in groups])
        swaps = list(self._differences(groups, names))
        progress = kept()
        if _on_any_rank(bool(progress), [swap.new for swap in swaps]):
            raise ConfigurationError(
                f"{self._optimizer}: {self._described(swaps[0], names)}, but its states hold "
                f"{progress or 'what another rank has'}, which would be lost. Replace parameters, as by sharding the "
                "model, before the first step, or build a new optimizer over those that are trained"
            )
        self._held = [list(group["params"]) for group in groups]
        for swap in swaps:
            self._stored_as.pop(swap.old, None)
        return swaps

    def _check_sizes(self, sizes: list[int]) -> None:
        known_sizes = [len(params) for params in self._held]
        if sizes != known_sizes:
            raise ConfigurationError(
                f"{self._optimizer}: its groups had {known_sizes} parameters and now have {sizes}; add some with "
                "add_param_group(), leave some as they are by giving them no gradient, or build a new optimizer"
            )

    def _differences(self, groups: list[dict[str, Any]], names: Mapping[Tensor, str]) -> Iterator[ParameterSwap]:
        for number, (group, known_params) in enumerate(zip(groups, self._held, strict=True)):
            for position, (old, new) in enumerate(zip(known_params, group["params"], strict=True)):
                if new is old:
                    continue
                if new in names:
                    raise ConfigurationError(
                        f"{self._optimizer}: {names[new]} was moved to group {number}, position {position}; parameters "
                        "of an optimizer keep their places, by which states are saved: build a new one"
                    )
                yield ParameterSwap(old, new, number, position)

    def _described(self, one: ParameterSwap, names: Mapping[Tensor, str]) -> str:
        old, new = tuple(one.old.shape), tuple(one.new.shape)
        return (
            f"{names[one.old]} (group {one.group}, position {one.position}, shape {old}) was replaced by another "
            f"parameter of shape {new}"
        )


def _on_any_rank(flag: bool, params: Iterable[Tensor]) -> bool:
    """Whether `flag` is set on any rank that steps these parameters. A collective call."""
    value = torch.tensor([float(flag)], dtype=torch.float32, device="cpu")
    for group in process_groups.united(dict.fromkeys(map(process_groups.stepping_group, params))):
        value = value.to(process_groups.collective_device(group))
        dist.all_reduce(value, dist.ReduceOp.MAX, group)
    return bool(value)


def reordered(mapping: dict[Tensor, Any], groups: list[dict[str, Any]]) -> dict[Tensor, Any]:
    """Return the entries in the order of the groups' parameters, which is the order of collective calls."""
    return {param: mapping[param] for group in groups for param in group["params"] if param in mapping}
