"""Optimizers whose update is a formula for each element: everything but the formula.

`FusedAdam` and `Lion` are such; docs/optimizers.md has another, in a few lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quantshard import kernel_dispatch
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics.states import EMA_DECAY, MASTER
from quantshard.optimizers import guards, options, parameter_registry
from quantshard.optimizers.capturable import wrong_rates
from quantshard.optimizers.master_check import warn_of_other_weights
from quantshard.optimizers.masters import MasterOptimizer, PendingStep
from quantshard.optimizers.state import OptimizerState
from quantshard.optimizers.step import GroupSettings, ParameterStep, Update, UpdateFormula
from quantshard.tensor import components


class ElementwiseOptimizer(MasterOptimizer, ABC):
    """Base of optimizers for models with quantized weights whose update is a formula for each element.

    A subclass declares its `states` and gives the formula, `update`; gradient descent with momentum is

        class Momentum(ElementwiseOptimizer):
            states = (StateSpec("momentum_buffer"),)

            def update(self, param, grad, master, states, settings):
                momentum = settings["momentum"] * states["momentum_buffer"] + grad
                return master - settings["lr"] * momentum, {"momentum_buffer": momentum}

        optimizer = Momentum(model.parameters(), {"lr": 0.1, "momentum": 0.9})

    It then has, on any number of ranks with the same bits: masters of quantized and 16-bit parameters, seeded from
    `get_high_precision_init_val` where that was kept, else from the (dequantized) parameter; states and masters of 32,
    16 or 8 bits, rounded stochastically when a step writes them, with words that depend on a seed (made at construction
    if one is needed, part of the state dict), the step, and the place in the global tensor; steps that are skipped on
    all ranks if a gradient is not finite, so that nothing changes and `skipped_steps` counts; and state dicts that are
    loaded on another number of ranks. States are allocated here, so that a new process can load them, and are DTensors
    exactly where parameters are. Since a formula sees one element at a time, one with norms of whole tensors (LAMB) or
    matrix products is for `MasterWeights`.

    Args:
        params: parameters, (name, parameter) pairs or groups. Parameters must not be on the meta device. Those that
            are trained are quantized, float32, bfloat16 or float16.
        defaults: entries of groups that do not set them; `lr` must be one of them.
        state_dtypes: by role, how a state is stored: `torch.float32` (the default), `torch.bfloat16`, `torch.float16`
            (scaled by a power of two for 128 elements of a row) or `torch.uint8` (FP8 likewise: E4M3, and UE5M3 of
            nonnegative ones). Scaled ones are for 2-D parameters; those of others stay float32.
        capturable: keep lr and the counts of steps in tensors on the parameters' device, and read nothing back from it
            in `step`; see `FusedAdam`. The formula must do as much.
        master_weights: False keeps no masters: weights are read, updated and rounded into their own format.
        master_weight_dtype: float32, float16 or bfloat16; parameters that are no coarser have no master.
        use_decoupled_grad: read `param.decoupled_grad`, of any floating dtype, instead of `param.grad`.
        store_param_remainders: parameters keep, instead of a master, the bits that they lack of it; see `FusedAdam`.
        max_skipped_in_a_row: raise after this many skipped steps in a row.
        ema_decay: keep an average of the weights; see `FusedAdam`.

    Raises:
        ConfigurationError: an argument does not fit; the message says which.
        RankMismatchError: ranks have different random keys for one weight, or different seeds.
    """

    # What a subclass says --------------------------------------------------------------------------------------------

    @abstractmethod
    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Any
    ) -> Update:
        """The formula: new values of the master and, by role, of all `states`.

        `grad`, `master`, the states and what is returned are float32, of the shape of the parameter's local part (which
        may be empty). Each element of the result depends on the same element of the arguments and on nothing else, or
        the bits depend on the mesh. It changes no argument, and may be called twice in a step.

        Args:
            param: the parameter, to tell it from others; its values are in `master`.
            grad: its gradient.
            master: the values that are trained: the master's, or without one the parameter's.
            states: by role.
            settings: what `settings` made of the parameter's group.
        """

    def settings(self, group: dict[str, Any]) -> Any:
        """What `update` is told of a group, once in a step: its entries, of which `step` counts this one, from 1.

        If `capturable`, `step` and `lr` are tensors.
        """
        return {**group, "step": group["step"] + 1}

    # Step ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: None = None) -> Any:  # type: ignore[override]
        """One optimizer step; a collective call where parameters are sharded.

        `grad_scaler` must be None: call `grad_scaler.unscale_(optimizer)` before, and `grad_scaler.step(optimizer)`.

        On a GPU nothing is waited for: whether gradients were bad, so that the device skipped the step, is counted and
        raised by the next step; who reads `skipped_steps` or a state dict before has it counted. Until then the `step`
        of a group counts such a step. Optimizers without masters are the exception.

        Raises:
            ConfigurationError: a parameter is a DTensor and its gradient is not, or the reverse; a number of a group
                makes no step; or parameters in groups were replaced after the first step (before it, those that took
                their places are adopted, with new states).
            RankMismatchError: some ranks only have a gradient for a parameter.
            NonFiniteGradientError: this was one skipped step too many in a row; on a GPU, the step before was.
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
        if self._has_loaded and not kernel_dispatch.is_capturing():
            self._has_loaded = False
            warn_of_other_weights(self._name, self._with_masters(work))
        flags, left = self._measured(work)
        flags.warn_of_no_gradient()
        deferred = self._is_late(flags)
        applied = self._capturable or deferred or not self._skips(flags)
        if self._capturable:
            self._last_bad_step.finish(left, flags, self.param_groups)
        elif applied:
            for item in left:
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
        """What all ranks know of the gradients, and what is left to be finished: it is measured.

        A subclass with kernels of its own makes its part of the step here, where nothing is wrong with a gradient.
        """
        reduction = FlatMax()
        for item in work:
            item.measure(reduction)
        return self._flags(work, reduction), work

    def _finished(self, applied: bool) -> None:
        """The step is over, made or skipped."""
        return

    def _is_late(self, flags: guards.GradientFlags) -> bool:
        """Whether flags that the device has yet to find out are left for the next step, or for whoever asks before.

        The step is then taken for made. A weight without a master counts its random draws on the host, in its own
        state, which others may save before that; so without masters the host waits, on all ranks alike.
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
        """What all ranks know of the gradients, after all that was registered has been reduced."""
        gradients = ((self._names[item.param], item.param, item.grad) for item in work)
        wrong = wrong_rates(self.param_groups, len(work)) if self._capturable else None
        flags = guards.GradientFlags(gradients, reduction, exceeding, wrong)
        reduction.reduce()
        flags.gather()
        return flags

    def _begin(self, groups: list[GroupSettings]) -> Iterator[ParameterStep]:
        """The parameters with a state, checked to be as this optimizer left them."""
        seed = self._seed
        for of_group, group in zip(groups, self.param_groups, strict=True):
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
                    param, grad, states, self._weights[param], of_group, formula, seed, self._streams[param]
                )

    def _with_masters(self, work: list[ParameterStep]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Names, values and masters of those that have values here, and a master that is not a part of the weight."""
        for item in work:
            if item.source is not item.weight and not item.source.writes_weight and item.param.numel() > 0:
                yield self._names[item.param], item.weight.read(), item.source.read()

    def _formula(self, group: Mapping[str, Any]) -> UpdateFormula:
        """What a group's parameters are stepped by."""
        return UpdateFormula(self._name, self.group_states(group), self.update)

    def _group_settings(self, number: int, group: dict[str, Any]) -> GroupSettings:
        where = f"{self._name}: group {number} has been given numbers that make no step: group"
        self.check_group(where, group, reads_rate=not self._capturable)
        if self._capturable and not isinstance(group["lr"], Tensor):
            raise ConfigurationError(
                f"{where}['lr'] = {group['lr']!r} in place of its tensor, which capturable=True keeps on the device; "
                f"write into that: group['lr'].fill_({group['lr']!r})"
            )
        options.check_no_states(type(self), group)  # maximize may be set later
        decay = group.get(EMA_DECAY, 0.0)
        options.check_decay(where, decay)
        options.check_group_decay(self._name, group, EMA_DECAY in self.defaults)
        return GroupSettings(number, group["step"] + 1, self.settings(group), float(decay))

    def _take_over(self, param: Tensor, master: OptimizerState) -> None:
        """Take the values that others gave a parameter over into its master."""
        if components.quantized_local(param) is not None:
            raise ConfigurationError(
                f"{self._names[param]} was given new values after this {self._name} was built, and the next step "
                "would overwrite them with its masters; load the optimizer's state too, or reseed_masters(). (A "
                "callback that swaps averaged weights in and out gives such values: keep averages by ema_decay, and "
                "evaluate with quantshard.optimizers.averaged_weights)"
            )
        master.adopt()

    def _grad_of(self, param: Tensor) -> Tensor | None:
        what = guards.DECOUPLED_GRAD if self._use_decoupled_grad else "grad"
        grad: Tensor | None = getattr(param, what, None)
        if grad is not None:
            guards.check_alike(param, grad, self._names[param], "gradient" if what == "grad" else what)
        return grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, `decoupled_grad` too where it is used: to None, or to zeros."""
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
