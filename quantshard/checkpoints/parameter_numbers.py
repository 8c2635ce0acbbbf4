"""The numbers of an optimizer's parameters in a checkpoint, where experts are spread over ranks.

PyTorch's optimizers number their parameters, each rank its own. In a checkpoint they have the numbers of one process
that holds all experts, which each rank can tell by itself: a layer knows how many experts there are, and those here
stand in the order of all. So a checkpoint is the same whatever the experts were spread over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from quantshard import limits
from quantshard.collectives import process_groups
from quantshard.errors import UnsupportedOperationError
from quantshard.tensor import components

Group = Mapping[str, Any]


@dataclass(frozen=True)
class ParameterNumbers:
    """Of an optimizer over a model whose experts are spread.

    `own`: of each parameter of this rank, in the optimizer's order, its number. `groups`: what each group names
    parameters by, as of one process. `digest`: of the names of all, which ranks compare (`check_alike`).
    """

    own: Sequence[int]
    groups: Sequence[Group]
    digest: str

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> ParameterNumbers | None:
        """None where no experts are spread: the optimizer's own numbers are right.

        Raises:
            UnsupportedOperationError: the optimizer makes its states in its first step; or a parameter is none of the
                model's, or the experts of a layer do not stand in one of its groups as in one process.
        """
        layers = dict(_spread_layers(model))
        if not layers:
            return None
        names = {id(param): name for name, param in reversed(components.named_parameters(model).items())}
        own: list[int] = []
        groups: list[Group] = []
        told: list[list[str]] = []
        for group in optimizer.param_groups:
            mine = [names.get(id(param), "") for param in group["params"]]
            every, here = list(_of_all_ranks(mine, layers)), {*mine}
            first = sum(map(len, told))
            places = {name: first + place for place, name in enumerate(every)}
            known = {name for names in told for name in names}
            if not hasattr(optimizer, "initialize_state") or [name for name in every if name in here] != mine:
                raise _refused(optimizer)
            if known & places.keys():  # as where each expert has a group of its own
                raise _refused(optimizer)
            own += [places[name] for name in mine]
            named = {"param_names": every} if "param_names" in group else {}
            groups.append({"params": list(places.values()), **named})
            told.append(every)
        return ParameterNumbers(own, groups, sha256(repr(told).encode()).hexdigest())

    def to_checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state dict with the numbers of a checkpoint."""
        states = {self.own[number]: value for number, value in state["state"].items()}
        pairs = zip(state["param_groups"], self.groups, strict=True)
        return {**state, "state": states, "param_groups": [{**group, **every} for group, every in pairs]}

    def from_checkpoint(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """The reverse, for this optimizer."""
        here = {number: place for place, number in enumerate(self.own)}
        states = {here[number]: value for number, value in state["state"].items()}
        groups = []
        for own, saved in zip(state_to_fill(optimizer)["param_groups"], state["param_groups"], strict=True):
            named = {key: own[key] for key in components.PARAMETER_ENTRIES if key in own}
            groups.append({**saved, **named})
        return {**state, "state": states, "param_groups": groups}

    def is_elsewhere(self, number: str) -> bool:
        """Whether the states under a number belong to another rank's expert."""
        return number.isdecimal() and int(number) not in self._own and int(number) < self._count

    @cached_property
    def _own(self) -> frozenset[int]:
        return frozenset(self.own)

    @cached_property
    def _count(self) -> int:
        return sum(len(group["params"]) for group in self.groups)


def check_alike(digests: Iterable[str | None], optimizer: Optimizer | None) -> None:
    """Compare what all ranks have told of their numbers.

    Raises:
        UnsupportedOperationError: they differ, as where one rank's experts of a layer are all frozen.
    """
    if optimizer is not None and len({*digests}) > 1:
        raise _refused(optimizer)


def _refused(optimizer: Optimizer) -> UnsupportedOperationError:
    return UnsupportedOperationError(limits.refusal("numbered states", type(optimizer).__name__))


def numbers_of(optimizer: Optimizer, known: ParameterNumbers | None) -> dict[int, int]:
    """The number in a checkpoint of each parameter, by its id."""
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    return {id(param): number for param, number in zip(params, known.own if known else range(len(params)), strict=True)}


def _spread_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers whose experts are spread, by their names with a dot; `GroupedLinear` stands on a higher floor."""
    for name, module in model.named_modules():
        if process_groups.expert_axis(module) is not None:
            yield f"{components.canonical_name(name)}." if name else "", module


def _of_all_ranks(names: Iterable[str], layers: Mapping[str, Any]) -> Iterator[str]:
    """Names of parameters with those of other ranks' experts between them, as one process has them."""

    def owner(name: str) -> str:
        prefix = f"{name.rpartition('.')[0]}." if "." in name else ""
        return prefix if prefix in layers else f"\n{name}"

    for prefix, run in groupby(names, owner):
        if prefix not in layers:
            yield prefix.removeprefix("\n")
            continue
        first = [name.removeprefix(prefix) for name in run]
        experts = [layers[prefix].of_every_expert(name) for name in first]
        kinds = experts[: len({*map(tuple, experts)})]  # of the first expert here: its weight, perhaps its bias
        for same in zip(*kinds, strict=True):
            yield from (prefix + name for name in same)


def state_to_fill(optimizer: Optimizer) -> dict[str, Any]:
    """Its state dict, for a load; of ours without an error for bad steps, of which a load is the way out."""
    made: Callable[[], dict[str, Any]] = getattr(optimizer, "state_dict_to_fill", optimizer.state_dict)
    return made()
