"""Base of all optimizers here: their groups and parameters, who wrote the parameters, and skipped steps."""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import numerics, private_torch
from quantshard.collectives import process_groups
from quantshard.collectives.delayed_scaling import MISMATCHES
from quantshard.errors import ConfigurationError, NonFiniteGradientError, RankMismatchError, UnsupportedOperationError
from quantshard.numerics.states import EMA_DECAY, ROUNDING_SEED
from quantshard.optimizers import checks, loading
from quantshard.optimizers.guards import LARGEST_RATE, MAIN_GRAD, GradientFlags
from quantshard.tensor import components
from quantshard.tensor.parameter_state import RNG_KEY, SEED_STREAM, random_key

_BELOW_ONE: Final = 1 - 2.0**-25
"""The largest number that is less than 1 in float32."""

RANGES: Final = {
    "lr": (0.0, LARGEST_RATE),
    "weight_decay": (0.0, 1e9),  # it can be added to the gradient, whose square must be finite
    "eps": (0.0, 3e38),
    "betas": (0.0, _BELOW_ONE),
    "momentum": (0.0, _BELOW_ONE),
    EMA_DECAY: (0.0, _BELOW_ONE),
    "max_grad_norm": (0.0, math.inf),
    "max_grad_value": (0.0, math.inf),
}

COUNTERS: Final = ("step", "skipped_steps", "skipped_in_a_row")

GRAD_NORM: Final = "grad_norm"
"""Group entry: the last finite norm of all gradients, by which the next backward scales them (`max_grad_norm`)."""


def counters_to_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace tensors in the groups of an optimizer's state dict by numbers; a `state_dict` post hook."""
    for group in state_dict["param_groups"]:
        numbers = (*COUNTERS, "lr", GRAD_NORM)
        group.update({key: group[key].item() for key in numbers if isinstance(group.get(key), Tensor)})


def check_ranges(where: str, group: Mapping[str, Any], names: Container[str]) -> None:
    """Check the entries `names` of a parameter group against `RANGES`. Tensors on a device are not read."""
    for name in [name for name in RANGES if name in group and name in names]:
        (lowest, highest), value = RANGES[name], group[name]
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, Tensor) and number.device.type != "cpu":
                continue
            if not isinstance(number, int | float | Tensor) or not lowest <= number <= highest:
                bound = "less than 1 (in float32)" if highest < 1 else f"at most {highest:g}"
                rule = "a number, at least 0" if highest == math.inf else f"finite, at least {lowest:g} and {bound}"
                raise ConfigurationError(f"{where}: {name}={value!r} must be {rule}")


def rounding_seed(params: Sequence[Tensor]) -> int:
    """Return a seed for an optimizer's random bits, from the key of the first quantized weight, which replicas share.

    Without quantized weights, it is drawn from torch's generator. Ranks with different parameters (experts, several
    meshes) use the largest of their seeds.
    """
    first = next((storage for param in params if (storage := components.quantized_storage(param)) is not None), None)
    if first is None:
        seed = int(random_key())
    else:
        key = int(first.state[RNG_KEY])
        low, high = numerics.random_words(key, 0, SEED_STREAM, (1, 2))[0].tolist()
        seed = int(high << 32 | low) - (1 << 63)
    groups = dict.fromkeys(map(process_groups.stepping_group, params))
    if len(groups) <= 1 and not any(map(process_groups.is_expert_parallel, params)):
        return seed
    largest = torch.tensor([seed], dtype=torch.int64, device="cpu")
    for group in process_groups.united(groups):
        largest = largest.to(process_groups.collective_device(group))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return int(largest)


def weight_version(param: Tensor) -> int:
    """Return how often a parameter was written. Writes to a plain parameter through `.data` are not counted."""
    storage = components.quantized_storage(param)
    return private_torch.in_place_changes(param) if storage is None else storage.seen_version()


def check_alike(param: Tensor, other: Tensor, name: str, what: str) -> None:
    same = param.shape == other.shape and isinstance(param, DTensor) is isinstance(other, DTensor)
    if same and isinstance(param, DTensor) and isinstance(other, DTensor):
        local_shapes = [private_torch.local_tensor(tensor).shape for tensor in (param, other)]
        same = param.placements == other.placements and param.device_mesh == other.device_mesh
        same = same and local_shapes[0] == local_shapes[1]
    if not same:
        raise ConfigurationError(f"{name} is {checks.layout(param)}, but its {what} is {checks.layout(other)}")


class ParameterOptimizer(torch.optim.Optimizer):
    """Base of `ElementwiseOptimizer` and `MasterWeights`. The keys of `_names` are all parameters, in order."""

    checked_numbers: tuple[str, ...] = ("lr", "weight_decay", EMA_DECAY)
    """Group entries that must be in their range (`RANGES`)."""

    _capturable = False
    _release: Any = None
    """A `GradientRelease`, if parameters step during backward."""

    reads_main_grad = True

    def _set_up(self, max_skipped_in_a_row: int) -> None:
        """Set up what `add_param_group` needs; call it before PyTorch's constructor."""
        if not hasattr(type(self).step, "hooked"):
            # Graphs of torch.compile break here. A decorator would import the compiler together with this package.
            type(self).step = torch.compiler.disable(type(self).step)  # type: ignore[method-assign]
        self._name = type(self).__name__
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._names: dict[Tensor, str] = {}
        self._versions: dict[Tensor, int] = {}
        self._made_for: dict[Tensor, tuple[torch.dtype, torch.Size]] = {}
        self._is_built = False
        self._is_assigned = False  # values were loaded or set, which new states would lose
        self._averages_swapped_in = False
        self._last_bad_flags: GradientFlags | None = None
        self._unread: GradientFlags | None = None  # flags of the last step, if they are still on the device
        self._late_error: Exception | None = None
        self._reported_skips = -1  # if capturable: number of skipped steps at the last error about them

    def check_group(self, where: str, group: Mapping[str, Any]) -> None:
        """Validate a group's values, by default those in `checked_numbers`. `where`: start of the error messages."""
        # A learning rate on a device is checked there (`guards.wrong_rates`).
        check_ranges(where, group, [name for name in self.checked_numbers if name != "lr" or not self._capturable])

    def _checked_group(self, param_group: dict[str, Any], options: Container[str] = ()) -> dict[str, Any]:
        """Return a new group with its parameters in a list. Options of the whole optimizer, except `options`, raise."""
        group, params = dict(param_group), param_group["params"]
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
        where = f"{self._name}: param_groups[{len(self.param_groups)}]"
        checks.check_group_options(where, group, options, self._is_averaging)
        return group

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(candidate is param for candidate in group["params"]):
                return group
        raise ConfigurationError(f"a tensor {tuple(param.shape)} is not in this {self._name}; give DTensors, not parts")

    def _add_names(self, group: Mapping[str, Any]) -> None:
        names = group.get("param_names") or [f"parameter {len(self._names) + i}" for i in range(len(group["params"]))]
        self._names |= dict(zip(group["params"], names, strict=True))

    @property
    def _seed(self) -> int | None:
        """Seed of the random bits, stored in every group; None if nothing is rounded stochastically."""
        seed: int | None = self.param_groups[0].get(ROUNDING_SEED)
        return seed

    @property
    @abstractmethod
    def _is_averaging(self) -> bool: ...

    @abstractmethod
    def _has_updates(self) -> bool:
        """Return whether a step has changed the states."""

    @abstractmethod
    def _make_states(self) -> None:
        """Make the names and states of all parameters in the groups, replacing all previous ones."""

    def _adopt_replaced_parameters(self) -> None:
        """Make new states if parameters were replaced in the groups. Call it before every access to a state.

        accelerate shards a model after its optimizer was built, and then puts the sharded parameters into the groups.
        """
        if self._averages_swapped_in:
            raise ConfigurationError(f"{self._name} cannot be used inside averaged_weights(...); do that after it")
        params = [param for group in self.param_groups for param in group["params"]]
        if len(params) == len(self._names) and all(map(operator.is_, params, self._names)):
            return
        if self._is_assigned or self._has_updates():
            remedy = "replace them before the first step or load, or build a new optimizer"
            raise ConfigurationError(f"{self._name}: its states were made for other parameters than it has; {remedy}")
        self._make_states()

    def _check_parameters(self) -> None:
        checks.check_parameters(self._name, self._names, self._seed)

    def _is_overwritten(
        self, param: Tensor, grad: Tensor | None, version: int, has_master: bool, depends_on_dtype: bool
    ) -> bool:
        """Return whether others wrote to a plain parameter that has a master.
        Raises if the parameter no longer fits its states: `Module.half` and resized embeddings replace its data."""
        if grad is not None and self._made_for[param] != (param.dtype, param.shape):
            dtype, shape = self._made_for[param]
            is_wider = param.dtype is torch.float64 and components.quantized_local(param) is None
            if param.shape != shape or (param.dtype is not dtype and (depends_on_dtype or is_wider)):
                problem = (
                    f"was {dtype} {tuple(shape)} when its states were made, now {param.dtype} {tuple(param.shape)}"
                )
                raise ConfigurationError(f"{self._names[param]} {problem}; build the optimizer after the model is cast")
        if self._versions.setdefault(param, version) == version or not has_master:
            return False
        if components.quantized_local(param) is not None:
            problem = f"{self._names[param]} was given new values after this {self._name} was built"
            remedy = "its masters would overwrite them: load the optimizer's state too, or call reseed_masters()"
            raise ConfigurationError(f"{problem}; {remedy}")
        return True

    def _raise_for_frozen(self, param: Tensor) -> None:
        name = self._names[param]
        raise ConfigurationError(f"{name} was frozen when this {self._name} was built; call initialize_state(param)")

    # Skipped steps

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped so far because a gradient was not finite or, if `capturable`, a learning rate was
        invalid. Reading it waits for the device and, if `capturable`, raises the errors that `step` could not raise."""
        self._raise_for_bad_steps()
        self._read_flags()
        return int(self.param_groups[0]["skipped_steps"])

    @property
    def large_gradient(self) -> str:
        """Name of the first parameter whose finite gradient exceeded `guards.LARGEST_GRADIENT` in the last skipped
        step. Empty if that step had a worse problem. Reading it waits for the device."""
        self._read_flags()
        return "" if self._last_bad_flags is None else self._last_bad_flags.large_gradient()

    def _skips(self, flags: GradientFlags, deferred: bool = False) -> bool:
        """Return whether a step must be skipped, and count it; `deferred`: whether the device has skipped it."""
        is_skipped = flags.skips(self.param_groups, self._max_skipped_in_a_row, deferred)
        if is_skipped:
            self._last_bad_flags = flags
        return is_skipped

    def _read_flags(self) -> None:
        """Wait for the flags of the last step, and count the step as skipped if the device skipped it."""
        flags, self._unread = self._unread, None
        if flags is not None:
            try:
                self._skips(flags, deferred=True)
            except (NonFiniteGradientError, RankMismatchError) as error:
                # raised by the next step, which all ranks reach
                self._last_bad_flags, self._late_error = flags, error

    def _count_on_device(self, bad: Tensor, flags: GradientFlags) -> None:
        """Count a step of a `capturable` optimizer without reading `bad`, and record the flags of a bad one."""
        for group in self.param_groups:
            skipped = bad.to(group["step"].device).to(torch.int64)
            group["step"].add_(1 - skipped)
            group["skipped_steps"].add_(skipped)
            group["skipped_in_a_row"].add_(1).mul_(skipped)
        table = flags.table
        if self._last_bad_flags is None or self._last_bad_flags.table.shape != table.shape:
            self._last_bad_flags, flags.table = flags, torch.zeros_like(table)
        last_table = self._last_bad_flags.table
        last_table.copy_(torch.where(bad, table, last_table))

    def _raise_for_bad_steps(self) -> None:
        """Raise, once, the errors that `step` could not raise because it is `capturable`."""
        if not self._capturable:
            return
        MISMATCHES.settle()
        skipped = int(self.param_groups[0]["skipped_steps"])
        # Raise only once, so that a load can still get a state dict.
        if skipped == self._reported_skips or self._last_bad_flags is None:
            return
        try:
            self._last_bad_flags.check_missing()
            self._last_bad_flags.check_skipped(self.param_groups, self._max_skipped_in_a_row)
        except (NonFiniteGradientError, ConfigurationError):
            self._reported_skips = skipped
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, with numbers even if `capturable`. Raises the errors that `step` could not raise."""
        self._raise_for_bad_steps()
        if self._release is not None:
            self._release.check_ended()
        return self.state_dict_to_fill()

    def state_dict_to_fill(self) -> dict[str, Any]:
        """Return the state dict for a load, without errors about bad steps: a load is how to recover from them."""
        self._read_flags()  # the next step raises errors, because one rank can be here alone
        self._adopt_replaced_parameters()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class into the states, without casts; raise a CheckpointError if it cannot."""
        before, after = private_torch.load_hooks(self)
        state_dict = dict(state_dict)  # pre-hooks can change or replace a copy, as in PyTorch
        for hook in [*before.values()]:
            returned = hook(self, state_dict)
            state_dict = state_dict if returned is None else returned
        self._load(state_dict)
        for hook in [*after.values()]:
            hook(self)

    @torch.no_grad()
    def _load(self, state_dict: dict[str, Any]) -> None:
        self._adopt_replaced_parameters()
        self._read_flags()
        if self._release is not None:
            self._release.reset()
        self._is_assigned |= loading.load_optimizer_state(self, state_dict, self._names)
        self._late_error, self._reported_skips = None, -1  # a load recovers from errors
        # Forget the versions of quantized parameters, so that the model can be loaded before or after.
        plain = [param for param in self._versions if components.quantized_local(param) is None]
        self._versions = {param: weight_version(param) for param in plain}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None (default) or to zero. Each `main_grad` is set to zero."""
        self._adopt_replaced_parameters()
        if self._release is not None:
            self._release.reset()
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                main_grad = vars(param).get(MAIN_GRAD)
                if main_grad is not None:
                    main_grad.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterOptimizer:
        raise UnsupportedOperationError(f"a {self._name} cannot be copied; build another and load the state_dict()")
