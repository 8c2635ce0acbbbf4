"""Access to an optimizer's states: reading and setting them, and their averages, outside of steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.errors import ConfigurationError
from quantshard.numerics.states import AVERAGE, EMA_DECAY, MASTER, WEIGHT
from quantshard.optimizers import averaging
from quantshard.optimizers.base import ParameterOptimizer, check_alike, weight_version
from quantshard.optimizers.state import OptimizerState, assign, initial_master, make_average
from quantshard.tensor import components


class StateAccess(ParameterOptimizer):
    """The methods of `ElementwiseOptimizer` that read or set its states outside of steps."""

    _states: dict[Tensor, dict[str, OptimizerState]]
    _remainders: bool

    @abstractmethod
    def _drop_plan(self) -> None:
        """Make a new plan in the next step, because states were added or removed."""

    @abstractmethod
    def _initialize(self, param: Tensor, group: Mapping[str, Any], remainders: bool) -> None:
        """Allocate the states of a parameter of `group`."""

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Allocate a parameter's states: zeros, and a master that starts from the parameter.

        `store_param_remainders`: overrides the constructor's option for this parameter.
        """
        self._adopt_replaced_parameters()
        remainders = self._remainders if store_param_remainders is None else store_param_remainders
        self._initialize(param, self._group_of(param), remainders)

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Reset all masters and averages from the parameters, after loading new weights into the model alone."""
        self._adopt_replaced_parameters()
        for param, states in self._states.items():
            if MASTER in states:
                states[MASTER].seed(initial_master(param))
            if AVERAGE in states:
                assign(states[AVERAGE], states.get(MASTER, states[WEIGHT]).read())
            self._versions[param] = weight_version(param)

    @torch.no_grad()
    def begin_average(self, decay: float) -> None:
        """Start averaging the weights (`ema_decay`) from the present masters, as if all earlier steps had these."""
        self._adopt_replaced_parameters()
        averaging.check_begins(self, decay)
        for entries in (self.defaults, *self.param_groups):
            entries[EMA_DECAY] = float(decay)
        self._drop_plan()
        for param, states in self._states.items():
            states[AVERAGE] = make_average(param, states.get(MASTER, states[WEIGHT]))
            self.state[param] |= states[AVERAGE].tensors(AVERAGE)

    def drop_average(self) -> None:
        """Stop averaging the weights and free the averages."""
        self._adopt_replaced_parameters()
        for entries in (self.defaults, *self.param_groups, *self._states.values(), *self.state.values()):
            for name in (EMA_DECAY, AVERAGE):
                entries.pop(name, None)
        self._drop_plan()

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """Return a state in float32, by its role or as "master_param"; a DTensor if the parameter is one."""
        values = self._state_of(param, state_name).read()
        if isinstance(param, DTensor):
            return components.as_dtensor(values, param, list(param.placements), tuple(param.shape))
        return values

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Set a state from high-precision values, rounded to nearest. A collective call for a scaled state of a sharded
        parameter. Setting a master stored as remainders sets the parameter.

        The values have the parameter's shape and layout, or are a plain tensor with this rank's shard.
        """
        target, local = self._state_of(param, state_name), private_torch.local_tensor(param)
        like = param if isinstance(unscaled_state, DTensor) else local
        check_alike(like, unscaled_state, self._names[param], state_name)
        assign(target, private_torch.local_tensor(unscaled_state).to(local.device).float())
        self._is_assigned = True

    @torch.no_grad()
    def seed_master(self, param: Tensor, values: Tensor) -> None:
        """Set a master from local float32 values, but not its parameter. A collective call if ranks share blocks."""
        self._state_of(param, MASTER).seed(values)
        self._is_assigned = True

    def _state_of(self, param: Tensor, state_name: str) -> OptimizerState:
        self._adopt_replaced_parameters()
        self._group_of(param)
        states = {role: state for role, state in self._states.get(param, {}).items() if role != WEIGHT}
        if state_name not in states:
            raise ConfigurationError(
                f"{self._names[param]} has no state {state_name!r}, but {sorted(states) or 'none'}"
            )
        return states[state_name]
