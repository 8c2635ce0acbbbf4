"""Base of optimizers with master weights: allocates, saves and loads states. Subclasses add the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.collectives.delayed_scaling import MISMATCHES
from quantshard.errors import ConfigurationError, NonFiniteGradientError, RankMismatchError
from quantshard.numerics.states import AVERAGE, EMA_DECAY, MASTER, ROUNDING_SEED, WEIGHT, StateSpec
from quantshard.optimizers import guards, loading
from quantshard.optimizers.base import ParameterOptimizer, check_ranges
from quantshard.optimizers.capturable import COUNTERS, BadStepRecord, make_numbers, make_tensors
from quantshard.optimizers.state import OptimizerState, assign, make_average, make_master, make_state, make_weight
from quantshard.optimizers.step import StepPlan, rounded_roles
from quantshard.state_storage import PLAIN_DTYPES, check_dtype, check_remainders
from quantshard.tensor import components


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
        if "lr" not in defaults:
            raise ConfigurationError(f"{self._name}(defaults={sorted(defaults)}): give lr, the learning rate")
        self._roles = [spec.role for spec in self.states]
        used_roles = {role for spec in self.states for role in (spec.role, spec.words_of or spec.role)}
        if len({*self._roles, MASTER, AVERAGE, WEIGHT}) < len(self._roles) + 3 or not used_roles <= set(self._roles):
            raise ConfigurationError(
                f"{self._name}.states = {self.states}: roles must differ, from {MASTER!r}, {AVERAGE!r} and {WEIGHT!r} "
                "too, and words_of name one of them"
            )
        if unknown := dtypes.keys() - set(self._roles):
            raise ConfigurationError(
                f"{self._name}(state_dtypes): it has no state {sorted(unknown)}, but {self._roles}"
            )
        self._dtypes = {role: dtypes.get(role, torch.float32) for role in self._roles} | {MASTER: master_weight_dtype}
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
            self.register_state_dict_post_hook(make_numbers)  # first, so that later hooks see numbers
        self._states: dict[Tensor, dict[str, OptimizerState]] = {}
        self._weights: dict[Tensor, OptimizerState] = {}
        self._made_for: dict[Tensor, tuple[torch.dtype, torch.Size]] = {}
        self._streams: dict[Tensor, int] = {}
        self._plan: StepPlan | None = None  # of `step`; None after a state was added or removed
        self._last_bad_step = BadStepRecord()
        self._unread: guards.GradientFlags | None = None  # flags of the last step, if they are still on the device
        self._late_error: Exception | None = None
        self._told_skipped = -1  # if capturable: number of skipped steps at the last error about them
        self._is_built = True
        self._make_states()

    def check_group(self, where: str, group: Mapping[str, Any]) -> None:
        """Validate a group's values: by default those in `checked_numbers` must be in their range.

        `where`: start of the error messages.

        Raises:
            ConfigurationError: a value is invalid.
        """
        # a learning rate on a device is checked there (`capturable.wrong_rates`)
        check_ranges(where, group, [name for name in self.checked_numbers if name != "lr" or not self._capturable])

    def group_states(self, group: Mapping[str, Any]) -> tuple[StateSpec, ...]:
        """Return the states of a group's parameters: all of `states`, unless a subclass overrides this."""
        return self.states

    # Groups ----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and allocate its states. A collective call where parameters are sharded.

        Raises:
            ConfigurationError: the group has a parameter twice, an invalid value, or an option for all groups.
        """
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

        Raises:
            NonFiniteGradientError, RankMismatchError, ConfigurationError: if `capturable`, errors that `step` could not
                raise.
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
        return self._last_bad_step.large_gradient()

    @property
    def _seed(self) -> int | None:
        """Seed of the random bits, stored in every group; None if nothing is rounded stochastically."""
        seed: int | None = self.param_groups[0].get(ROUNDING_SEED)
        return seed

    def _read_flags(self) -> None:
        """Wait for the flags of the last step, and count the step as skipped if the device skipped it."""
        flags, self._unread = self._unread, None
        if flags is None:
            return
        try:
            is_skipped = flags.skips(self.param_groups, self._max_skipped_in_a_row, deferred=True)
        except (NonFiniteGradientError, RankMismatchError) as error:
            is_skipped, self._late_error = True, error  # raised by the next step, which all ranks reach
        if is_skipped:
            self._last_bad_step.keep(flags)

    def _raise_late_error(self) -> None:
        """Raise, on all ranks, the error of the last step if only the device knew about it at the time."""
        self._read_flags()
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def _raise_for_bad_steps(self) -> None:
        MISMATCHES.settle()
        skipped = int(self.param_groups[0]["skipped_steps"])
        if skipped == self._told_skipped:  # raise only once, so that a load can still get a state dict
            return
        try:
            self._last_bad_step.check(self.param_groups, self._max_skipped_in_a_row)
        except (NonFiniteGradientError, ConfigurationError):
            self._told_skipped = skipped
            raise

    # State -----------------------------------------------------------------------------------------------------------

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
        for mapping in (self._states, self._weights, self._made_for, self._streams, self._names, self._versions):
            mapping.clear()
        self.state.clear()
        for group in self.param_groups:
            self._add_states(group)
        self._check_parameters()

    def _add_states(self, group: dict[str, Any]) -> None:
        """Make the names and states of a group's parameters."""
        for number, param in enumerate(group["params"], len(self._names)):
            # One stream of random bits for each state, the master and the weight.
            self._streams[param] = number * (len(self._roles) + 2)
        self._add_names(group)
        for param in group["params"]:
            if param.requires_grad:
                self._initialize(param, group)
        if self._seed is not None:
            group[ROUNDING_SEED] = self._seed
        if self._capturable:
            first = next(iter([*group["params"], *self._names]), torch.empty(0, dtype=torch.float32, device="cpu"))
            make_tensors(group, private_torch.local_tensor(first).device, self.rate_dtype)

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Allocate a parameter's states: zeros, and a master that starts from the parameter.

        `store_param_remainders`: overrides the constructor's option for this parameter.

        Raises:
            ConfigurationError: the optimizer does not have or cannot train this parameter.
        """
        self._adopt_replaced_parameters()
        self._check_known(param)
        group = next(group for group in self.param_groups if any(candidate is param for candidate in group["params"]))
        self._initialize(param, group, store_param_remainders)

    @torch.no_grad()
    def _initialize(self, param: Tensor, group: Mapping[str, Any], store_param_remainders: bool | None = None) -> None:
        name = self._names[param]
        remainders = self._remainders if store_param_remainders is None else store_param_remainders
        if remainders:
            check_remainders(self._name, self._master_weights, self._dtypes[MASTER])
        guards.check_trainable(self._name, name, param, PLAIN_DTYPES)
        if self._capturable and not self._master_weights and components.quantized_local(param) is not None:
            raise ConfigurationError(
                f"{self._name}(capturable=True, master_weights=False): {name} is "
                f"{private_torch.local_tensor(param)!r}, and a step reads the number of its random draw on the host, "
                "so a captured one would repeat it; use masters, or capturable=False"
            )
        states = {
            spec.role: make_state(param, self._dtypes[spec.role], spec.nonnegative) for spec in self.group_states(group)
        }
        self._states[param], self._weights[param] = states, make_weight(param)
        self._made_for[param], self._plan = (param.dtype, param.shape), None
        self._add_master(param, remainders)
        if self._is_averaging:
            states[AVERAGE] = make_average(param, states.get(MASTER, self._weights[param]))
        self._versions[param] = guards.weight_version(param)
        self.state[param] = {k: v for role, entry in states.items() for k, v in entry.tensors(role).items()}

    def _add_master(self, param: Tensor, remainders: bool) -> None:
        """Create the master if the parameter is coarser, and draw the seed if anything needs random bits."""
        states = self._states[param]
        master = make_master(param, self._dtypes[MASTER], remainders) if self._master_weights else None
        if master is not None:
            master.seed(guards.initial_master(param))
            states[MASTER] = master
        if self._seed is None and rounded_roles({**states, WEIGHT: self._weights[param]}):
            seed = guards.rounding_seed([param for group in self.param_groups for param in group["params"]])
            for group in self.param_groups:
                group[ROUNDING_SEED] = seed

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Reset all masters, and the averages, from the parameters, after loading new weights into the model alone."""
        self._adopt_replaced_parameters()
        for param, states in self._states.items():
            if MASTER in states:
                states[MASTER].seed(guards.initial_master(param))
            if AVERAGE in states:
                assign(states[AVERAGE], states.get(MASTER, self._weights[param]).read())
            self._versions[param] = guards.weight_version(param)

    @torch.no_grad()
    def begin_average(self, decay: float) -> None:
        """Start averaging the weights (`ema_decay`), for instance after loading a checkpoint without averages.

        Averages start from the present masters (or the parameters without one), weighted as if all earlier steps had
        had these values: the next step's share follows from its step number (`numerics.adam`).

        Raises:
            ConfigurationError: averages are already kept, or the decay is invalid.
        """
        self._adopt_replaced_parameters()
        self._check_begins(decay)
        for entries in (self.defaults, *self.param_groups):
            entries[EMA_DECAY] = float(decay)
        self._plan = None
        for param, states in self._states.items():
            states[AVERAGE] = make_average(param, states.get(MASTER, self._weights[param]))
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

    def _check_parameters(self) -> None:
        seed = (
            {}
            if self._seed is None
            else {f"{self._name}'s {ROUNDING_SEED}": torch.tensor([self._seed], dtype=torch.int64, device="cpu")}
        )
        guards.check_parameters(((name, param) for param, name in self._names.items()), seed)

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """Return a state in float32, by its role or as "master_param"; a DTensor if the parameter is one.

        Raises:
            ConfigurationError: the state does not exist, or `skip_unscale` is True, which block scales do not allow.
        """
        if skip_unscale:
            raise ConfigurationError(
                "get_unscaled_state(skip_unscale=True) is not supported; state_dict() holds codes and scales"
            )
        state = self._state_of(param, state_name)
        if isinstance(param, DTensor):
            return components.as_dtensor(state.read(), param, list(param.placements), tuple(param.shape))
        return state.read()

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Set a state from high-precision values, rounded to nearest. A collective call for a scaled state of a sharded
        parameter.

        The values have the parameter's shape and layout. For a sharded parameter, a plain tensor with this rank's shard
        works too, as returned by its local tensor's `get_high_precision_init_val`. Setting a master stored as
        remainders sets the parameter.

        Raises:
            ConfigurationError: the state does not exist, or the shape or layout differs.
        """
        state, name = self._state_of(param, state_name), self._names[param]
        if isinstance(param, DTensor) and not isinstance(unscaled_state, DTensor):
            guards.check_local(param, unscaled_state, name, state_name)
        else:
            guards.check_alike(param, unscaled_state, name, state_name)
        assign(state, private_torch.local_tensor(unscaled_state).to(private_torch.local_tensor(param).device).float())
        self._is_assigned = True

    @torch.no_grad()
    def seed_master(self, param: Tensor, values: Tensor) -> None:
        """Set a master from this rank's float32 values, rounded to nearest, without changing the parameter. A
        collective call for a scaled master of a sharded parameter.

        Raises:
            ConfigurationError: the parameter has no master.
        """
        self._state_of(param, MASTER).seed(values)
        self._is_assigned = True

    def _state_of(self, param: Tensor, state_name: str) -> OptimizerState:
        self._adopt_replaced_parameters()
        self._check_known(param)
        states = self._states.get(param, {})
        if state_name not in states:
            raise ConfigurationError(
                f"{self._names[param]} has no state {state_name!r}, but {sorted(states) or 'none, being frozen'}; a "
                "master has a parameter that is coarser than master_weight_dtype, unless master_weights=False, and "
                f"{AVERAGE!r} one of an optimizer with ema_decay"
            )
        return states[state_name]

    def _check_known(self, param: Tensor) -> None:
        if param not in self._names:
            raise ConfigurationError(
                f"the tensor of shape {tuple(param.shape)} is no parameter of this {self._name}; give the parameter "
                "itself, of a sharded one the DTensor, not its local tensor"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict. Group entries are numbers even if `capturable`, so either kind of optimizer can load
        it.

        Raises:
            NonFiniteGradientError, RankMismatchError, ConfigurationError: if `capturable`, errors that `step` could not
                raise.
            ConfigurationError: the optimizer's parameters were replaced; see `step`.
        """
        if self._capturable:
            self._raise_for_bad_steps()
        return self.state_dict_to_fill()

    def state_dict_to_fill(self) -> dict[str, Any]:
        """Return the state dict for a load, without errors about bad steps: a load is how to recover from them."""
        self._adopt_replaced_parameters()
        self._read_flags()  # the next step raises errors, because one rank can be here alone
        return super().state_dict()

    @loading.with_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class into the states, without casts.

        Raises:
            CheckpointError: it belongs to other parameters or state dtypes; the message names the first difference.
            ConfigurationError: the optimizer's parameters were replaced; see `step`.
        """
        self._adopt_replaced_parameters()
        self._read_flags()
        self._is_assigned |= loading.load_optimizer_state(self, state_dict, self._names)
        self._late_error = None  # a load recovers from it
        self._told_skipped = -1
        self._versions = guards.plain_versions(self._versions)  # allows loading the model before or after
