"""Optimizers whose update is an elementwise formula: everything but the formula.

`FusedAdam` and `Lion` are examples; docs/optimizers.md writes another one in a few lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics.states import EMA_DECAY, MASTER
from quantshard.optimizers import guards
from quantshard.optimizers.capturable import wrong_rates
from quantshard.optimizers.guards import FlagLayout, GradientFlags
from quantshard.optimizers.masters import MasterOptimizer
from quantshard.optimizers.step import GroupSettings, ParameterStep, StepPlan, Update, UpdateFormula


class ElementwiseOptimizer(MasterOptimizer, ABC):
    """Base of optimizers for models with quantized weights whose update is an elementwise formula.

    A subclass declares its `states` and implements the formula as `update`. Gradient descent with momentum is

        class Momentum(ElementwiseOptimizer):
            states = (StateSpec("momentum_buffer"),)

            def update(self, param, grad, master, states, settings):
                momentum = settings["momentum"] * states["momentum_buffer"] + grad
                return master - settings["lr"] * momentum, {"momentum_buffer": momentum}

        optimizer = Momentum(model.parameters(), {"lr": 0.1, "momentum": 0.9})

    Results are bitwise the same on any number of ranks. The base class provides:

    - masters of quantized and 16-bit parameters, which start from `get_high_precision_init_val()` if the initial values
      were kept, otherwise from the (dequantized) parameter;
    - states and masters in 32, 16 or 8 bits, rounded stochastically when a step writes them. The random bits depend on
      a seed (created by the constructor if needed, saved in the state dict), the step and the index in the global
      tensor;
    - steps that are skipped on all ranks if a gradient is not finite: nothing changes, and `skipped_steps` counts them;
    - state dicts that load on any number of ranks.

    States are allocated by the constructor, so a new process can load them, and are DTensors exactly where the
    parameters are. A formula sees one element at a time. For norms of whole tensors (LAMB) or matrix products use
    `MasterWeights`.

    Args:
        params: parameters, (name, parameter) pairs or groups. No parameter can be on the meta device. Trained
            parameters are quantized, float32, bfloat16 or float16.
        defaults: group entries for groups that do not set them; must include `lr`.
        state_dtypes: dtype of each state, by role: `torch.float32` (default), `torch.bfloat16`, `torch.float16` (with a
            power-of-two scale per 128 elements of a row) or `torch.uint8` (FP8 with the same scales: E4M3, or UE5M3 for
            nonnegative states). Only 2-D parameters have scaled states; other parameters use float32 instead.
        capturable: keep lr and step counts in tensors on the parameters' device and never synchronize in `step`; see
            `FusedAdam`. The formula must not synchronize either.
        master_weights: False keeps no masters: weights are read, updated and rounded to their own format.
        master_weight_dtype: float32, float16 or bfloat16; parameters with at least this precision have no master.
        use_decoupled_grad: read `param.decoupled_grad`, of any floating-point dtype, instead of `param.grad`.
        store_param_remainders: store only the bits of a master that the parameter does not hold; see `FusedAdam`.
        max_skipped_in_a_row: raise after this many consecutive skipped steps.
        ema_decay: keep an average of the weights; see `FusedAdam`.

    Raises:
        ConfigurationError: an argument is invalid.
        RankMismatchError: ranks have different random keys for a weight, or different seeds.
    """

    # For subclasses --------------------------------------------------------------------------------------------------

    @abstractmethod
    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Any
    ) -> Update:
        """Compute the new values of the master and of all `states`, by role.

        `grad`, `master`, the states and the results are float32 with the shape of the parameter's local shard, which
        can be empty. Each element of the results must depend on the same element of the arguments only, or results
        depend on the mesh. Must not modify its arguments, and can be called twice in a step.

        Args:
            param: the parameter, as an identity only; its values are in `master`.
            grad: gradient of the parameter.
            master: values to train: the master's, or the parameter's if it has no master.
            states: values of the states, by role.
            settings: result of `settings` for the parameter's group.
        """

    def settings(self, group: dict[str, Any]) -> Any:
        """Return the settings that `update` gets for a group: its entries, with the number of this step as `step`.

        Called once per step. `step` counts from 1. `step` and `lr` are tensors if `capturable`.
        """
        return {**group, "step": group["step"] + 1}

    # Step ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: None = None) -> Any:  # type: ignore[override]
        """Take one optimizer step, and return the result of `closure`. A collective call where parameters are sharded.

        `grad_scaler` must be None: call `grad_scaler.unscale_(optimizer)` before, and `grad_scaler.step(optimizer)`.

        On a GPU the host does not wait. If gradients were bad, the device skips the step, and the next step counts it
        and raises; reading `skipped_steps` or a state dict counts it earlier. Until then `step` in a group includes the
        skipped step. Optimizers without masters wait.

        Raises:
            ConfigurationError: a parameter is a DTensor and its gradient is not, or the reverse; a group has an invalid
                value; or parameters were replaced after the first step (replacements before it are adopted, with new
                states).
            RankMismatchError: a parameter has a gradient on some ranks only.
            NonFiniteGradientError: too many consecutive steps were skipped; on a GPU raised one step later.
        """
        if grad_scaler is not None:
            raise ConfigurationError(
                f"{self._name}.step(grad_scaler=...) is not supported; call grad_scaler.step(optimizer) instead, which "
                "unscales the gradients first"
            )
        self._adopt_replaced_parameters()
        self._raise_late_error()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [self._group_settings(number, group) for number, group in enumerate(self.param_groups)]
        plan = self._current_plan()
        try:
            self._take_gradients(plan, groups)
            flags, remaining = self._measured(plan)
            flags.warn_of_no_gradient()
            applied = self._apply(flags, remaining)
            self._finished(applied)
        finally:
            plan.release_gradients()
        if applied:
            for item in plan.items:
                self._versions[item.param] = item.version()
        return loss

    def _current_plan(self) -> StepPlan:
        """Return the parameters of a step with their states; made again if a state or a local tensor was replaced."""
        if self._plan is None or not self._plan.is_current():
            formulas = [self._formula(group) for group in self.param_groups]
            items = [
                ParameterStep(
                    param, self._states[param], self._weights[param], number, formulas[number], self._streams[param]
                )
                for number, group in enumerate(self.param_groups)
                for param in group["params"]
                if param in self._states
            ]
            frozen = [param for param in self._names if param not in self._states]
            self._plan = StepPlan(items, frozen, FlagLayout((self._names[item.param], item.param) for item in items))
        return self._plan

    def _take_gradients(self, plan: StepPlan, groups: Sequence[GroupSettings]) -> None:
        """Give each parameter's step its gradient, after checking that only this optimizer changed the parameter."""
        attribute = guards.DECOUPLED_GRAD if self._use_decoupled_grad else "grad"
        seed = self._seed
        for param in plan.frozen:
            if getattr(param, attribute, None) is not None:
                self._raise_for_frozen(param)
        for item in plan.items:
            param, version = item.param, item.version()
            grad: Tensor | None = getattr(param, attribute, None)
            if grad is not None:
                guards.check_alike(param, grad, self._names[param], "gradient" if attribute == "grad" else attribute)
                if self._made_for[param] != (param.dtype, param.shape):
                    self._check_fits(param, self._made_for[param], item.depends_on_dtype or self._loses_master(item))
            if self._versions.setdefault(param, version) != version and MASTER in item.states:
                if item.is_quantized:
                    self._raise_for_new_values(param)
                item.source.adopt()
            item.begin(grad, groups[item.number], seed)
            if item.grad is not None and item.grad.shape != item.local.shape:
                raise ConfigurationError(
                    f"{self._names[param]} has local shape {tuple(item.local.shape)}, its gradient "
                    f"{tuple(item.grad.shape)}"
                )

    def _loses_master(self, item: ParameterStep) -> bool:
        """Whether the parameter has no master, but would have one in another dtype."""
        return self._master_weights and item.source is item.weight

    def _apply(self, flags: GradientFlags, remaining: list[ParameterStep]) -> bool:
        """Finish the updates that no kernel has written, unless a gradient is bad. Return False if the host skips the
        step.

        When the host learns of a bad gradient depends:

        - `capturable`: never. The device undoes the step and counts it.
        - deferred: in the next step. The device undoes the step, and until then the host counts it as applied.
        - otherwise: now.
        """
        if self._capturable:
            self._last_bad_step.finish(remaining, flags, self.param_groups)
            return True
        deferred = self._is_late(flags)
        if not deferred and self._skips(flags):
            self._last_bad_step.keep(flags)
            return False
        for item in remaining:
            item.finish(flags.bad() if deferred else None)
        for group in self.param_groups:
            group["step"] += 1
        self._unread = flags if deferred else None
        return True

    def _measured(self, plan: StepPlan) -> tuple[GradientFlags, list[ParameterStep]]:
        """Return the gradient flags of all ranks, and the measured parameter steps that are still to be finished.

        A subclass with kernels overrides this and applies its part of the step here, unless a gradient is bad.
        """
        reduction = FlatMax()
        for item in plan.items:
            item.measure(reduction)
        return self._flags(plan, reduction), plan.items

    def _finished(self, applied: bool) -> None:
        """Hook that runs at the end of a step, applied or skipped."""
        return

    def _is_late(self, flags: GradientFlags) -> bool:
        """Whether reading the flags is left to the next step (or to whoever reads `skipped_steps` first).

        The host then treats the step as applied. A weight without a master counts its random draws on the host, in
        state that can be saved before the flags are read; so without masters all ranks wait.
        """
        return flags.deferred and self._master_weights

    def _skips(self, flags: GradientFlags) -> bool:
        try:
            return flags.skips(self.param_groups, self._max_skipped_in_a_row)
        except Exception:
            self._finished(applied=False)
            raise

    def _flags(self, plan: StepPlan, reduction: FlatMax, exceeding: Tensor | None = None) -> GradientFlags:
        """Run the pending reductions and return the gradient flags of all ranks."""
        rate_flags = wrong_rates(self.param_groups, len(plan.items)) if self._capturable else None
        flags = GradientFlags(plan.flags, [item.grad for item in plan.items], reduction, exceeding, rate_flags)
        reduction.reduce()
        flags.gather()
        return flags

    def _formula(self, group: Mapping[str, Any]) -> UpdateFormula:
        """Return the update formula of a group's parameters."""
        return UpdateFormula(self._name, self.group_states(group), self.update)

    def _group_settings(self, number: int, group: dict[str, Any]) -> GroupSettings:
        self.check_group(f"{self._name}: param_groups[{number}]", group)
        if self._capturable and not isinstance(group["lr"], Tensor):
            raise ConfigurationError(
                f"{self._name}: param_groups[{number}]: lr={group['lr']!r} has replaced the tensor that "
                f"capturable=True reads; use group['lr'].fill_({group['lr']!r})"
            )
        return GroupSettings(number, group["step"] + 1, self.settings(group), float(group.get(EMA_DECAY, 0.0)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients (and `decoupled_grad`, if used): set them to None (default) or to zero."""
        self._adopt_replaced_parameters()
        super().zero_grad(set_to_none)
        if not self._use_decoupled_grad:
            return
        for param in self._names:
            grad = getattr(param, guards.DECOUPLED_GRAD, None)
            if set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            elif grad is not None:
                grad.detach().zero_()
