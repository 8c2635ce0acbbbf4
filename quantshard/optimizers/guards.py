"""Checks around an optimizer's update: initial masters, gradient flags, and parameters changed by others."""

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
"""Attribute for a gradient of any floating-point dtype, which optimizers with `use_decoupled_grad` read."""

LARGEST_GRADIENT = 1e19
"""Largest gradient accepted. The square of a larger one overflows float32, and an infinite second moment would freeze
the weight."""

LARGEST_WIDE_GRADIENT = 1e150
"""Largest gradient accepted if the optimizer computes in float64."""

LARGEST_RATE = 1e30
"""Largest learning rate accepted. An update reaches about 10 learning rates, and weights near 1e38 overflow float32."""

TOO_LARGE, NOT_FINITE, WEIGHT, RATE = 1.0, 2.0, 3.0, 4.0
"""Problems of a parameter in a step, the worst last: its gradient exceeds `LARGEST_GRADIENT`; its gradient is not
finite; the previous update made its master infinite or NaN; or the learning rate is invalid (a flag of the first
parameter)."""


def gradient_of(param: Tensor) -> Tensor | None:
    """Return a parameter's `decoupled_grad` if it has one, otherwise its `grad`."""
    decoupled: Tensor | None = getattr(param, DECOUPLED_GRAD, None)
    return param.grad if decoupled is None else decoupled


def initial_master(param: Tensor) -> Tensor:
    """Return new local float32 values from which a parameter's master starts.

    These are the initial values of the weight if they were kept (`get_high_precision_init_val`), otherwise the present
    values.
    """
    local = private_torch.local_tensor(param).detach()
    quantized = components.quantized_local(param)
    if quantized is None:
        return local.to(torch.float32, copy=True)
    initial_values = quantized.get_high_precision_init_val()
    if initial_values is None:
        return quantized.quantized_storage.dequantize()
    return initial_values.to(quantized.device, torch.float32, copy=True)


def largest_over_ranks(value: int, params: Iterable[Tensor]) -> int:
    """Return the maximum of `value` over ranks if the parameters are on several meshes or expert-parallel, otherwise
    `value`.

    A collective call in the first case.
    """
    params = list(params)
    groups = dict.fromkeys(map(process_groups.stepping_group, params))
    largest = torch.tensor([value], dtype=torch.int64, device="cpu")
    for group in (
        process_groups.united(groups) if len(groups) > 1 or any(map(process_groups.is_expert_parallel, params)) else ()
    ):
        largest = largest.to(process_groups.collective_device(group))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return int(largest)


def rounding_seed(params: Sequence[Tensor]) -> int:
    """Return a seed for an optimizer's random bits, derived from the key of the first quantized weight.

    All replicas, including DDP's, share that key. Without quantized weights, the seed is drawn from torch's generator.
    If ranks hold different parameters (experts, several meshes), they use the largest of their seeds.
    """
    first = next((quantized for param in params if (quantized := components.quantized_local(param)) is not None), None)
    if first is None:
        info = torch.iinfo(torch.int64)
        seed = int(torch.randint(info.min, info.max, (), dtype=torch.int64, device="cpu"))
    else:
        low, high = numerics.random_words(int(first.quantized_storage.state[KEY]), 0, SEED_STREAM, (1, 2))[0].tolist()
        seed = int(high << 32 | low) - (1 << 63)
    return largest_over_ranks(seed, params)


def check_own_weights(optimizer: str, are_averages: bool) -> None:
    """Check that the averages of the weights are not swapped in (`averaged_weights`).

    Raises:
        ConfigurationError: they are.
    """
    if are_averages:
        raise ConfigurationError(
            f"{optimizer}: inside averaged_weights(...) the model has the averages of its weights, and the optimizer "
            "neither steps nor is read, saved or loaded; do that after the with block"
        )


def keep_out_of_graphs(kind: type[Any]) -> None:
    """Exclude the `step` of an optimizer class from torch.compile: graphs break there and the step runs eagerly.

    Call it in the constructor before PyTorch's, which wraps `step` once. A decorator would import the compiler together
    with this package.
    """
    if not hasattr(kind.step, "hooked"):
        kind.step = torch.compiler.disable(kind.step)


def weight_version(param: Tensor) -> int:
    """Return how often a parameter was written. Writes to a plain parameter through `.data` are not counted."""
    quantized = components.quantized_local(param)
    if quantized is None:
        return private_torch.in_place_changes(param)
    return quantized.quantized_storage.seen_version()


def plain_versions(params: Iterable[Tensor]) -> dict[Tensor, int]:
    """Return `weight_version` of each parameter that is not quantized."""
    return {param: weight_version(param) for param in params if components.quantized_local(param) is None}


def check_trainable(optimizer: str, name: str, param: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that a parameter has values and is quantized or of one of the given dtypes.

    Raises:
        ConfigurationError: the parameter is on the meta device or has another dtype.
    """
    if param.is_meta:
        raise ConfigurationError(
            f"{optimizer}: {name} is on the meta device; call reset_parameters() on the modules first"
        )
    if components.quantized_local(param) is None and param.dtype not in dtypes:
        raise ConfigurationError(limits.refusal("parameter dtype", f"{optimizer}: {name} is {param.dtype}"))


def check_parameters(named: Iterable[tuple[str, Tensor]], also: Mapping[str, Tensor] | None = None) -> None:
    """Check that a quantized parameter's random key is equal on all ranks and unique, and that all shards are where
    checkpoints and random bits expect them.

    `also`: more int64 tensors [1] that must be equal on all ranks. Runs one collective per axis of each mesh.

    Raises:
        ConfigurationError: two parameters have the same key, or a shard is misplaced.
        RankMismatchError: keys differ between ranks.
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
    """Describe a value in a message: "a DTensor", "a plain tensor", or its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "a DTensor" if isinstance(value, DTensor) else "a plain tensor"


def check_alike(param: Tensor, other: Tensor, name: str, what: str) -> None:
    """Check that a parameter and its gradient or state have the same shape, and that both or neither are DTensors.

    Raises:
        ConfigurationError: they differ.
    """
    if param.shape == other.shape and isinstance(param, DTensor) is isinstance(other, DTensor):
        if not isinstance(param, DTensor) or (
            param.placements == other.placements and param.device_mesh == other.device_mesh  # type: ignore[attr-defined]
        ):
            return
    if kind(param) != kind(other):
        raise ConfigurationError(f"{name} is {kind(param)} but its {what} is {kind(other)}; both must be the same")
    if isinstance(param, DTensor) and isinstance(other, DTensor):
        specs = [(tuple(t.placements), t.device_mesh) for t in (param, other)]
        if specs[0] != specs[1]:
            raise ConfigurationError(
                f"{name} has placements {specs[0][0]} on {specs[0][1]}, but its {what} {specs[1][0]} on {specs[1][1]}; "
                "redistribute it to the parameter's"
            )
    shapes = [tuple(private_torch.local_tensor(t).shape) for t in (param, other)]
    if param.shape != other.shape or shapes[0] != shapes[1]:
        raise ConfigurationError(
            f"{name} has shape {tuple(param.shape)} (local {shapes[0]}), but its {what} {tuple(other.shape)} (local "
            f"{shapes[1]}); both must be the same"
        )


def check_local(param: DTensor, values: Tensor, name: str, what: str) -> None:
    """Check that a plain tensor has the shape of this rank's shard of a parameter.

    Raises:
        ConfigurationError: the shapes differ.
    """
    local = tuple(private_torch.local_tensor(param).shape)
    if tuple(values.shape) != local:
        raise ConfigurationError(
            f"{name} has shape {tuple(param.shape)}, of which this rank holds {local}; its {what} is a plain tensor of "
            f"shape {tuple(values.shape)}: give this rank's part, or a DTensor of the whole shape"
        )


class FlagLayout:
    """The parameters of `GradientFlags`, and the ranks that share their gradients or step together.

    Attributes:
        names: names of the parameters, ordered by `indices`.
        indices: indices of the parameters of each sharding group.
        ranks: the process groups of all ranks that step together.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        names, params = zip(*entries, strict=True) if (entries := list(named)) else ((), ())
        self.indices: dict[Groups, list[int]] = {}
        for index, param in enumerate(params):
            self.indices.setdefault(process_groups.sharding_group(param), []).append(index)
        self.names = [names[index] for indices in self.indices.values() for index in indices]
        self.ranks = process_groups.united(dict.fromkeys(map(process_groups.stepping_group, params)))
        self.has_experts = any(map(process_groups.is_expert_parallel, params))
        self.are_wide = [param.dtype is torch.float64 and components.quantized_local(param) is None for param in params]
        self.device = private_torch.local_tensor(params[0]).device if params else torch.device("cpu")


class GradientFlags:
    """For each gradient, whether any rank has it, whether any rank lacks it, and its worst problem (`TOO_LARGE`, ...).

    The flags are float32 [3, parameters], registered with `reduction` by the constructor; call `gather` after its
    `reduce`. Only `skips`, `large_gradient` and the checks wait for the device.

    Args:
        layout: the parameters.
        grads: this rank's gradient of each parameter, or None.
        reduction: collects the flags for one collective.
        exceeding: problems of the gradients, float32 [parameters]; computed here if None.
        wrong: other problems, float32, of the first len(wrong) parameters.
    """

    def __init__(
        self,
        layout: FlagLayout,
        grads: Sequence[Tensor | None],
        reduction: FlatMax,
        exceeding: Tensor | None = None,
        wrong: Tensor | None = None,
    ) -> None:
        self._layout, self._names = layout, layout.names
        self._has_none = all([grad is None for grad in grads])
        self._parts: list[Tensor] = []
        self._sent: PendingFlag | None = None
        if grads:
            flags = _flags_of(layout, grads, exceeding)
            if wrong is not None:
                flags[2, : len(wrong)] = torch.maximum(flags[2, : len(wrong)], wrong.to(flags.device))
            self._parts = (
                [flags]
                if len(layout.indices) == 1
                else [torch.stack([flags[:, index] for index in indices], dim=1) for indices in layout.indices.values()]
            )
        for group, part in zip(layout.indices, self._parts, strict=True):
            if group:
                reduction.add(part, group)

    def gather(self) -> None:
        """Build `table` from the reduced flags.

        A collective call if parameters are sharded over different axes or ranks hold different parameters.
        """
        if not self._parts:
            self.table = torch.zeros(3, 0, dtype=torch.float32, device="cpu")
            return
        self.table = torch.cat(self._parts, dim=1) if len(self._parts) > 1 else self._parts[0]
        if len(self._parts) > 1 or self._layout.has_experts:
            # A rank outside the group of a bad gradient must skip too: add a column that summarizes all parameters.
            present, missing = self.table[0].amax(), (self.table[0] * self.table[1]).amax()
            any_parameter = torch.stack([present, missing, self.table[2].amax()]).unsqueeze(1)
            reduction = FlatMax()
            reduction.add(any_parameter, self._layout.ranks)
            reduction.reduce()
            self.table = torch.cat([self.table, any_parameter], dim=1)
            self._names = [*self._names, "a parameter of other ranks"]

    def warn_of_no_gradient(self) -> None:
        """Warn if no parameter has a gradient, for instance because the model was wrapped after the optimizer was
        built.

        Call it from `step`, so that the warning points at the caller of `step`.
        """
        capturing = self.table.is_cuda and torch.cuda.is_current_stream_capturing()
        # Waits for the device only if this rank has no gradient.
        if not self._has_none or capturing or self.table[0].any():
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
        """Return a bool scalar on the device: a gradient is missing on some ranks only, or has a problem."""
        return (self.table[0] * self.table[1] + self.table[2]).any()

    def send(self) -> Tensor:
        """Return `bad`, and start copying it to the host, so that `skips` does not wait for work queued from now on."""
        bad = self.bad()
        self._sent = PendingFlag(bad)
        return bad

    @property
    def deferred(self) -> bool:
        """Whether `skips` would wait for the device: the copy started by `send` has not arrived."""
        return self._sent is not None and not self._sent.is_here

    def skips(self, groups: list[dict[str, Any]], most_in_a_row: int, deferred: bool = False) -> bool:
        """Return whether the step must be skipped, and count it in every group.

        `deferred`: the step was counted as applied, and the device can be several steps ahead.

        Raises:
            RankMismatchError, NonFiniteGradientError: see `check_missing` and `check_skipped`. If not `deferred`, also
                mismatches that delayed scaling found on the GPU in earlier passes (`MISMATCHES`).
        """
        bad = bool(PendingFlag(self.bad()) if self._sent is None else self._sent)
        if not deferred:
            MISMATCHES.settle()  # does not wait: the device has already reached this point
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
        """Warn about a large gradient, or about the first of consecutive steps with gradients that are not finite."""
        if name := self.large_gradient():
            warn_user(f"{too_large(name)}; {which} skipped")
        elif groups[0]["skipped_in_a_row"] == 1:
            warn_user(
                f"the gradient of {self._first(self.table[2] > 0)} is infinite or NaN; {which} skipped, and nothing "
                f"changed (skipped_steps counts; {most_in_a_row} in a row are an error)"
            )

    def large_gradient(self) -> str:
        """Return the name of the first parameter with a finite but too large gradient; empty if a worse problem exists.

        All ranks agree on whether the name is empty.
        """
        is_worst = self.table.numel() > 0 and bool(self.table[2].amax() == TOO_LARGE)
        return self._first(self.table[2]) if is_worst else ""

    def check_missing(self) -> None:
        """Raise on every rank, once, if a gradient is missing on some ranks.

        Raises:
            RankMismatchError: names the first such parameter.
        """
        missing = self.table[0] * self.table[1]
        if missing.any():
            name = self._first(missing)
            self.table.zero_()
            raise RankMismatchError(
                f"{name} has a gradient on some ranks only; all ranks must use the same parameters in every step"
            )

    def check_skipped(self, groups: list[dict[str, Any]], most_in_a_row: int) -> None:
        """Raise if `most_in_a_row` consecutive steps were skipped, or if only a checkpoint can help.

        Raises:
            NonFiniteGradientError: names the first bad parameter of the last step.
            ConfigurationError: the learning rate was invalid.
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
    """Describe a parameter whose gradient is finite but too large, for messages."""
    return (
        f"the gradient of {name} is finite, but above {LARGEST_GRADIENT:g} ({LARGEST_WIDE_GRADIENT:g} if it is "
        "float64), so that its square overflows, and so would the second moment, for good; scale the loss down, or "
        "call quantshard.optimizers.clip_grad_norm_ before the step"
    )


def _flags_of(layout: FlagLayout, grads: Sequence[Tensor | None], exceeding: Tensor | None) -> Tensor:
    flags, index = torch.zeros(3, len(grads), dtype=torch.float32, device=layout.device), 0
    # Filling runs on the device; a copy from the host would synchronize.
    for is_present, run in groupby([grad is not None for grad in grads]):
        end = index + len(list(run))
        flags[0 if is_present else 1, index:end].fill_(1.0)
        index = end
    if exceeding is None:
        columns = [torch.zeros((), dtype=torch.float32, device=layout.device)] * len(grads)
        for wide, largest in ((False, LARGEST_GRADIENT), (True, LARGEST_WIDE_GRADIENT)):
            present = {
                index: private_torch.local_tensor(grad)
                for index, (is_wide, grad) in enumerate(zip(layout.are_wide, grads, strict=True))
                if grad is not None and is_wide is wide
            }
            values = kernel_dispatch.exceeding(list(present.values()), largest) if present else flags[2, :0]
            for index, value in zip(present, values.to(layout.device).unbind(), strict=True):
                columns[index] = value
        exceeding = torch.stack(columns)
    flags[2].copy_(exceeding)
    return flags
