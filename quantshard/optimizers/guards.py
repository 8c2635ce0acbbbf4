"""What optimizers with masters do around their mathematics: seed masters, judge gradients, check what they load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import amax, components, private_torch
from quantshard.amax import FlatMax, Group
from quantshard.errors import CheckpointError, ConfigurationError, NonFiniteGradientError, RankMismatchError
from quantshard.storage import KEY

LARGEST_GRADIENT = 1e19
"""The square of a larger one is infinite in float32, and would freeze its weight for good: it counts as infinite."""


def initial_master(param: Tensor) -> Tensor:
    """The local float32 values that a parameter's master starts from: those that the weight was initialized with where
    they were kept (`get_high_precision_init_val`), else its present ones; a new tensor."""
    local = private_torch.local_tensor(param).detach()
    quantized = components.quantized(param)
    if quantized is None:
        return local.to(torch.float32, copy=True)
    kept = quantized.get_high_precision_init_val()
    if kept is None:
        return quantized._storage.dequantize()
    return kept.to(quantized.device, torch.float32, copy=True)


def weight_version(param: Tensor) -> int:
    """How often a quantized parameter was given new values; 0 for others."""
    quantized = components.quantized(param)
    return 0 if quantized is None else quantized._storage.version


def check_keys(named: Iterable[tuple[str, Tensor]]) -> None:
    """Check that all ranks have one random key for each quantized parameter. One collective per mesh.

    Raises:
        RankMismatchError: naming the first parameter whose keys differ.
    """
    keys: dict[dist.ProcessGroup, dict[str, Tensor]] = {}
    for name, param in named:
        quantized, group = components.quantized(param), private_torch.mesh_group(param)
        if quantized is not None and group is not None:
            keys.setdefault(group, {})[name] = quantized._storage.state[KEY]
    for group, named_keys in keys.items():
        amax.check_equal_on_ranks(named_keys, group, "the random key")


def check_alike(param: Tensor, other: Tensor, name: str, what: str) -> None:
    """Raise ConfigurationError if only one of a parameter and its gradient or state is a DTensor."""
    if isinstance(param, DTensor) != isinstance(other, DTensor):
        kinds = ["a DTensor" if isinstance(t, DTensor) else "a plain tensor" for t in (param, other)]
        raise ConfigurationError(f"{name} is {kinds[0]} but its {what} is {kinds[1]}; both must be the same")


def check_groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Check that a state dict's groups are of the same parameters as an optimizer's: as many, and of the same names.

    Raises:
        CheckpointError: naming the first difference.
    """
    counts = [[len(group["params"]) for group in groups] for groups in (saved, own)]
    if counts[0] != counts[1]:
        raise CheckpointError(
            f"the optimizer state has groups of {counts[0]} parameters, this optimizer {counts[1]}; build it over the "
            "same model"
        )
    for theirs, ours in zip(saved, own, strict=True):
        their_names, our_names = theirs.get("param_names"), ours.get("param_names")
        if their_names is None or our_names is None:
            continue
        for index, (their, our) in enumerate(zip(their_names, our_names, strict=True)):
            if their != our:
                raise CheckpointError(
                    f"parameter {index} of the optimizer state is {their!r}, of this optimizer {our!r}; pass the same "
                    "parameters in the same order"
                )


class GradientFlags:
    """What all ranks must know of each parameter's gradient: is it there, is it missing, is it not finite.

    Float32 [3, parameters] per process group, registered with `reduction` at construction; ask after its `reduce`.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], reduction: FlatMax) -> None:
        members: dict[Group, list[tuple[str, Tensor]]] = {}
        for name, param in named:
            members.setdefault(amax.sharding_group(param), []).append((name, param))
        self._flags: list[tuple[list[str], Tensor]] = []
        for group, pairs in members.items():
            flags = torch.stack([_flags_of(param) for _, param in pairs], dim=1)
            reduction.add(flags, group)
            self._flags.append(([name for name, _ in pairs], flags))

    def check_missing(self) -> None:
        """Raise on every rank if a gradient is missing on some.

        Raises:
            RankMismatchError: naming the first.
        """
        found = self._first(lambda flags: flags[0] * flags[1])
        if found is not None:
            raise RankMismatchError(
                f"{found} has a gradient on some ranks only; all ranks must use the same parameters in every step"
            )

    def first_non_finite(self) -> str | None:
        """Name of the first parameter whose gradient is not finite on some rank, or None."""
        return self._first(lambda flags: flags[2])

    def _first(self, choose: Callable[[Tensor], Tensor]) -> str | None:
        found = None
        for names, flags in self._flags:
            chosen = choose(flags).nonzero()
            if found is None and chosen.numel():
                found = names[int(chosen[0])]
        if len(self._flags) > 1 and amax.any_rank(found is not None, amax.world()):
            # parameters are sharded over several groups: a rank that is not in the group must do the same
            return found or "a parameter of other ranks"
        return found


def _flags_of(param: Tensor) -> Tensor:
    local = private_torch.local_tensor(param)
    if param.grad is None:
        return torch.tensor([0.0, 1.0, 0.0], device=local.device)
    grad = private_torch.local_tensor(param.grad)
    non_finite = (~(grad.abs() <= LARGEST_GRADIENT).all()).float()  # NaN is not <= either
    return torch.stack([torch.ones_like(non_finite), torch.zeros_like(non_finite), non_finite])


def count_skipped(groups: list[dict[str, Any]], name: str, most_in_a_row: int) -> None:
    """Count a step that is skipped because the gradient of `name` is not finite, in every group of an optimizer.

    Raises:
        NonFiniteGradientError: it is the `most_in_a_row`-th in a row.
    """
    for group in groups:
        group["skipped_steps"] += 1
        group["skipped_in_a_row"] += 1
    in_a_row = groups[0]["skipped_in_a_row"]
    if in_a_row >= most_in_a_row:
        raise NonFiniteGradientError(
            f"{in_a_row} steps in a row had infinite or NaN gradients, first in {name}; no weight was changed by them. "
            "Lower the learning rate, look at the data of these steps, or load an older checkpoint"
        )
