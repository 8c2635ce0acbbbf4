"""Which parameters an optimizer's groups hold: given as they should be, and still those that its states belong to.

Some libraries shard a model after its optimizer was built and put the new parameters into the optimizer's groups
(accelerate under FSDP2). States are kept by parameter, so without a look nothing would be trained, or masters would be
left out, in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quantshard.argument_kinds import ITERABLE, check_arguments, shown_argument
from quantshard.collectives import process_groups
from quantshard.errors import ConfigurationError
from quantshard.tensor import components

UPDATES, VALUES = "updates that were made", "values that were loaded or set"
"""What states may hold that new ones would not."""


class ParameterSwap(NamedTuple):
    """A parameter whose place in a group another has taken."""

    old: Tensor
    new: Tensor
    group: int
    position: int


def checked_params(optimizer: str, params: Iterable[Any]) -> list[Any]:
    """What an optimizer was given, as a list, where it can be trained.

    Raises:
        ConfigurationError: it is a module or a tensor, there is nothing, or a group lacks its parameters.
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
    check_arguments(optimizer, ITERABLE, params=params)
    found = list(params)
    if not found:
        raise ConfigurationError(
            f"{optimizer}(params): there is no parameter; if it is a generator, such as model.parameters(), something "
            "has consumed it before: give a new one, or a list"
        )
    return found


def checked_group(optimizer: str, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """The group that is to be added, its parameters in a list.

    Raises:
        ConfigurationError: it has no parameters, or one twice.
    """
    if not isinstance(group, Mapping) or "params" not in group:
        raise ConfigurationError(
            f"{optimizer}: group {number} has no entry 'params'; it is a dict of 'params' and options, as "
            "{'params': model.parameters(), 'lr': 1e-3}"
        )
    given = group["params"]
    check_arguments(f"{optimizer}: group {number}", ITERABLE, params=given)
    params = [given] if isinstance(given, Tensor) else list(given)
    seen: dict[int, int] = {}
    for position, entry in enumerate(params):
        param = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if not isinstance(param, Tensor):
            raise ConfigurationError(
                f"{optimizer}: group {number} has {shown_argument(param)} among its parameters, at {position}; give "
                "tensors, or (name, tensor) pairs"
            )
        first = seen.setdefault(id(param), position)
        if first != position:
            raise ConfigurationError(
                f"{optimizer}: group {number} has one parameter twice, at {first} and {position}, so a step would "
                "update it twice; give each once, as model.parameters() does with tied weights"
            )
    return {**group, "params": params}


class ParameterRegistry:
    """The parameters that an optimizer knows, by group and position.

    Args:
        optimizer: the name of its class, for messages.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._held: list[list[Tensor]] = []
        self._stored_as: dict[Tensor, tuple[torch.dtype, torch.Size, bool]] = {}

    def add(self, params: Iterable[Tensor]) -> None:
        """A group, at the end."""
        self._held.append(list(params))

    def record_states(self, param: Tensor, of_any_dtype: bool) -> None:
        """States were made for a parameter as it is now; `of_any_dtype`: they are not joined to its bits."""
        self._stored_as[param] = param.dtype, param.shape, of_any_dtype

    def recast(self) -> list[Tensor]:
        """Parameters whose dtype is not the one that their states were made for, since the model was cast."""
        stored = self._stored_as.items()
        return [param for param, (dtype, shape, _) in stored if param.dtype is not dtype and param.shape == shape]

    def check_stored(self, param: Tensor, name: str) -> None:
        """Check that a parameter that is to be stepped is as it was when its states were made. `Module.half` and
        transformers' resizing of embeddings keep a parameter and give it other data, which no version of it tells.

        Raises:
            ConfigurationError: it has another shape, another dtype where its states are joined to its bits, or digits
                that its states lack.
        """
        dtype, shape, of_any_dtype = self._stored_as[param]
        is_wider = param.dtype is torch.float64 and components.quantized_local(param) is None
        if param.shape == shape and (param.dtype is dtype or (of_any_dtype and not is_wider)):
            return
        changed, was, now = "dtype", str(dtype), str(param.dtype)
        if param.shape != shape:
            changed, was, now = "shape", str(tuple(shape)), str(tuple(param.shape))
        raise ConfigurationError(
            f"{self._optimizer}: {name} had {changed} {was} when its states were made and has {now} now, which they do "
            "not fit; give it what it had, or build a new optimizer, after the model is cast or resized"
        )

    def replaced(
        self, groups: list[dict[str, Any]], names: Mapping[Tensor, str], kept: Callable[[], str]
    ) -> list[ParameterSwap]:
        """The parameters whose places in the groups others have taken; from now on those are the ones known.

        `kept`: in words, what the states hold that would be lost, asked only if there are any; empty if nothing. All
        ranks must call it together then.

        Raises:
            ConfigurationError: something would be lost, or groups or parameters came, went or changed places.
        """
        if len(groups) == len(self._held) and all(
            len(group["params"]) == len(held) and all(map(_is, group["params"], held))
            for group, held in zip(groups, self._held, strict=True)
        ):
            return []
        self._check_sizes([len(group["params"]) for group in groups])
        found = list(self._differences(groups, names))
        lost = kept()
        if _on_any_rank(bool(lost), [one.new for one in found]):
            raise ConfigurationError(
                f"{self._optimizer}: {self._described(found[0], names)}, but its states hold "
                f"{lost or 'what another rank has'}, which would be lost. Replace parameters, as by sharding the "
                "model, before the first step, or build a new optimizer over those that are trained"
            )
        self._held = [list(group["params"]) for group in groups]
        for one in found:
            self._stored_as.pop(one.old, None)
        return found

    def _check_sizes(self, sizes: list[int]) -> None:
        held = [len(params) for params in self._held]
        if sizes != held:
            raise ConfigurationError(
                f"{self._optimizer}: its groups had {held} parameters and now have {sizes}; add some with "
                "add_param_group(), leave some as they are by giving them no gradient, or build a new optimizer"
            )

    def _differences(self, groups: list[dict[str, Any]], names: Mapping[Tensor, str]) -> Iterator[ParameterSwap]:
        for number, (group, held) in enumerate(zip(groups, self._held, strict=True)):
            for position, (old, new) in enumerate(zip(held, group["params"], strict=True)):
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


def _is(one: object, other: object) -> bool:
    return one is other


def _on_any_rank(flag: bool, params: Iterable[Tensor]) -> bool:
    """Whether it is so on any of the ranks that step these parameters together; a collective call."""
    found = torch.tensor([float(flag)], dtype=torch.float32, device="cpu")
    for group in process_groups.united(dict.fromkeys(map(process_groups.stepping_group, params))):
        found = found.to(process_groups.collective_device(group))
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return bool(found)


def reordered(mapping: dict[Tensor, Any], groups: list[dict[str, Any]]) -> dict[Tensor, Any]:
    """The same entries in the order of the groups' parameters, which is that of collective calls."""
    return {param: mapping[param] for group in groups for param in group["params"] if param in mapping}
