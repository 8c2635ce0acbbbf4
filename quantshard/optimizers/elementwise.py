"""Optimizers whose update is an elementwise formula: everything but the formula.

`FusedAdam` and `Lion` are examples; docs/optimizers.md writes another one in a few lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics.states import EMA_DECAY, MASTER
from quantshard.optimizers import guards, options, parameter_registry
from quantshard.optimizers.capturable import wrong_rates
from quantshard.optimizers.masters import MasterOptimizer, PendingStep
from quantshard.optimizers.state import OptimizerState
from quantshard.optimizers.step import GroupSettings, ParameterStep, Update, UpdateFormula
from quantshard.tensor import components


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
        groups = [self._group_settings(*numbered) for numbered in enumerate(self.param_groups)]
        work = list(self._begin(groups))
        flags, remaining = self._measured(work)
        flags.warn_of_no_gradient()
        deferred = self._is_late(flags)
        applied = self._capturable or deferred or not self._skips(flags)
        if self._capturable:
            self._last_bad_step.finish(remaining, flags, self.param_groups)
        elif applied:
            for item in remaining:
                item.finish(flags.bad() if deferred else None)
            for group in self.param_groups:
                group["step"] += 1
            self._unread = PendingStep(flags, self._kept) if deferred else None
        self._finished(applied)
        if not applied:
            self._last_bad_step.keep(flags)
            return loss
        if any(item.grad is not None for item in work):
            self._kept = parameter_registry.UPDATES
        for item in work:
            self._versions[item.param] = guards.weight_version(item.param)
        return loss

    def _measured(self, work: list[ParameterStep]) -> tuple[guards.GradientFlags, list[ParameterStep]]:
        """Return the gradient flags of all ranks, and the measured parameter steps that are still to be finished.

        A subclass with kernels overrides this and applies its part of the step here, unless a gradient is bad.
        """
        reduction = FlatMax()
        for item in work:
            item.measure(reduction)
        return self._flags(work, reduction), work

    def _finished(self, applied: bool) -> None:
        """Hook that runs at the end of a step, applied or skipped."""
        return

    def _is_late(self, flags: guards.GradientFlags) -> bool:
        """Whether reading the flags is left to the next step (or to whoever reads `skipped_steps` first).

        The host then treats the step as applied. A weight without a master counts its random draws on the host, in
        state that can be saved before the flags are read; so without masters all ranks wait.
        """
        return flags.deferred and self._master_weights

    def _skips(self, flags: guards.GradientFlags) -> bool:
        try:
            return flags.skips(self.param_groups, self._max_skipped_in_a_row)
        except Exception:
            self._finished(applied=False)
            raise

    def _flags(
        self, work: list[ParameterStep], reduction: FlatMax, exceeding: Tensor | None = None
    ) -> guards.GradientFlags:
        """Run the pending reductions and return the gradient flags of all ranks."""
        gradients = ((self._names[item.param], item.param, item.grad) for item in work)
        rate_flags = wrong_rates(self.param_groups, len(work)) if self._capturable else None
        flags = guards.GradientFlags(gradients, reduction, exceeding, rate_flags)
        reduction.reduce()
        flags.gather()
        return flags

    def _begin(self, groups: list[GroupSettings]) -> Iterator[ParameterStep]:
        """Yield a step for each parameter with states, after checking that only this optimizer changed it."""
        seed = self._seed
        for group_settings, group in zip(groups, self.param_groups, strict=True):
            formula = self._formula(group)
            for param in group["params"]:
                grad = self._grad_of(param)
                if param not in self._states:
                    if grad is not None:
                        raise ConfigurationError(
                            f"{self._names[param]} was frozen when this {self._name} was built and has a gradient now; "
                            "call initialize_state(parameter) when you unfreeze it"
                        )
                    continue
                if grad is not None:
                    self._members.check_stored(param, self._names[param])
                states, version = self._states[param], guards.weight_version(param)
                if self._versions.setdefault(param, version) != version and MASTER in states:
                    self._take_over(param, states[MASTER])
                yield ParameterStep(
                    param, grad, states, self._weights[param], group_settings, formula, seed, self._streams[param]
                )

    def _formula(self, group: Mapping[str, Any]) -> UpdateFormula:
        """Return the update formula of a group's parameters."""
        return UpdateFormula(self._name, self.group_states(group), self.update)

    def _group_settings(self, number: int, group: dict[str, Any]) -> GroupSettings:
        where = f"{self._name}: group {number} has been given numbers that make no step: group"
        self.check_group(where, group, reads_rate=not self._capturable)
        if self._capturable and not isinstance(group["lr"], Tensor):
            raise ConfigurationError(
                f"{where}['lr'] = {group['lr']!r} in place of its tensor, which capturable=True keeps on the device; "
                f"write into that: group['lr'].fill_({group['lr']!r})"
            )
        options.check_no_states(type(self), group)  # again: maximize can be set between steps
        decay = group.get(EMA_DECAY, 0.0)
        options.check_decay(where, decay)
        options.check_group_decay(self._name, group, EMA_DECAY in self.defaults)
        return GroupSettings(number, group["step"] + 1, self.settings(group), float(decay))

    def _take_over(self, param: Tensor, master: OptimizerState) -> None:
        """Copy values that others wrote to a plain parameter into its master."""
        if components.quantized_local(param) is not None:
            raise ConfigurationError(
                f"{self._names[param]} was given new values after this {self._name} was built, and the next step "
                "would overwrite them with its masters; load the optimizer's state too, or reseed_masters(). (A "
                "callback that swaps averaged weights in and out gives such values: keep averages by ema_decay, and "
                "evaluate with quantshard.optimizers.averaged_weights)"
            )
        master.adopt()

    def _grad_of(self, param: Tensor) -> Tensor | None:
        attribute = guards.DECOUPLED_GRAD if self._use_decoupled_grad else "grad"
        grad: Tensor | None = getattr(param, attribute, None)
        if grad is not None:
            guards.check_alike(param, grad, self._names[param], "gradient" if attribute == "grad" else attribute)
        return grad

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
