"""What optimizers with masters do around their mathematics: seed masters, judge gradients, notice changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, limits, numerics, private_torch
from quantshard.collectives import flat_max, process_groups
from quantshard.collectives.delayed_scaling import MISMATCHES
from quantshard.collectives.flags import PendingFlag
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups
from quantshard.errors import ConfigurationError, NonFiniteGradientError, RankMismatchError, warn_user
from quantshard.tensor import components
from quantshard.tensor.storage import KEY, SEED_STREAM

DECOUPLED_GRAD = "decoupled_grad"
"""The attribute of a parameter with a gradient of any floating dtype, for an optimizer with `use_decoupled_grad`."""

LARGEST_GRADIENT = 1e19
"""The square of a larger one is infinite in float32, and as a second moment would freeze its weight for good."""

LARGEST_WIDE_GRADIENT = 1e150
"""The same where an optimizer computes in float64."""

LARGEST_RATE = 1e30
"""Of learning rates: an update is at most some ten of them, and weights near 1e38 overflow float32."""

TOO_LARGE, NOT_FINITE, WEIGHT, RATE = 1.0, 2.0, 3.0, 4.0
"""What is wrong with a parameter, worse ones being larger: a gradient above `LARGEST_GRADIENT`, or not finite; a master
that the update before made infinite or NaN; or, of the first, that the learning rate is no number."""


def gradient_of(param: Tensor) -> Tensor | None:
    """What is to update a parameter: its decoupled gradient, where it has one."""
    found: Tensor | None = getattr(param, DECOUPLED_GRAD, None)
    return param.grad if found is None else found


def initial_master(param: Tensor) -> Tensor:
    """The local float32 values that a parameter's master starts from: those that the weight was initialized with where
    they were kept (`get_high_precision_init_val`), else its present ones; a new tensor."""
    local = private_torch.local_tensor(param).detach()
    quantized = components.quantized_local(param)
    if quantized is None:
        return local.to(torch.float32, copy=True)
    kept = quantized.get_high_precision_init_val()
    if kept is None:
        return quantized.quantized_storage.dequantize()
    return kept.to(quantized.device, torch.float32, copy=True)


def largest_over_ranks(value: int, params: Iterable[Tensor]) -> int:
    """The largest of the values that ranks have, where the parameters lie on several meshes or other ranks hold others;
    else the value itself.

    A collective call in that case.
    """
    params = list(params)
    groups = dict.fromkeys(map(process_groups.stepping_group, params))
    found = torch.tensor([value], dtype=torch.int64, device="cpu")
    for group in (
        process_groups.united(groups) if len(groups) > 1 or any(map(process_groups.is_expert_parallel, params)) else ()
    ):
        found = found.to(process_groups.collective_device(group))
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return int(found)


def rounding_seed(params: Sequence[Tensor]) -> int:
    """Of an optimizer's random words: from the key of the first quantized weight, which replicas share, DDP's too; else
    from torch's generator.

    Ranks may hold different experts, so where meshes differ it is the largest that one of their ranks has found.
    """
    first = next((found for param in params if (found := components.quantized_local(param)) is not None), None)
    if first is None:
        info = torch.iinfo(torch.int64)
        seed = int(torch.randint(info.min, info.max, (), dtype=torch.int64, device="cpu"))
    else:
        low, high = numerics.random_words(int(first.quantized_storage.state[KEY]), 0, SEED_STREAM, (1, 2))[0].tolist()
        seed = int(high << 32 | low) - (1 << 63)
    return largest_over_ranks(seed, params)


def check_own_weights(optimizer: str, are_averages: bool) -> None:
    """Refuse to read or write states while the averages of weights stand in for them.

    Raises:
        ConfigurationError: they do.
    """
    if are_averages:
        raise ConfigurationError(
            f"{optimizer}: inside averaged_weights(...) the model has the averages of its weights, and the optimizer "
            "neither steps nor is read, saved or loaded; do that after the with block"
        )


def keep_out_of_graphs(kind: type[Any]) -> None:
    """Have graphs of torch.compile break at the steps of a class of optimizers, and these run as they are.

    Called by its constructor, before PyTorch's, which wraps `step` once; a decorator would import the compiler with
    this package.
    """
    if not hasattr(kind.step, "hooked"):
        kind.step = torch.compiler.disable(kind.step)


def weight_version(param: Tensor) -> int:
    """How often a parameter was given new values; of one that is not quantized, not through `.data`."""
    quantized = components.quantized_local(param)
    if quantized is None:
        return private_torch.in_place_changes(param)
    return quantized.quantized_storage.seen_version()


def plain_versions(params: Iterable[Tensor]) -> dict[Tensor, int]:
    """`weight_version` of those that are not quantized."""
    return {param: weight_version(param) for param in params if components.quantized_local(param) is None}


def check_trainable(optimizer: str, name: str, param: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that a parameter has values, and that they are quantized or of one of some dtypes.

    Raises:
        ConfigurationError: naming the parameter.
    """
    if param.is_meta:
        raise ConfigurationError(
            f"{optimizer}: {name} is on the meta device; call reset_parameters() on the modules first"
        )
    if components.quantized_local(param) is None and param.dtype not in dtypes:
        raise ConfigurationError(limits.refusal("wider parameters", f"{optimizer}: {name} is {param.dtype}"))


def check_parameters(named: Iterable[tuple[str, Tensor]], also: Mapping[str, Tensor] | None = None) -> None:
    """Check that all ranks have one random key for each quantized parameter, and no two parameters the same; and that
    the pieces of all parameters are where checkpoints and random words take them to be.

    `also`: further int64 tensors [1] that must be equal on all ranks. One collective per axis of each mesh.

    Raises:
        ConfigurationError: naming two parameters that have one key, or one whose pieces are misplaced.
        RankMismatchError: naming the first parameter whose keys differ.
    """
    keys: dict[tuple[dist.ProcessGroup, ...], dict[str, Tensor]] = {}
    owners: dict[int, str] = {}
    named = list(named)
    components.check_offsets(named)
    for name, param in named:
        quantized = components.quantized_local(param)
        checked = keys.setdefault(private_torch.mesh_group(param), dict(also or {}))
        if quantized is None:
            continue
        key = checked[name] = quantized.quantized_storage.state[KEY]
        owner = owners.setdefault(id(key), name)
        if owner != name:
            raise ConfigurationError(
                f"{owner} and {name} were one tied weight that fully_shard has cut twice, so they would train "
                "apart; wrap the modules that share it as one group, fully_shard([a, b]), or their parent alone"
            )
    for group, checked in keys.items():
        flat_max.check_equal_on_ranks(checked, group, "the random key")


def kind(value: Any) -> str:
    """For messages: "a DTensor", "a plain tensor", or the name of another type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "a DTensor" if isinstance(value, DTensor) else "a plain tensor"


def check_alike(param: Tensor, other: Tensor, name: str, what: str) -> None:
    """Check that a parameter and its gradient or state are of one shape, and that both are DTensors or neither is.

    Raises:
        ConfigurationError: naming the parameter and the difference.
    """
    if param.shape == other.shape and not (isinstance(param, DTensor) or isinstance(other, DTensor)):
        return
    if kind(param) != kind(other):
        raise ConfigurationError(f"{name} is {kind(param)} but its {what} is {kind(other)}; both must be the same")
    if isinstance(param, DTensor) and isinstance(other, DTensor):
        laid = [(tuple(t.placements), t.device_mesh) for t in (param, other)]
        if laid[0] != laid[1]:
            raise ConfigurationError(
                f"{name} has placements {laid[0][0]} on {laid[0][1]}, but its {what} {laid[1][0]} on {laid[1][1]}; "
                "redistribute it to the parameter's"
            )
    shapes = [tuple(private_torch.local_tensor(t).shape) for t in (param, other)]
    if param.shape != other.shape or shapes[0] != shapes[1]:
        raise ConfigurationError(
            f"{name} has shape {tuple(param.shape)} (local {shapes[0]}), but its {what} {tuple(other.shape)} (local "
            f"{shapes[1]}); both must be the same"
        )


def check_local(param: DTensor, values: Tensor, name: str, what: str) -> None:
    """Check that a plain tensor has the shape of what this rank holds of a parameter.

    Raises:
        ConfigurationError: naming the parameter and the shapes.
    """
    local = tuple(private_torch.local_tensor(param).shape)
    if tuple(values.shape) != local:
        raise ConfigurationError(
            f"{name} has shape {tuple(param.shape)}, of which this rank holds {local}; its {what} is a plain tensor of "
            f"shape {tuple(values.shape)}: give this rank's part, or a DTensor of the whole shape"
        )


class GradientFlags:
    """What all ranks must know of each gradient: is it there, is it missing, what is wrong with it (`TOO_LARGE`, ...).

    Float32 [3, parameters], registered with `reduction` at construction; call `gather` after its `reduce`. Only
    `skips` and the checks wait for the device.

    Args:
        gradients: name, parameter and gradient of all parameters that may have one.
        exceeding: float32 [parameters], what is wrong with gradients; found here if it is not given.
        wrong: float32, what is wrong besides, of as many of the first parameters as it has elements.
    """

    def __init__(
        self,
        gradients: Iterable[tuple[str, Tensor, Tensor | None]],
        reduction: FlatMax,
        exceeding: Tensor | None = None,
        wrong: Tensor | None = None,
    ) -> None:
        names, params, grads = zip(*found, strict=True) if (found := list(gradients)) else ((), (), ())
        self._has_none = all(grad is None for grad in grads)
        members: dict[Groups, list[int]] = {}
        for at, param in enumerate(params):
            members.setdefault(process_groups.sharding_group(param), []).append(at)
        self._ranks = process_groups.united(dict.fromkeys(map(process_groups.stepping_group, params)))
        self._spread = any(map(process_groups.is_expert_parallel, params))
        self._names = [names[at] for chosen in members.values() for at in chosen]
        self._parts: list[Tensor] = []
        self._sent: PendingFlag | None = None
        if params:
            flags = _flags_of(params, grads, private_torch.local_tensor(params[0]).device, exceeding)
            if wrong is not None:
                flags[2, : len(wrong)] = torch.maximum(flags[2, : len(wrong)], wrong.to(flags.device))
            columns = flags.unbind(1)
            chosen_by_group = [[columns[at] for at in chosen] for chosen in members.values()]
            self._parts = [flags] if len(members) == 1 else [torch.stack(c, dim=1) for c in chosen_by_group]
        for group, part in zip(members, self._parts, strict=True):
            reduction.add(part, group)

    def gather(self) -> None:
        """Make `table` of the reduced flags; a collective call where parameters are sharded over different axes, or
        ranks hold different ones."""
        if not self._parts:
            self.table = torch.zeros(3, 0, dtype=torch.float32, device="cpu")
            return
        self.table = torch.cat(self._parts, dim=1) if len(self._parts) > 1 else self._parts[0]
        if len(self._parts) > 1 or self._spread:
            # a rank that is not in the group of a bad gradient must do as those that are: a column for all of them
            there, missing = self.table[0].amax(), (self.table[0] * self.table[1]).amax()
            others = torch.stack([there, missing, self.table[2].amax()]).unsqueeze(1)
            reduction = FlatMax()
            reduction.add(others, self._ranks)
            reduction.reduce()
            self.table = torch.cat([self.table, others], dim=1)
            self._names = [*self._names, "a parameter of other ranks"]

    def warn_of_no_gradient(self) -> None:
        """The parameters of a model that was wrapped later are not trained, which nothing else would tell.

        Called by an optimizer's `step`, whose caller is named.
        """
        capturing = self.table.is_cuda and torch.cuda.is_current_stream_capturing()
        if not self._has_none or capturing or self.table[0].any():  # which is read in this case alone
            return
        if not self._names:
            warn_user("this optimizer has no parameter that is trained, so the step changes nothing")
            return
        warn_user(
            f"none of this optimizer's {len(self._names)} parameters ({self._names[0]}, ...) has a gradient, so the "
            "step changes nothing; if they were replaced in the model after the optimizer was built, as by "
            "fully_shard, build it after; under FSDP2 they have none after set_requires_gradient_sync(False) either"
        )

    def bad(self) -> Tensor:
        """Bool scalar, on the device: is any gradient missing on some ranks only, or is anything wrong with one?"""
        return (self.table[0] * self.table[1] + self.table[2]).any()

    def send(self) -> Tensor:
        """`bad`, on its way to the host, so that `skips` will not wait for what the device is given to do from now."""
        bad = self.bad()
        self._sent = PendingFlag(bad)
        return bad

    @property
    def deferred(self) -> bool:
        """Whether `skips` would wait for the device: `send` has sent what is not here yet."""
        return self._sent is not None and not self._sent.is_here

    def skips(self, groups: list[dict[str, Any]], most_in_a_row: int, deferred: bool = False) -> bool:
        """Whether this step must be skipped since something is wrong with a gradient; counted in every group.

        `is_late`: the step was taken for made and counted as such, and others may have followed it on the device.

        Raises:
            RankMismatchError, NonFiniteGradientError: see `check_missing` and `check_skipped`; the former also for what
                delayed scaling found on the GPU in the passes before (`MISMATCHES`), which says so itself if
                `is_late`.
        """
        bad = bool(PendingFlag(self.bad()) if self._sent is None else self._sent)
        if not deferred:
            MISMATCHES.settle()  # the device has come to here, so nothing is waited for
        for group in groups if bad and deferred else ():
            group["step"] -= 1
        if bad:
            self.check_missing()
        for group in groups:
            group["skipped_steps"] += bad
            group["skipped_in_a_row"] = group["skipped_in_a_row"] + 1 if bad else 0
        if bad:
            self.check_skipped(groups, most_in_a_row)
            self._warn_of_skip("the step before this one was" if deferred else "this step is", groups, most_in_a_row)
        return bad

    def _warn_of_skip(self, which: str, groups: list[dict[str, Any]], most_in_a_row: int) -> None:
        """Of gradients that are not finite at the first of skipped steps in a row: more may follow, and are counted."""
        if name := self.large_gradient():
            warn_user(f"{too_large(name)}; {which} skipped")
        elif groups[0]["skipped_in_a_row"] == 1:
            warn_user(
                f"the gradient of {self._first(self.table[2] > 0)} is infinite or NaN; {which} skipped, and nothing "
                f"changed (skipped_steps counts; {most_in_a_row} in a row are an error)"
            )

    def large_gradient(self) -> str:
        """The first parameter whose gradient is finite, but too large, where nothing worse is wrong; else "". Alike on
        all ranks, but for the name."""
        is_all = self.table.numel() > 0 and bool(self.table[2].amax() == TOO_LARGE)
        return self._first(self.table[2]) if is_all else ""

    def check_missing(self) -> None:
        """Raise on every rank if a gradient is missing on some, once.

        Raises:
            RankMismatchError: naming the first.
        """
        missing = self.table[0] * self.table[1]
        if missing.any():
            name = self._first(missing)
            self.table.zero_()
            raise RankMismatchError(
                f"{name} has a gradient on some ranks only; all ranks must use the same parameters in every step"
            )

    def check_skipped(self, groups: list[dict[str, Any]], most_in_a_row: int) -> None:
        """Raise if as many steps in a row were skipped, or if nothing but a checkpoint helps.

        Raises:
            NonFiniteGradientError: naming the first parameter of the last such step.
            ConfigurationError: it was for a learning rate, whatever gradients were; as of one that the host reads.
        """
        in_a_row = int(groups[0]["skipped_in_a_row"])
        worst = float(self.table[2].amax()) if in_a_row > 0 and self.table.numel() else 0.0
        if worst == 0 or (in_a_row < most_in_a_row and worst < WEIGHT):
            return
        if worst == RATE:
            raise ConfigurationError(
                f"the last step was skipped, and changed nothing, for its learning rate was negative, infinite, NaN or "
                f"above {LARGEST_RATE:g}; look at the schedule"
            )
        name = self._first(self.table[2] == worst)
        raise NonFiniteGradientError(
            {
                TOO_LARGE: f"{in_a_row} steps in a row were skipped: {too_large(name)}",
                NOT_FINITE: f"{in_a_row} steps in a row had infinite or NaN gradients, first in {name}; no weight was "
                "changed by them. Lower the learning rate, look at the data of these steps and whether weights are "
                "finite, or load an older checkpoint",
                WEIGHT: f"the update before this one made the master of {name} infinite or NaN, and it is no longer "
                "trained; load an older checkpoint, and lower the learning rate",
            }[worst]
        )

    def _first(self, chosen: Tensor) -> str:
        return self._names[int(chosen.nonzero()[0])]


def too_large(name: str) -> str:
    """What is said of a parameter whose gradient is finite, but too large."""
    return (
        f"the gradient of {name} is finite, but above {LARGEST_GRADIENT:g} ({LARGEST_WIDE_GRADIENT:g} if it is "
        "float64), so that its square overflows, and so would the second moment, for good; scale the loss down, or "
        "call quantshard.optimizers.clip_grad_norm_ before the step"
    )


def _flags_of(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], device: torch.device, exceeding: Tensor | None
) -> Tensor:
    flags, at = torch.zeros(3, len(grads), dtype=torch.float32, device=device), 0
    for there, run in groupby(grad is not None for grad in grads):
        end = at + len(list(run))
        flags[0 if there else 1, at:end].fill_(1.0)
        at = end
    if exceeding is None:
        no = torch.zeros((), dtype=torch.float32, device=device)
        columns = [no] * len(grads)
        for wide, largest in ((False, LARGEST_GRADIENT), (True, LARGEST_WIDE_GRADIENT)):
            chosen = {
                at: private_torch.local_tensor(grad)
                for at, (param, grad) in enumerate(zip(params, grads, strict=True))
                if grad is not None and _is_wide(param) is wide
            }
            found = kernel_dispatch.exceeding(list(chosen.values()), largest).to(device).unbind() if chosen else ()
            for at, value in zip(chosen, found, strict=True):
                columns[at] = value
        exceeding = torch.stack(columns)
    flags[2].copy_(exceeding)
    return flags


def _is_wide(param: Tensor) -> bool:
    """Whether optimizers compute in float64."""
    return param.dtype is torch.float64 and components.quantized_local(param) is None
