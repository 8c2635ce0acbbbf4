"""What optimizers with masters keep of their parameters: allocated, followed, set, saved and loaded; all but a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.collectives.delayed_scaling import MISMATCHES
from quantshard.errors import (
    ConfigurationError,
    NonFiniteGradientError,
    RankMismatchError,
    UnsupportedOperationError,
)
from quantshard.numerics.states import AVERAGE, EMA_DECAY, MASTER, ROUNDING_SEED, WEIGHT, StateSpec
from quantshard.optimizers import guards, loading, options, parameter_registry
from quantshard.optimizers.capturable import COUNTERS, BadStepRecord, make_numbers, make_tensors
from quantshard.optimizers.state import (
    PLAIN_DTYPES,
    OptimizerState,
    assign,
    check_dtype,
    make_average,
    make_master,
    make_state,
    make_weight,
)
from quantshard.optimizers.step import rounded_roles
from quantshard.presets import check_remainders
from quantshard.tensor import components


class PendingStep(NamedTuple):
    """A step that was taken for made before its flags came, and what `MasterOptimizer._kept` said before."""

    flags: guards.GradientFlags
    kept: str


class MasterOptimizer(torch.optim.Optimizer):
    """An optimizer's parameters, with their masters and the `states` that it declares; `ElementwiseOptimizer` steps
    them, and says what the arguments are.
    """

    states: ClassVar[tuple[StateSpec, ...]] = ()
    """The states of each parameter, which begin as zeros. Roles are their keys in state dicts, so they stay."""

    group_entries = (ROUNDING_SEED,)
    """Entries of a group that `defaults` does not name and a checkpoint must have where this optimizer has them."""

    more_entries: tuple[str, ...] = ()
    """What a group may have besides what `defaults` names."""

    rate_dtype = torch.float32
    """Of learning rates that are tensors (`capturable`)."""

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
        guards.keep_out_of_graphs(type(self))
        self._name, given = type(self).__name__, dict(state_dtypes or {})
        flags = {"capturable": capturable, "master_weights": master_weights, "use_decoupled_grad": use_decoupled_grad}
        options.check_flags(self._name, **flags, store_param_remainders=store_param_remainders)
        if "lr" not in defaults:
            raise ConfigurationError(f"{self._name}(defaults={sorted(defaults)}): give lr, the learning rate")
        self._roles = [spec.role for spec in self.states]
        named = {role for spec in self.states for role in (spec.role, spec.words_of or spec.role)}
        if len({*self._roles, MASTER, AVERAGE, WEIGHT}) < len(self._roles) + 3 or not named <= set(self._roles):
            raise ConfigurationError(
                f"{self._name}.states = {self.states}: roles must differ, from {MASTER!r}, {AVERAGE!r} and {WEIGHT!r} "
                "too, and words_of name one of them"
            )
        if unknown := given.keys() - set(self._roles):
            raise ConfigurationError(
                f"{self._name}(state_dtypes): it has no state {sorted(unknown)}, but {self._roles}"
            )
        self._dtypes = {role: given.get(role, torch.float32) for role in self._roles} | {MASTER: master_weight_dtype}
        for role, dtype in self._dtypes.items():
            check_dtype(self._name, role, dtype)
        self._master_weights, self._remainders = master_weights, store_param_remainders
        if store_param_remainders:
            check_remainders(self._name, master_weights, master_weight_dtype)
        self._capturable, self._use_decoupled_grad = capturable, use_decoupled_grad
        self._max_skipped_in_a_row = max_skipped_in_a_row
        options.check_decay(self._name, ema_decay)
        averages = {EMA_DECAY: float(ema_decay)} if ema_decay else {}
        self._members, self._kept = parameter_registry.ParameterRegistry(self._name), ""
        super().__init__(
            parameter_registry.checked_params(self._name, params),
            {**defaults, **averages, **dict.fromkeys(COUNTERS, 0)},
        )
        if capturable:
            self.register_state_dict_post_hook(make_numbers)  # the first, so that others see what is returned
        self._states: dict[Tensor, dict[str, OptimizerState]] = {}
        self._weights: dict[Tensor, OptimizerState] = {}
        self._versions: dict[Tensor, int] = {}
        self._names: dict[Tensor, str] = {}
        self._streams: dict[Tensor, int] = {}
        self._blank: set[Tensor] = set()  # whose states are new, and had no gradient yet
        self._last_bad_step = BadStepRecord()
        self._unread: PendingStep | None = None  # the step before, whose flags are on their way to the host
        self._late_error: Exception | None = None
        self._has_loaded = False  # masters, which no step has read yet
        self._told_skipped = -1  # of a capturable optimizer, how many skipped steps there were as an error told of them
        self._averages_swapped_in = False
        for group in self.param_groups:
            self._adopt(group)
        self._check_parameters()

    def check_group(self, where: str, group: Mapping[str, Any], reads_rate: bool = True) -> None:
        """Check the numbers of a group, which anybody may set between steps; messages begin with `where`.

        By default lr and weight decay must be finite and not negative, and no number NaN. `reads_rate`: False if lr
        stays unread on a device.

        Raises:
            ConfigurationError: one makes no step.
        """
        read = group if reads_rate else {key: value for key, value in group.items() if key != "lr"}
        options.check_any(where, read, signed=False)

    def group_states(self, group: Mapping[str, Any]) -> tuple[StateSpec, ...]:
        """The states of a group's parameters: all of `states`, where a subclass does not choose among them."""
        return self.states

    # Groups ----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its states are allocated at once. A collective call where parameters are sharded.

        Raises:
            ConfigurationError: it has no parameters or one twice, a number of it makes no step, or it asks for masters
                or states of its own, which would do nothing.
        """
        is_built = hasattr(self, "_states")  # else it is the base class's constructor that calls
        if is_built:
            self._adopt_replaced_parameters()
            self._read_flags()  # which count for the groups that there were
        group = parameter_registry.checked_group(self._name, len(self.param_groups), param_group)
        options.check_no_states(type(self), group)
        options.warn_of_typos(self._name, group, {*self.defaults, *self.more_entries}, COUNTERS)
        self.check_group(self._name, {**self.defaults, **group})
        super().add_param_group(group)
        if is_built:
            self._adopt(self.param_groups[-1])
            self._check_parameters()

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because a gradient was not finite, or, if `capturable`, a learning rate made no step.
        On a GPU it waits for the last step's gradients.

        Raises:
            NonFiniteGradientError, RankMismatchError, ConfigurationError: if `capturable`, what `step` could not raise.
        """
        if self._capturable:
            self._raise_for_bad_steps()
        self._read_flags()
        return int(self.param_groups[0]["skipped_steps"])

    @property
    def large_gradient(self) -> str:
        """Of the last step that was skipped: the first parameter whose gradient was finite, but too large
        (`guards.LARGEST_GRADIENT`), if nothing worse was wrong with any; else "". It waits for the device."""
        self._read_flags()
        return self._last_bad_step.large_gradient()

    @property
    def _seed(self) -> int | None:
        """Of the random words; every group has it, so that state dicts do, if anything is rounded stochastically."""
        seed: int | None = self.param_groups[0].get(ROUNDING_SEED)
        return seed

    def _read_flags(self) -> None:
        """Count the step before as skipped if its flags, which the device alone knew, say so."""
        pending, self._unread = self._unread, None
        if pending is None:
            return
        try:
            is_skipped = pending.flags.skips(self.param_groups, self._max_skipped_in_a_row, deferred=True)
        except (NonFiniteGradientError, RankMismatchError) as error:
            is_skipped, self._late_error = True, error  # raised where all ranks come, as one may ask alone
        if is_skipped:
            self._kept = pending.kept
            self._last_bad_step.keep(pending.flags)

    def _held_by_states(self) -> str:
        """What new states would not hold, in words; a step that the device has skipped made none of it."""
        self._read_flags()
        return self._kept

    def _raise_late_error(self) -> None:
        """Raise what the step before could not, if the device alone knew what was wrong with its gradients.

        Raises:
            NonFiniteGradientError, RankMismatchError: as `step`, on all ranks.
        """
        self._read_flags()
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def _raise_for_bad_steps(self) -> None:
        MISMATCHES.settle()
        skipped = int(self.param_groups[0]["skipped_steps"])
        if skipped == self._told_skipped:  # once, or no load could ask for a state dict to fill
            return
        try:
            self._last_bad_step.check(self.param_groups, self._max_skipped_in_a_row)
        except (NonFiniteGradientError, ConfigurationError):
            self._told_skipped = skipped
            raise

    # State -----------------------------------------------------------------------------------------------------------

    def _adopt_replaced_parameters(self) -> None:
        """Make states for parameters that others have put in the places of those that this optimizer knew; see
        `parameter_registry`. Called before anything that reads or writes a state."""
        guards.check_own_weights(self._name, self._averages_swapped_in)
        swaps = self._members.replaced(self.param_groups, self._names, self._held_by_states)
        self._add_masters(self._members.recast())
        if not swaps:
            return
        for swap in swaps:
            for mapping in (self._states, self._weights, self._versions, self.state):
                mapping.pop(swap.old, None)
            self._blank.discard(swap.old)
            self._names[swap.new], self._streams[swap.new] = self._names.pop(swap.old), self._streams.pop(swap.old)
        for group in self.param_groups:
            if any(components.quantized_local(swap.new) is not None for swap in swaps):
                group.pop(ROUNDING_SEED, None)  # of a key: drawn again, it is what an optimizer built now would have
        for swap in swaps:
            if swap.new.requires_grad:
                self._initialize(swap.new, self.param_groups[swap.group])
        for name in ("_states", "_weights", "_names", "_streams"):
            setattr(self, name, parameter_registry.reordered(getattr(self, name), self.param_groups))
        self._check_parameters()

    def _adopt(self, group: dict[str, Any]) -> None:
        options.check_group_decay(self._name, group, EMA_DECAY in self.defaults)
        self._members.add(group["params"])
        names = group.get("param_names") or [f"parameter {len(self._names) + i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            self._streams[param] = len(self._names) * (
                len(self._roles) + 2
            )  # a stream for each, the master and the weight
            self._names[param] = name
            if param.requires_grad:
                self._initialize(param, group)
        if self._seed is not None:
            group[ROUNDING_SEED] = self._seed
        if self._capturable:
            first = next(iter([*group["params"], *self._names]), torch.empty(0, dtype=torch.float32, device="cpu"))
            make_tensors(group, private_torch.local_tensor(first).device, self.rate_dtype)

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Allocate a parameter's states: zeros, and a master seeded from the parameter.

        `store_param_remainders`: for this parameter; default as the optimizer was constructed.

        Raises:
            ConfigurationError: it is no parameter of this optimizer, or one that it does not train.
        """
        self._adopt_replaced_parameters()
        self._check_known(param)
        group = next(group for group in self.param_groups if any(other is param for other in group["params"]))
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
        self._blank.add(param)
        self._add_master(param, remainders)
        if EMA_DECAY in self.defaults:
            states[AVERAGE] = make_average(param, states.get(MASTER, self._weights[param]))
        self._versions[param] = guards.weight_version(param)
        self.state[param] = {k: v for state, held in states.items() for k, v in held.tensors(state).items()}

    def _add_master(self, param: Tensor, remainders: bool) -> None:
        """Give a parameter that is coarser than a master one, and draw the seed if anything is rounded by it."""
        states = self._states[param]
        master = make_master(param, self._dtypes[MASTER], remainders) if self._master_weights else None
        if master is not None:
            master.seed(guards.initial_master(param))
            states[MASTER] = master
        is_joined = components.quantized_local(param) is None and master is not None and master.writes_weight
        self._members.record_states(param, of_any_dtype=not is_joined)
        if self._seed is None and rounded_roles({**states, WEIGHT: self._weights[param]}):
            seed = guards.rounding_seed([param for group in self.param_groups for param in group["params"]])
            for group in self.param_groups:
                group[ROUNDING_SEED] = seed

    @torch.no_grad()
    def _add_masters(self, recast: list[Tensor]) -> None:
        """Give float32 parameters that a cast of the model made coarser the masters that they lack now."""
        has_seed = self._seed is not None
        for param in recast:
            if param in self._states and MASTER not in self._states[param] and param.dtype in PLAIN_DTYPES:
                self._add_master(param, self._remainders)
                master = self._states[param].get(MASTER)
                self.state[param] |= {} if master is None else master.tensors(MASTER)
        if self._seed is not None and not has_seed:
            self._check_parameters()

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Seed all masters anew from the parameters, after new weights were loaded into the model alone; averages begin
        with them."""
        self._adopt_replaced_parameters()
        for param, states in self._states.items():
            if MASTER in states:
                states[MASTER].seed(guards.initial_master(param))
            if AVERAGE in states:
                assign(states[AVERAGE], states.get(MASTER, self._weights[param]).read())
            self._versions[param] = guards.weight_version(param)

    @torch.no_grad()
    def begin_average(self, decay: float) -> None:
        """Keep an average of the weights from here on (`ema_decay`), which begins with the present masters, or with the
        parameters that have none; as after a checkpoint was loaded that has no averages. Their weight fades as if
        all steps before had had these values: the share of the next step is that of its number (`numerics.averages`).

        Raises:
            ConfigurationError: there is one already, or the decay is none.
        """
        self._adopt_replaced_parameters()
        options.check_decay(f"{self._name}.begin_average", decay)
        if EMA_DECAY in self.defaults or not decay:
            raise ConfigurationError(
                f"{self._name}.begin_average({decay}): "
                + ("averages are kept already; set group['ema_decay']" if decay else "a decay of 0 keeps no average")
            )
        for entries in (self.defaults, *self.param_groups):
            entries[EMA_DECAY] = float(decay)
        for param, states in self._states.items():
            states[AVERAGE] = make_average(param, states.get(MASTER, self._weights[param]))
            self.state[param] |= states[AVERAGE].tensors(AVERAGE)

    def drop_average(self) -> None:
        """Keep no average of the weights from here on, and free its memory."""
        self._adopt_replaced_parameters()
        for entries in (self.defaults, *self.param_groups):
            entries.pop(EMA_DECAY, None)
        for param, states in self._states.items():
            states.pop(AVERAGE, None)
            self.state[param].pop(AVERAGE, None)

    def __getstate__(self) -> dict[str, Any]:
        self._read_flags()
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterOptimizer:
        raise UnsupportedOperationError(
            f"a {self._name} is not copied: its states belong to its parameters; build another one over the copied "
            "model and load this one's state_dict() into it"
        )

    def _check_parameters(self) -> None:
        seed = (
            {}
            if self._seed is None
            else {f"{self._name}'s {ROUNDING_SEED}": torch.tensor([self._seed], dtype=torch.int64, device="cpu")}
        )
        guards.check_parameters(((name, param) for param, name in self._names.items()), seed)

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """A state in float32, by its role or as "master_param"; a DTensor where the parameter is one.

        Raises:
            ConfigurationError: there is no such state; or `skip_unscale`, which has no meaning for codes with a scale
                for each block.
        """
        if skip_unscale:
            raise ConfigurationError(
                "get_unscaled_state(skip_unscale=True) is not supported; state_dict() holds codes and scales"
            )
        held = self._state_of(param, state_name)
        if isinstance(param, DTensor):
            return components.as_dtensor(held.read(), param, list(param.placements), tuple(param.shape))
        return held.read()

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Set a state from high-precision values; a collective call where it is scaled and the parameter sharded.

        They are of the parameter's shape, a DTensor laid out as it is; or, of a sharded one, this rank's values in a
        plain tensor, as `get_high_precision_init_val` of its local tensor has them. They are rounded to nearest. Of a
        parameter with remainders, the master is the parameter too.

        Raises:
            ConfigurationError: there is no such state, or the shape or layout differs.
        """
        held, name = self._state_of(param, state_name), self._names[param]
        if state_name not in (MASTER, AVERAGE):
            self._blank.discard(param)
        if isinstance(param, DTensor) and not isinstance(unscaled_state, DTensor):
            guards.check_local(param, unscaled_state, name, state_name)
        else:
            guards.check_alike(param, unscaled_state, name, state_name)
        assign(held, private_torch.local_tensor(unscaled_state).to(private_torch.local_tensor(param).device).float())
        self._kept = parameter_registry.VALUES

    @torch.no_grad()
    def seed_master(self, param: Tensor, values: Tensor) -> None:
        """Set a master from the local values, float32, that its parameter was given: rounded to nearest, and the
        parameter stays as it is. A collective call where the master is scaled and the parameter sharded.

        Raises:
            ConfigurationError: it has none.
        """
        self._state_of(param, MASTER).seed(values)
        self._kept = parameter_registry.VALUES

    def _state_of(self, param: Tensor, state_name: str) -> OptimizerState:
        self._adopt_replaced_parameters()
        self._check_known(param)
        held = self._states.get(param, {})
        if state_name not in held:
            raise ConfigurationError(
                f"{self._names[param]} has no state {state_name!r}, but {sorted(held) or 'none, being frozen'}; a "
                "master has a parameter that is coarser than master_weight_dtype, unless master_weights=False, and "
                f"{AVERAGE!r} one of an optimizer with ema_decay"
            )
        return held[state_name]

    def _check_known(self, param: Tensor) -> None:
        if param not in self._names:
            raise ConfigurationError(
                f"the tensor of shape {tuple(param.shape)} is no parameter of this {self._name}; give the parameter "
                "itself, of a sharded one the DTensor, not its local tensor"
            )

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's: entries of groups are numbers, also if `capturable`, so that either loads the other's.

        Raises:
            NonFiniteGradientError, RankMismatchError, ConfigurationError: if `capturable`, what `step` could not raise.
            ConfigurationError: its parameters were replaced; see `step`.
        """
        if self._capturable:
            self._raise_for_bad_steps()
        return self.state_dict_to_fill()

    def state_dict_to_fill(self) -> dict[str, Any]:
        """The same for a load, which is the way out of bad steps: it says nothing of them."""
        self._adopt_replaced_parameters()
        self._read_flags()  # and the next step raises: one rank alone may ask for a state dict
        return super().state_dict()

    @loading.with_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class into the states, without casting any.

        Raises:
            CheckpointError: it is of other parameters or other state dtypes; the message names the first difference.
            ConfigurationError: its parameters were replaced; see `step`.
        """
        self._adopt_replaced_parameters()
        self._read_flags()
        if loading.load_optimizer_state(self, state_dict, self._names, partial(loading.state_options, self._roles)):
            self._kept = parameter_registry.VALUES
        self._late_error = None  # a load is the way out of it
        self._has_loaded, self._told_skipped = True, -1
        self._blank.clear()  # what was loaded has begun, or is not told from what has
        self._versions = guards.plain_versions(self._versions)  # the model may be loaded before or after
