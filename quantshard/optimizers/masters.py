"""Base of optimizers with master weights: allocates, saves and loads states. Subclasses add the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.collectives.delayed_scaling import MISMATCHES
from quantshard.errors import ConfigurationError, NonFiniteGradientError
from quantshard.numerics.states import AVERAGE, EMA_DECAY, MASTER, ROUNDING_SEED, WEIGHT, StateSpec
from quantshard.optimizers import loading
from quantshard.optimizers.base import (
    ParameterOptimizer,
    check_alike,
    check_ranges,
    initial_master,
    rounding_seed,
    weight_version,
)
from quantshard.optimizers.guards import GradientFlags
from quantshard.optimizers.state import (
    OptimizerState,
    assign,
    make_average,
    make_master,
    make_state,
    make_weight,
    rounded_roles,
)
from quantshard.state_storage import PLAIN_DTYPES, check_dtype, check_remainders
from quantshard.tensor import components

COUNTERS: Final = ("step", "skipped_steps", "skipped_in_a_row")
"""Group entries that count steps."""


def _counters_to_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace tensors in the groups of a `capturable` optimizer's state dict by numbers; a `state_dict` post hook."""
    for group in state_dict["param_groups"]:
        group.update({key: group[key].item() for key in (*COUNTERS, "lr") if isinstance(group[key], Tensor)})


class MasterOptimizer(ParameterOptimizer):
    """Holds parameters with their masters and `states`. `ElementwiseOptimizer` documents the arguments and adds the
    step."""

    states: ClassVar[tuple[StateSpec, ...]] = ()
    """States of each parameter, which start as zeros. Their roles are state dict keys, so renaming one breaks
    checkpoints."""

    group_entries = (ROUNDING_SEED,)
    """Group entries that a checkpoint must have if this optimizer has them, although `defaults` lacks them."""

    rate_dtype = torch.float32
    """Dtype of learning rates that are tensors (`capturable`)."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state_dtypes: Mapping[str, torch.dtype] | None = None,
        capturable: bool = False,
        master_weights: bool = True,
        master_weight_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        max_skipped_in_a_row: int = 10,
        ema_decay: float = 0.0,
    ) -> None:
        self._set_up(max_skipped_in_a_row)
        dtypes = dict(state_dtypes or {})
        roles = [spec.role for spec in self.states]
        shared = {spec.words_of for spec in self.states} - {None, *roles}
        if len({*roles, MASTER, AVERAGE, WEIGHT}) < len(roles) + 3 or shared:
            raise ConfigurationError(
                f"{self._name}.states = {self.states}: roles must differ, also from {MASTER!r}, {AVERAGE!r} and "
                f"{WEIGHT!r}, and words_of must be one of them"
            )
        if unknown := dtypes.keys() - set(roles):
            raise ConfigurationError(f"{self._name}(state_dtypes): it has no state {sorted(unknown)}, but {roles}")
        self._dtypes = {role: dtypes.get(role, torch.float32) for role in roles} | {MASTER: master_weight_dtype}
        for role, dtype in self._dtypes.items():
            check_dtype(self._name, role, dtype)
        self._master_weights, self._remainders = master_weights, store_param_remainders
        if store_param_remainders:
            check_remainders(self._name, master_weights, master_weight_dtype)
        self._capturable, self._use_decoupled_grad = capturable, use_decoupled_grad
        check_ranges(self._name, {EMA_DECAY: ema_decay}, (EMA_DECAY,))
        averages = {EMA_DECAY: float(ema_decay)} if ema_decay else {}
        super().__init__(params, {**defaults, **averages, **dict.fromkeys(COUNTERS, 0)})
        if capturable:
            self.register_state_dict_post_hook(_counters_to_numbers)  # first, so that later hooks see numbers
        self._states: dict[Tensor, dict[str, OptimizerState]] = {}  # with the parameter itself as WEIGHT
        self._plan: Any = None  # the `StepPlan` of `step`; None after a state was added or removed
        self._reported_skips = -1  # if capturable: number of skipped steps at the last error about them
        self._is_built = True
        self._make_states()

    def group_states(self, group: Mapping[str, Any]) -> tuple[StateSpec, ...]:
        """Return the states of a group's parameters: all of `states`, unless a subclass overrides this."""
        return self.states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and allocate its states. A collective call where parameters are sharded."""
        if self._is_built:
            self._adopt_replaced_parameters()
            self._read_flags()  # a skipped step counts in the present groups only
        group = self._checked_group(param_group)
        self.check_group(f"{self._name}: param_groups[{len(self.param_groups)}]", {**self.defaults, **group})
        super().add_param_group(group)
        if self._is_built:
            self._add_states(self.param_groups[-1])
            self._check_parameters()

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped so far because a gradient was not finite or, if `capturable`, a learning rate was
        invalid. On a GPU, reading it waits for the last step's gradients.

        If `capturable`, it also raises the errors that `step` could not raise.
        """
        if self._capturable:
            self._raise_for_bad_steps()
        self._read_flags()
        return super().skipped_steps

    @property
    def large_gradient(self) -> str:
        """Name of the first parameter whose finite gradient exceeded `guards.LARGEST_GRADIENT` in the last skipped
        step. Empty if that step had a worse problem. Reading it waits for the device."""
        self._read_flags()
        return "" if self._last_bad_flags is None else self._last_bad_flags.large_gradient()

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

    @property
    def _is_averaging(self) -> bool:
        return EMA_DECAY in self.defaults

    def _has_updates(self) -> bool:
        self._read_flags()
        return any(int(group["step"]) for group in self.param_groups)

    def _make_states(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        if self._names and any(components.quantized_local(param) is not None for param in params):
            for group in self.param_groups:
                group.pop(ROUNDING_SEED, None)  # it derives from the keys of the present weights
        for mapping in (self._states, self._made_for, self._names, self._versions):
            mapping.clear()
        self.state.clear()
        for group in self.param_groups:
            self._add_states(group)
        self._check_parameters()

    def _add_states(self, group: dict[str, Any]) -> None:
        """Make the names and states of a group's parameters."""
        self._add_names(group)
        for param in group["params"]:
            if param.requires_grad:
                self._initialize(param, group)
        if self._seed is not None:
            group[ROUNDING_SEED] = self._seed
        if self._capturable:
            first = next(iter([*group["params"], *self._names]), torch.empty(0, dtype=torch.float32, device="cpu"))
            device = private_torch.local_tensor(first).device
            group["lr"] = torch.as_tensor(group["lr"], dtype=self.rate_dtype, device=device).clone()
            group.update({key: torch.tensor(int(group[key]), dtype=torch.int64, device=device) for key in COUNTERS})

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Allocate a parameter's states: zeros, and a master that starts from the parameter.

        `store_param_remainders`: overrides the constructor's option for this parameter.
        """
        self._adopt_replaced_parameters()
        self._initialize(param, self._group_of(param), store_param_remainders)

    @torch.no_grad()
    def _initialize(self, param: Tensor, group: Mapping[str, Any], store_param_remainders: bool | None = None) -> None:
        remainders = self._remainders if store_param_remainders is None else store_param_remainders
        if remainders:
            check_remainders(self._name, self._master_weights, self._dtypes[MASTER])
        self._check_trainable(param, PLAIN_DTYPES)
        if self._capturable and not self._master_weights and components.quantized_local(param) is not None:
            # a captured step would repeat its random draw, whose number the host reads
            raise ConfigurationError(
                f"{self._name}(capturable=True, master_weights=False): {self._names[param]} is "
                f"{private_torch.local_tensor(param)!r} and needs a master; use masters, or capturable=False"
            )
        states = {
            spec.role: make_state(param, self._dtypes[spec.role], spec.nonnegative) for spec in self.group_states(group)
        }
        master = make_master(param, self._dtypes[MASTER], remainders) if self._master_weights else None
        if master is not None:
            master.seed(initial_master(param))
            states[MASTER] = master
        states[WEIGHT] = make_weight(param)
        if self._is_averaging:
            states[AVERAGE] = make_average(param, states.get(MASTER, states[WEIGHT]))
        self._states[param], self._made_for[param], self._plan = states, (param.dtype, param.shape), None
        self._versions[param] = weight_version(param)
        self.state[param] = {
            key: tensor
            for role, state in states.items()
            if role != WEIGHT
            for key, tensor in state.tensors(role).items()
        }
        if self._seed is None and rounded_roles(states):
            seed = rounding_seed([param for group in self.param_groups for param in group["params"]])
            for entries in self.param_groups:
                entries[ROUNDING_SEED] = seed

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
        """Start averaging the weights (`ema_decay`), for instance after loading a checkpoint without averages.

        Averages start from the present masters (or the parameters without one), weighted as if all earlier steps had
        had these values: the next step's share follows from its step number (`numerics.adam`).
        """
        self._adopt_replaced_parameters()
        self._check_begins(decay)
        for entries in (self.defaults, *self.param_groups):
            entries[EMA_DECAY] = float(decay)
        self._plan = None
        for param, states in self._states.items():
            states[AVERAGE] = make_average(param, states.get(MASTER, states[WEIGHT]))
            self.state[param] |= states[AVERAGE].tensors(AVERAGE)

    def drop_average(self) -> None:
        """Stop averaging the weights and free the averages."""
        self._adopt_replaced_parameters()
        for entries in (self.defaults, *self.param_groups):
            entries.pop(EMA_DECAY, None)
        self._plan = None
        for param, states in self._states.items():
            states.pop(AVERAGE, None)
            self.state[param].pop(AVERAGE, None)

    def __getstate__(self) -> dict[str, Any]:
        self._read_flags()
        return super().__getstate__()

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

        The values have the parameter's shape and layout, or are a plain tensor with this rank's shard, as returned by
        the local tensor's `get_high_precision_init_val`.
        """
        state, name = self._state_of(param, state_name), self._names[param]
        local_shape = tuple(private_torch.local_tensor(param).shape)
        if not isinstance(param, DTensor) or isinstance(unscaled_state, DTensor):
            check_alike(param, unscaled_state, name, state_name)
        elif tuple(unscaled_state.shape) != local_shape:
            raise ConfigurationError(
                f"{name} has shape {tuple(param.shape)}, of which this rank holds {local_shape}; its {state_name} has "
                f"{tuple(unscaled_state.shape)}: pass this rank's shard, or a DTensor"
            )
        assign(state, private_torch.local_tensor(unscaled_state).to(private_torch.local_tensor(param).device).float())
        self._is_assigned = True

    @torch.no_grad()
    def seed_master(self, param: Tensor, values: Tensor) -> None:
        """Set a master from this rank's float32 values, rounded to nearest, without changing the parameter. A
        collective call for a scaled master of a sharded parameter."""
        self._state_of(param, MASTER).seed(values)
        self._is_assigned = True

    def _state_of(self, param: Tensor, state_name: str) -> OptimizerState:
        self._adopt_replaced_parameters()
        self._group_of(param)
        states = {role: state for role, state in self._states.get(param, {}).items() if role != WEIGHT}
        if state_name not in states:
            raise ConfigurationError(
                f"{self._names[param]} has no state {state_name!r}, but {sorted(states) or 'none (it is frozen)'}; "
                f"{MASTER!r} needs master_weights=True and a coarser parameter, {AVERAGE!r} needs ema_decay"
            )
        return states[state_name]

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict. Group entries are numbers even if `capturable`, so either kind of optimizer can load
        it. If `capturable`, this also raises the errors that `step` could not raise."""
        if self._capturable:
            self._raise_for_bad_steps()
        return self.state_dict_to_fill()

    def state_dict_to_fill(self) -> dict[str, Any]:
        """Return the state dict for a load, without errors about bad steps: a load is how to recover from them."""
        self._read_flags()  # the next step raises errors, because one rank can be here alone
        return super().state_dict()

    @loading.with_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class into the states, without casts; raise a CheckpointError if it does not
        fit."""
        self._adopt_replaced_parameters()
        self._read_flags()
        self._is_assigned |= loading.load_optimizer_state(self, state_dict, self._names)
        self._late_error = None  # a load recovers from it
        self._reported_skips = -1
        self._accept_plain_values()
