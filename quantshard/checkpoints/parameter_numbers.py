"""Numbers of an optimizer's parameters in a checkpoint, under expert parallelism.

PyTorch's optimizers number their parameters, separately on each rank. A checkpoint uses the numbers of one process that
holds all experts. Each rank can compute them locally, because a layer knows its number of experts and holds its local
experts in global order. So a checkpoint does not depend on how the experts were distributed.
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
    """The parameter numbers of an optimizer, under expert parallelism.

    `own`: the number of each local parameter, in the optimizer's order. `groups`: the parameter entries of each group,
    as in one process. `digest`: a hash of all names, compared between ranks by `check_alike`.
    """

    own: Sequence[int]
    groups: Sequence[Group]
    digest: str

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> ParameterNumbers | None:
        """The numbers for a model and its optimizer; None without expert parallelism (the optimizer's numbers are
        right).

        Raises:
            UnsupportedOperationError: the optimizer creates its states in its first step; a parameter is not the
                model's; or the experts of a layer are not in one group, in the order of one process.
        """
        layers = dict(_spread_layers(model))
        if not layers:
            return None
        names = {id(param): name for name, param in reversed(components.named_parameters(model).items())}
        numbers: list[int] = []
        groups: list[Group] = []
        names_by_group: list[list[str]] = []
        for group in optimizer.param_groups:
            local_names = [names.get(id(param), "") for param in group["params"]]
            all_names, local_set = list(_of_all_ranks(local_names, layers)), {*local_names}
            offset = sum(map(len, names_by_group))
            number_of = {name: offset + index for index, name in enumerate(all_names)}
            previous_names = {name for names in names_by_group for name in names}
            if (
                not hasattr(optimizer, "initialize_state")
                or [name for name in all_names if name in local_set] != local_names
            ):
                raise _refused(optimizer)
            if previous_names & number_of.keys():  # e.g. one group per expert
                raise _refused(optimizer)
            numbers += [number_of[name] for name in local_names]
            name_entry = {"param_names": all_names} if "param_names" in group else {}
            groups.append({"params": list(number_of.values()), **name_entry})
            names_by_group.append(all_names)
        return ParameterNumbers(numbers, groups, sha256(repr(names_by_group).encode()).hexdigest())

    def to_checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert the keys of an optimizer's state dict to the numbers of a checkpoint."""
        states = {self.own[number]: value for number, value in state["state"].items()}
        pairs = zip(state["param_groups"], self.groups, strict=True)
        return {**state, "state": states, "param_groups": [{**group, **entries} for group, entries in pairs]}

    def from_checkpoint(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Convert a checkpoint's optimizer state dict to the numbers of this rank's optimizer."""
        local_index = {number: index for index, number in enumerate(self.own)}
        states = {local_index[number]: value for number, value in state["state"].items()}
        groups = []
        for live_group, stored_group in zip(
            state_to_fill(optimizer)["param_groups"], state["param_groups"], strict=True
        ):
            parameter_entries = {key: live_group[key] for key in components.PARAMETER_ENTRIES if key in live_group}
            groups.append({**stored_group, **parameter_entries})
        return {**state, "state": states, "param_groups": groups}

    def is_elsewhere(self, number: str) -> bool:
        """Whether the states under a number belong to an expert of another rank."""
        return number.isdecimal() and int(number) not in self._own and int(number) < self._count

    @cached_property
    def _own(self) -> frozenset[int]:
        return frozenset(self.own)

    @cached_property
    def _count(self) -> int:
        return sum(len(group["params"]) for group in self.groups)


def check_alike(digests: Iterable[str | None], optimizer: Optimizer | None) -> None:
    """Check that the digests of all ranks' parameter names are equal.

    Raises:
        UnsupportedOperationError: the digests differ, e.g. because one rank's experts of a layer are all frozen.
    """
    if optimizer is not None and len({*digests}) > 1:
        raise _refused(optimizer)


def _refused(optimizer: Optimizer) -> UnsupportedOperationError:
    return UnsupportedOperationError(limits.refusal("numbered states", type(optimizer).__name__))


def numbers_of(optimizer: Optimizer, known: ParameterNumbers | None) -> dict[int, int]:
    """The checkpoint's number of each parameter, by `id(param)`."""
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    return {id(param): number for param, number in zip(params, known.own if known else range(len(params)), strict=True)}


def _spread_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix, layer) of each expert-parallel layer, i.e. each `GroupedLinear` (not importable from here)."""
    for name, module in model.named_modules():
        if process_groups.expert_axis(module) is not None:
            yield f"{components.canonical_name(name)}." if name else "", module


def _of_all_ranks(names: Iterable[str], layers: Mapping[str, Any]) -> Iterator[str]:
    """Insert the names of other ranks' experts into this rank's parameter names, in the order of one process."""

    def owner(name: str) -> str:
        prefix = f"{name.rpartition('.')[0]}." if "." in name else ""
        return prefix if prefix in layers else f"\n{name}"

    for prefix, names_of_owner in groupby(names, owner):
        if prefix not in layers:
            yield prefix.removeprefix("\n")
            continue
        local_names = [name.removeprefix(prefix) for name in names_of_owner]
        experts = [layers[prefix].of_every_expert(name) for name in local_names]
        kinds = experts[: len({*map(tuple, experts)})]  # one list per parameter of an expert: weight, bias
        for names_of_kind in zip(*kinds, strict=True):
            yield from (prefix + name for name in names_of_kind)


def state_to_fill(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict as the target of a load.

    Quantshard's optimizers have a variant of `state_dict` that does not raise after bad steps, since a load repairs
    them.
    """
    state_dict: Callable[[], dict[str, Any]] = getattr(optimizer, "state_dict_to_fill", optimizer.state_dict)
    return state_dict()
