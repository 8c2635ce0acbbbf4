"""Optimizers whose update is an elementwise formula: everything but the formula; and Adam's update rule.

In a step all ranks first agree, in one flat collective, on the amaxes of shared blocks and on the gradient flags
(`guards.GradientFlags`). Parameters with shared blocks are computed twice, to measure and to write, without a copy.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics import adam
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, Bound, Hyperparameters
from quantshard.numerics.states import AVERAGE, EMA_DECAY, MASTER, ROUNDING_SEED, WEIGHT, StateSpec
from quantshard.optimizers import averaging, base, checks
from quantshard.optimizers.base import COUNTERS, GRAD_NORM, check_alike, weight_version
from quantshard.optimizers.gradient_release import GradientRelease, ReleasingOptimizer
from quantshard.optimizers.guards import DECOUPLED_GRAD, MAIN_GRAD, FlagLayout, GradientFlags, gradient_of, wrong_rates
from quantshard.optimizers.kernel_step import GroupSettings, KernelStep, ParameterStep, StepPlan, Update
from quantshard.optimizers.state import (
    OptimizerState,
    assign,
    initial_master,
    make_average,
    make_states,
    ndim_of_states,
    rounded_roles,
)
from quantshard.state_storage import PLAIN_DTYPES, check_dtype, check_remainders, floor_of, state_quant_spec
from quantshard.tensor import components


class ElementwiseOptimizer(ReleasingOptimizer, ABC):
    """Base of optimizers for models with quantized weights whose update is an elementwise formula.

    A subclass declares its `states` and implements the formula as `update`. Gradient descent with momentum is

        class Momentum(ElementwiseOptimizer):
            states = (StateSpec("momentum_buffer"),)

            def update(self, param, grad, master, states, settings):
                momentum = settings["momentum"] * states["momentum_buffer"] + grad
                return master - settings["lr"] * momentum, {"momentum_buffer": momentum}

        optimizer = Momentum(model.parameters(), {"lr": 0.1, "momentum": 0.9})

    Masters, states of fewer bits, skipped steps and checkpoints work as in `FusedAdam`, and results are bitwise the
    same on any number of ranks. For norms of whole tensors (LAMB) or matrix products use `MasterWeights`.

    Args:
        params: parameters, (name, parameter) pairs or groups, as in `FusedAdam`.
        defaults: group entries for groups that do not set them; must include `lr`.
        state_dtypes: dtype of each state, by role; float32 by default. The same dtypes as for `FusedAdam`'s moments
            (FP8 is UE5M3 for nonnegative states).
        capturable: keep lr and step counts in tensors on the parameters' device and never synchronize in `step`. The
            formula must not synchronize either.
        master_weights: False keeps no masters: weights are read, updated and rounded to their own format.
        master_weight_dtype: float32, float16 or bfloat16; parameters with at least this precision have no master.
        use_decoupled_grad, store_param_remainders, max_skipped_in_a_row, ema_decay: see `FusedAdam`.
        release_gradients, max_grad_norm, max_grad_value: see `FusedAdam`.
    """

    states: ClassVar[tuple[StateSpec, ...]] = ()
    """States of each parameter, which start as zeros. Their roles are keys in checkpoints."""

    kernel_formula: ClassVar[Any] = None
    """The `update` that kernels implement, with the same bits. A subclass that overrides `update` runs in PyTorch."""

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
        release_gradients: bool = False,
        max_grad_norm: float = 0.0,
        max_grad_value: float = 0.0,
    ) -> None:
        self._set_up(max_skipped_in_a_row)
        checks.check_release(self._name, release_gradients, use_decoupled_grad, max_grad_norm, max_grad_value)
        if release_gradients:
            self._release = GradientRelease(self._name, self._step_unit, max_grad_norm, max_grad_value)
        dtypes = dict(state_dtypes or {})
        roles = [spec.role for spec in self.states]
        if len({*roles, MASTER, AVERAGE, WEIGHT}) < len(roles) + 3:
            raise ConfigurationError(f"{self._name}.states: roles must differ, also from {MASTER}, {AVERAGE}, {WEIGHT}")
        if unknown := dtypes.keys() - set(roles):
            raise ConfigurationError(f"{self._name}(state_dtypes): it has no state {sorted(unknown)}, but {roles}")
        self._dtypes = {role: dtypes.get(role, torch.float32) for role in roles} | {MASTER: master_weight_dtype}
        for role, dtype in self._dtypes.items():
            check_dtype(self._name, role, dtype)
        self._master_weights, self._remainders = master_weights, store_param_remainders
        self._capturable, self._use_decoupled_grad = capturable, use_decoupled_grad
        self._uses_kernels = type(self).update is type(self).kernel_formula
        self._states: dict[Tensor, dict[str, OptimizerState]] = {}  # with the parameter itself as WEIGHT
        self._plans: dict[tuple[Tensor, ...] | None, StepPlan] = {}
        self._captured: list[StepPlan] = []  # kept alive: CUDA graphs read their tables by address
        numbers = {EMA_DECAY: ema_decay, "max_grad_norm": max_grad_norm, "max_grad_value": max_grad_value}
        base.check_ranges(self._name, numbers, numbers)
        entries = {EMA_DECAY: float(ema_decay)} if ema_decay else {}
        entries |= {GRAD_NORM: 0.0} if max_grad_norm else {}
        super().__init__(params, {**defaults, **entries, **dict.fromkeys(COUNTERS, 0)})
        if capturable or max_grad_norm:
            self.register_state_dict_post_hook(base.counters_to_numbers)  # first, so that later hooks see numbers
        self._is_built = True
        self._make_states()

    @abstractmethod
    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Any
    ) -> Update:
        """Compute the new values of the master and of all `states`, by role.

        `grad`, `master`, the states and the results are float32 with the shape of the parameter's local shard, which
        can be empty. Each element of the results must depend on the same element of the arguments only, or results
        depend on the mesh. Must not modify its arguments, and can be called twice in a step.

        Args:
            param: the parameter, as an identity only.
            master: values to train: the master's, or the parameter's if it has no master.
            settings: result of `settings` for the parameter's group.
        """

    def settings(self, group: dict[str, Any]) -> Any:
        """Return the settings of a group that `update` gets; `step` (from 1) and `lr` are tensors if `capturable`."""
        return {**group, "step": group["step"] + 1}

    def group_states(self, group: Mapping[str, Any]) -> tuple[StateSpec, ...]:
        """Return the states of a group's parameters: all of `states`, unless a subclass overrides this."""
        return self.states

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step, and return the result of `closure`. A collective call where parameters are sharded.

        On a GPU, optimizers with kernels and masters do not wait. If gradients were bad, the device skips the step, and
        the next step counts it and raises; reading `skipped_steps` or a state dict counts it earlier. Until then `step`
        in a group includes the skipped step.

        Raises a RankMismatchError if a parameter has a gradient on some ranks only, and a NonFiniteGradientError if too
        many consecutive steps were skipped, on a GPU one step later.
        """
        self._adopt_replaced_parameters()
        self._read_flags()
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._current_plan(None if self._release is None else self._not_released())
        try:
            self._take_gradients(plan)
            flags, remaining = self._start_updates(plan)
            if self._release is not None:
                flags = flags.joined(self._release.flags)
                self._release.reset()
            flags.warn_of_no_gradient()
            if self._finish_or_skip(flags, remaining):
                for item in plan.items:
                    item.record_kernel_write()
                    self._versions[item.param] = item.version()
        finally:
            for item in plan.items:
                item.grad, item.requantizations = None, {}  # frees their memory
        return loss

    def _current_plan(self, params: tuple[Tensor, ...] | None = None) -> StepPlan:
        """Return the plan of a step of some parameters, by default of all."""
        plan = self._plans.get(params)
        if plan is not None:
            if plan.is_current():
                return plan
            self._drop_plans()
        checks.warn_of_replaced_parameters(self._name, self._names)
        # One stream of random bits for each state, the master and the weight.
        streams = {param: index * (len(self.states) + 2) for index, param in enumerate(self._names)}
        selected = None if params is None else set(params)
        items = [
            ParameterStep(param, self._states[param], self.group_states(group), self.update, number, streams[param])
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if param in (self._states if selected is None else selected)
        ]
        flags = FlagLayout((self._names[item.param], item.param) for item in items)
        plan = self._plans[params] = self._new_plan(items, flags)
        return plan

    def _new_plan(self, items: list[ParameterStep], flags: FlagLayout) -> StepPlan:
        return StepPlan(items, flags, KernelStep(items, self._uses_kernels))

    def _drop_plans(self) -> None:
        self._captured += [plan for plan in self._plans.values() if plan.is_captured]
        self._plans = {}

    def _take_gradients(self, plan: StepPlan) -> None:
        """Give each parameter's step its gradient, after checking that only this optimizer changed the parameter."""
        groups = []
        for index, group in enumerate(self.param_groups):
            self.check_group(f"{self._name}: param_groups[{index}]", group)
            groups.append(GroupSettings(group["step"] + 1, self.settings(group), float(group.get(EMA_DECAY, 0.0))))
        attribute = DECOUPLED_GRAD if self._use_decoupled_grad else "grad"
        seed = self._seed
        for param in self._names:
            if param not in self._states and getattr(param, attribute, None) is not None:
                self._raise_for_frozen(param)
        for item in plan.items:
            param = item.param
            grad: Tensor | None = getattr(param, attribute, None)
            if attribute == "grad" and MAIN_GRAD in vars(param):
                grad = gradient_of(param, decoupled=False)
            if grad is not None:
                check_alike(param, grad, self._names[param], "gradient" if attribute == "grad" else attribute)
            has_master = item.source is not item.weight
            # A master in the parameter's low bytes depends on its dtype; without a master it could need one in another.
            depends_on_dtype = item.source.writes_weight and item.storage is None
            depends_on_dtype |= self._master_weights and not has_master
            if self._is_overwritten(param, grad, item.version(), has_master, depends_on_dtype):
                item.source.adopt()
            item.grad = None if grad is None else private_torch.local_tensor(grad)
            if grad is not None and item.is_stack:
                item.grad = components.as_matrix(private_torch.local_tensor(grad), item.storage)
            item.group, item.seed = groups[item.group_index], seed
            item.in_kernels, item.requantizations = False, {}

    def _start_updates(self, plan: StepPlan) -> tuple[GradientFlags, list[ParameterStep]]:
        """Return the gradient flags of all ranks, and the measured parameter steps that no kernel has finished."""
        reduction = FlatMax()
        if plan.kernels.take(self._seed):
            flags = self._reduce_flags(plan, reduction, plan.kernels.exceeding())
            return flags, plan.kernels.update(flags.bad() if self._capturable else flags.send())
        for item in plan.items:
            item.measure(reduction)
        return self._reduce_flags(plan, reduction), plan.items

    def _reduce_flags(self, plan: StepPlan, reduction: FlatMax, exceeding: Tensor | None = None) -> GradientFlags:
        rate_flags = wrong_rates(self.param_groups, len(plan.items)) if self._capturable else None
        return GradientFlags(plan.flags, [item.grad for item in plan.items], reduction, exceeding, rate_flags)

    def _finish_or_skip(self, flags: GradientFlags, remaining: list[ParameterStep]) -> bool:
        """Finish the updates that no kernel has written. Return False if the host skips the step.

        If `capturable`, the device undoes a bad step and counts it; if deferred, the host counts it in the next step.
        Without masters it waits, because a weight counts its draws on the host, in state that can be saved before.
        """
        if self._capturable:
            bad = flags.bad()
            for item in remaining:
                item.finish(bad)
            self._count_on_device(bad, flags)
            return True
        deferred = flags.deferred and self._master_weights
        if not deferred and self._skips(flags):
            return False
        for item in remaining:
            item.finish(flags.bad() if deferred else None)
        for group in self.param_groups:
            group["step"] += 1
        self._unread = flags if deferred else None
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients (and `decoupled_grad`, if used): set them to None (default) or to zero."""
        super().zero_grad(set_to_none)
        for group in self.param_groups if self._use_decoupled_grad else ():
            for param in group["params"]:
                if not set_to_none and getattr(param, DECOUPLED_GRAD, None) is not None:
                    param.decoupled_grad.detach().zero_()
                else:
                    param.decoupled_grad = None

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
        if self._release is not None:
            self._release.forget()
        for mapping in (self._states, self._made_for, self._names, self._versions, self.state):
            mapping.clear()
        for group in self.param_groups:
            self._add_states(group)
        self._check_parameters()

    def _add_states(self, group: dict[str, Any]) -> None:
        self._add_names(group)
        for param in group["params"]:
            if param.requires_grad:
                self._initialize(param, group, self._remainders)
        if self._seed is not None:
            group[ROUNDING_SEED] = self._seed
        if self._capturable:
            first = next(iter([*group["params"], *self._names]), torch.empty(0, dtype=torch.float32, device="cpu"))
            device = private_torch.local_tensor(first).device
            group["lr"] = torch.as_tensor(group["lr"], dtype=self.rate_dtype, device=device).clone()
            group.update({key: torch.tensor(int(group[key]), dtype=torch.int64, device=device) for key in COUNTERS})

    @torch.no_grad()
    def _initialize(self, param: Tensor, group: Mapping[str, Any], remainders: bool) -> None:
        if remainders:
            check_remainders(self._name, self._master_weights, self._dtypes[MASTER])
        checks.check_trainable(f"{self._name}: {self._names[param]}", param, PLAIN_DTYPES)
        if self._capturable and not self._master_weights and components.quantized_local(param) is not None:
            # a captured step would repeat its random draw, whose number the host reads
            raise ConfigurationError(f"{self._name}(capturable=True): {self._names[param]} needs master_weights=True")
        states = make_states(param, self.group_states(group), self._dtypes, self._master_weights, remainders)
        if self._is_averaging:
            states[AVERAGE] = make_average(param, states.get(MASTER, states[WEIGHT]))
        if self._release is not None:
            self._release.watch(param, self._names[param])
        self._states[param], self._made_for[param] = states, (param.dtype, param.shape)
        self._drop_plans()
        self._versions[param] = weight_version(param)
        self.state[param] = {}
        for role, state in states.items():
            if role != WEIGHT:
                self.state[param] |= state.tensors(role)
        if self._seed is None and rounded_roles(states):
            seed = base.rounding_seed([param for group in self.param_groups for param in group["params"]])
            for entries in self.param_groups:
                entries[ROUNDING_SEED] = seed

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
        self._drop_plans()
        for param, states in self._states.items():
            states[AVERAGE] = make_average(param, states.get(MASTER, states[WEIGHT]))
            self.state[param] |= states[AVERAGE].tensors(AVERAGE)

    def drop_average(self) -> None:
        """Stop averaging the weights and free the averages."""
        self._adopt_replaced_parameters()
        for entries in (self.defaults, *self.param_groups, *self._states.values(), *self.state.values()):
            for name in (EMA_DECAY, AVERAGE):
                entries.pop(name, None)
        self._drop_plans()

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """Return a state in float32, by its role or as "master_param"; a DTensor if the parameter is one."""
        values = self._state_of(param, state_name).read().view(private_torch.local_tensor(param).shape)
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
        values = private_torch.local_tensor(unscaled_state).to(local.device).float()
        assign(target, components.as_matrix(values, self._states[param][WEIGHT].storage))
        self._is_assigned = True

    @torch.no_grad()
    def seed_master(self, param: Tensor, values: Tensor) -> None:
        """Set a master from local float32 values, but not its parameter. A collective call if ranks share blocks."""
        self._state_of(param, MASTER).seed(components.as_matrix(values, self._states[param][WEIGHT].storage))
        self._is_assigned = True

    def _state_of(self, param: Tensor, state_name: str) -> OptimizerState:
        self._adopt_replaced_parameters()
        self._group_of(param)
        states = {role: state for role, state in self._states.get(param, {}).items() if role != WEIGHT}
        if state_name not in states:
            raise ConfigurationError(f"{self._names[param]} has no state {state_name!r}, only {sorted(states)}")
        return states[state_name]


class AdamOptimizer(ElementwiseOptimizer):
    """Adam's update rule, for all groups of `FusedAdam` and the "adamw" groups of `Muon`."""

    states: ClassVar[tuple[StateSpec, ...]] = adam.STATES
    checked_numbers = ("lr", "weight_decay", "betas", "eps", EMA_DECAY)

    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Any
    ) -> Update:
        bound = settings.matrix_bound if ndim_of_states(param) == 2 else Bound.NONE
        new = adam.adam(grad, master, states[EXP_AVG], states[EXP_AVG_SQ], settings, bound)
        return new.master, {EXP_AVG: new.exp_avg, EXP_AVG_SQ: new.exp_avg_sq}

    kernel_formula = update

    def settings(self, group: dict[str, Any]) -> Any:
        beta1, beta2 = map(float, group["betas"])
        return Hyperparameters(
            step=group["step"] + 1, lr=group["lr"] if self._capturable else float(group["lr"]), beta1=beta1,
            beta2=beta2, eps=float(group["eps"]), weight_decay=float(group["weight_decay"]),
            decoupled=group["adam_w_mode"], bias_correction=group["bias_correction"], matrix_bound=self._matrix_bound,
        )  # fmt: skip

    def check_group(self, where: str, group: Mapping[str, Any]) -> None:
        super().check_group(where, group)
        if self._matrix_bound is Bound.RATIO and adam.largest_ratio(*map(float, group["betas"])) == math.inf:
            rule = "exp_avg_dtype coarser than exp_avg_sq_dtype needs beta1**2 < beta2"
            raise ConfigurationError(f"{where}: betas={group['betas']}: {rule}; use a larger beta2 or the same dtype")

    @cached_property
    def _matrix_bound(self) -> Bound:
        """Scaled first moments need a bound. They can be much coarser than second moments, which hold squares."""
        first, second = self._dtypes[EXP_AVG], self._dtypes[EXP_AVG_SQ]
        if state_quant_spec(first) is None:
            return Bound.NONE
        return Bound.RATIO if floor_of(first) ** 2 > floor_of(second, nonnegative=True) else Bound.UPDATE
