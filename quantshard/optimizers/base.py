"""Base of all optimizers here: the parameters, who wrote them, and the checks of group entries."""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.numerics.states import EMA_DECAY
from quantshard.optimizers import guards
from quantshard.state_storage import STATE_ARGUMENTS
from quantshard.tensor import components

_BELOW_ONE: Final = 1 - 2.0**-25
"""The largest number that is less than 1 in float32."""

RANGES: Final = {
    "lr": (0.0, guards.LARGEST_RATE),
    "weight_decay": (0.0, 1e9),  # it can be added to the gradient, whose square must be finite
    "eps": (0.0, math.inf),
    "betas": (0.0, _BELOW_ONE),
    "momentum": (0.0, _BELOW_ONE),
    EMA_DECAY: (0.0, _BELOW_ONE),
}
"""The range of each number in a parameter group. Infinite and NaN values are invalid too."""

SWITCHES = ("capturable", "amsgrad", "maximize", "differentiable")
"""Options of PyTorch's optimizers that have no effect in a group here. PyTorch puts them into groups when they are
off."""


def check_ranges(where: str, group: Mapping[str, Any], names: Container[str]) -> None:
    """Check the numbers of a parameter group against `RANGES`. Tensors on a device are not read.

    Args:
        where: start of the error message.
        group: the group's entries.
        names: the entries to check.

    Raises:
        ConfigurationError: a value is not a number in its range.
    """
    for name, (lowest, highest) in RANGES.items():
        if name not in group or name not in names:
            continue
        value: Any = group[name]
        numbers: Sequence[Any] = (value,)
        if name == "betas":
            numbers = value if isinstance(value, list | tuple) else (None,)
        for number in numbers:
            if isinstance(number, Tensor) and number.device.type != "cpu":
                continue
            if not isinstance(number, int | float | Tensor) or not lowest <= number <= highest or number == math.inf:
                raise ConfigurationError(f"{where}: {name}={value!r} is invalid: use {_range(lowest, highest)}")


def _range(lowest: float, highest: float) -> str:
    if highest == _BELOW_ONE:
        return f"numbers from {lowest:g} to less than 1 (in float32)"
    return f"a finite number, at least {lowest:g}" + ("" if highest == math.inf else f" and at most {highest:g}")


class ParameterOptimizer(torch.optim.Optimizer):
    """Base of `MasterOptimizer` and `MasterWeights`.

    The keys of `_names` are all parameters in the order of the groups, which is the order of collective calls.
    """

    checked_numbers: tuple[str, ...] = ("lr", "weight_decay", EMA_DECAY)
    """Group entries that must be in their range (`RANGES`)."""

    def _set_up(self, max_skipped_in_a_row: int) -> None:
        """Set up what `add_param_group` needs; call it before PyTorch's constructor."""
        guards.keep_out_of_graphs(type(self))
        self._name = type(self).__name__
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._names: dict[Tensor, str] = {}
        self._versions: dict[Tensor, int] = {}
        self._is_built = False
        self._is_assigned = False  # values were loaded or set, which new states would lose
        self._averages_swapped_in = False

    # Groups ----------------------------------------------------------------------------------------------------------

    def _checked_group(self, param_group: dict[str, Any], options: Container[str] = ()) -> dict[str, Any]:
        """Return a new group with its parameters in a list.

        `options`: names that are valid although they are options of the optimizers here.

        Raises:
            ConfigurationError: it has a parameter twice, or an option that applies to all groups.
        """
        group, number = dict(param_group), len(self.param_groups)
        where, params = f"{self._name}: param_groups[{number}]", group["params"]
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
        ids = {id(entry[1] if isinstance(entry, tuple) else entry) for entry in group["params"]}
        if len(ids) < len(group["params"]):
            raise ConfigurationError(f"{where} has a parameter twice, so a step would update it twice; give it once")
        invalid = [name for name in STATE_ARGUMENTS if name in group and name not in options]
        invalid += [name for name in SWITCHES if group.get(name) and name not in options]
        if group.get(EMA_DECAY) and not self._is_averaging:
            invalid.append(EMA_DECAY)
        if invalid:
            raise ConfigurationError(f"{where}: {', '.join(invalid)} cannot be set for one group, but only for all")
        return group

    def _add_names(self, group: Mapping[str, Any]) -> None:
        names = group.get("param_names") or [f"parameter {len(self._names) + i}" for i in range(len(group["params"]))]
        self._names |= dict(zip(group["params"], names, strict=True))

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped so far because a gradient was not finite."""
        return int(self.param_groups[0]["skipped_steps"])

    # Parameters ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _is_averaging(self) -> bool:
        """Whether averages of the weights are kept."""

    @abstractmethod
    def _has_updates(self) -> bool:
        """Whether a step has changed the states."""

    @abstractmethod
    def _make_states(self) -> None:
        """Make the names and states of all parameters in the groups, replacing all previous ones."""

    def _adopt_replaced_parameters(self) -> None:
        """Make new states if parameters were replaced in the groups. Call it before every access to a state.

        accelerate shards a model after its optimizer was built, and then puts the sharded parameters into the groups.

        Raises:
            ConfigurationError: averages are swapped in, or the states hold updates or loaded values.
        """
        if self._averages_swapped_in:
            guards.check_own_weights(self._name, True)
        params = [param for group in self.param_groups for param in group["params"]]
        if len(params) == len(self._names) and all(map(operator.is_, params, self._names)):
            return
        if self._is_assigned or self._has_updates():
            raise ConfigurationError(
                f"{self._name}: the parameters in its groups are not those that its states were made for; replace "
                "parameters before the first step or load, add groups by add_param_group(), or build a new optimizer"
            )
        self._make_states()

    def _check_fits(self, param: Tensor, made_for: tuple[torch.dtype, torch.Size], is_joined: bool) -> None:
        """Check that a parameter still has the shape and dtype for which its states were made.

        `Module.half` and transformers' resizing of embeddings replace a parameter's data.

        Args:
            param: the parameter.
            made_for: its dtype and shape when its states were made.
            is_joined: the states depend on the dtype.

        Raises:
            ConfigurationError: the shape changed, or the dtype changed to one that the states do not fit.
        """
        dtype, shape = made_for
        is_wider = param.dtype is torch.float64 and components.quantized_local(param) is None
        if param.shape == shape and (param.dtype is dtype or not (is_joined or is_wider)):
            return
        raise ConfigurationError(
            f"{self._name}: {self._names[param]} was {dtype!s} {tuple(shape)} when its states were made, and is now "
            f"{param.dtype!s} {tuple(param.shape)}; build the optimizer after the model is cast or resized"
        )

    def _raise_for_frozen(self, param: Tensor) -> None:
        raise ConfigurationError(
            f"{self._names[param]} was frozen when this {self._name} was built and has a gradient now; call "
            "initialize_state(parameter) when you unfreeze it"
        )

    def _raise_for_new_values(self, param: Tensor) -> None:
        raise ConfigurationError(
            f"{self._names[param]} was given new values after this {self._name} was built, and the next step would "
            "overwrite them with its masters; load the optimizer's state too, or reseed_masters(). For averages of "
            "weights use ema_decay and quantshard.optimizers.averaged_weights"
        )

    def _check_begins(self, decay: float) -> None:
        """Check the argument of `begin_average`."""
        where = f"{self._name}.begin_average({decay})"
        check_ranges(where, {EMA_DECAY: decay}, (EMA_DECAY,))
        if self._is_averaging or not decay:
            raise ConfigurationError(
                f"{where}: "
                + ("averages are kept already; set group['ema_decay']" if decay else "a decay of 0 keeps no average")
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None (default) or to zero."""
        self._adopt_replaced_parameters()
        super().zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterOptimizer:
        raise UnsupportedOperationError(
            f"a {self._name} is not copied: its states belong to its parameters; build another one over the copied "
            "model and load this one's state_dict() into it"
        )
