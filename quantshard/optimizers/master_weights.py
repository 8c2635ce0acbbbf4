"""MasterWeights: any `torch.optim` optimizer, run on float32 masters of a model's quantized weights.

A step is one small collective (is any gradient missing or not finite), the inner optimizer's step on the masters, and
one flat collective of amaxes. Afterwards every weight is the nearest quantization of its master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, private_torch, state_storage
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics import adam
from quantshard.numerics.states import AVERAGE, EMA_DECAY, MASTER
from quantshard.optimizers import guards, loading, rounding
from quantshard.optimizers.base import SWITCHES, ParameterOptimizer, check_ranges
from quantshard.optimizers.state import make_weight
from quantshard.state_storage import PLAIN_DTYPES
from quantshard.tensor import components

UPDATES = "updates"
OWN_ENTRIES = {"skipped_steps": 0, "skipped_in_a_row": 0}
"""Group entries that MasterWeights adds to the inner optimizer's."""
EMA_STEPS = "ema_steps"
"""Group entry that counts the steps of the averages, if `EMA_DECAY` is set."""


class MasterWeights(ParameterOptimizer):
    """Run a `torch.optim` optimizer on float32 masters and write their nearest quantization to the model's weights.

        optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3, weight_decay=0.1)

    `param_groups` are the inner optimizer's groups with the model's parameters, so LR schedulers and
    `group["lr"] = ...` work. `state[parameter]` holds the inner optimizer's state of the master, `master_param`
    (float32) and `updates` (a float32 scalar that counts updates). Masters and states are DTensors where the parameters
    are.

    Quantized, bfloat16 and float16 parameters have a master. It starts from `get_high_precision_init_val()` if the
    initial values were kept, otherwise from the (dequantized) parameter. The inner optimizer gets float32 and float64
    parameters directly. During its step, float32 copies of all gradients exist as well.

    The constructor allocates zero states of the kinds that the inner optimizer's first step creates, so a new process
    can load them. Entries that the inner optimizer creates only in later steps cannot be loaded. If any gradient is
    infinite or NaN, the step is skipped on all ranks: no master, weight, scale or state changes, and `skipped_steps`
    counts it.

    Args:
        optimizer_class: a `torch.optim.Optimizer` class, or a function that returns such an optimizer for
            `(groups, **options)`. Its `step()` must work without a closure.
        params: parameters, (name, parameter) pairs or groups. No parameter can be on the meta device. Trained
            parameters are quantized, float64, float32, bfloat16 or float16.
        max_skipped_in_a_row: raise after this many consecutive skipped steps.
        ema_decay: keep an average of the masters (or of parameters without one), in their dtype, as the state
            `ema_param`; see `FusedAdam`.
        settings: arguments of `optimizer_class`, such as lr and weight_decay. `fused=True` and `foreach=True` work.

    Raises:
        ConfigurationError: a parameter is on the meta device or of another dtype, or the inner optimizer needs a
            closure.
        RankMismatchError: ranks have different random keys for a weight.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        max_skipped_in_a_row: int = 10,
        ema_decay: float = 0.0,
        **settings: Any,
    ) -> None:
        self._set_up(max_skipped_in_a_row)
        # clearer than the inner optimizer's error for strings
        check_ranges("MasterWeights", {**settings, EMA_DECAY: ema_decay}, self.checked_numbers)
        self._own_entries: dict[str, Any] = {**OWN_ENTRIES, **(_average_entries(ema_decay) if ema_decay else {})}
        super().__init__(params, {})  # the inner optimizer fills in its defaults
        self._make = lambda groups: optimizer_class(groups, **settings)
        self._masters: dict[Tensor, Tensor] = {}
        self._averages: dict[Tensor, Tensor] = {}
        self._made_for: dict[Tensor, tuple[torch.dtype, torch.Size]] = {}
        self._overflown: Tensor | None = None  # see `_found_overflown`
        groups = self.param_groups
        for group in groups:
            self._add_masters(group)
        self._inner = self._make([self._inner_group(group) for group in groups])
        self.param_groups = self._inner.param_groups  # share the list and its dicts
        self.defaults = self._inner.defaults
        for group, model_group in zip(self.param_groups, groups, strict=True):
            self._complete(group, model_group["params"])
        self._is_built = True
        self._check_parameters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and allocate its masters and states. A collective call where parameters are sharded.

        Raises:
            ConfigurationError: the group has a parameter twice, or an option for all groups.
        """
        if self._is_built:
            self._adopt_replaced_parameters()
        super().add_param_group(self._checked_group(param_group, options=(*SWITCHES, *self.defaults)))
        if self._is_built:
            group = self.param_groups.pop()
            self._add_masters(group)
            self._inner.add_param_group(self._inner_group(group))
            self._complete(self.param_groups[-1], group["params"])
            self._check_parameters()

    @property
    def group_entries(self) -> tuple[str, ...]:
        """Group entries that a checkpoint must have although `defaults` lacks them."""
        return tuple(self._own_entries)

    def _check_parameters(self) -> None:
        guards.check_parameters((name, param) for param, name in self._names.items())

    # State -----------------------------------------------------------------------------------------------------------

    def _has_updates(self) -> bool:
        return any(int(state[UPDATES]) for state in self.state.values())

    def _make_states(self) -> None:
        for mapping in (self._masters, self._averages, self._made_for, self._names, self._versions):
            mapping.clear()
        self.state.clear()
        self._inner.state.clear()
        for group in self.param_groups:
            self._add_masters(group)
        for group in self.param_groups:
            for param in group["params"]:
                if param in self._masters:
                    self.state[param] = self._blank_state(param, group)
        self._check_parameters()

    def _add_masters(self, group: dict[str, Any]) -> None:
        """Record the names of a group's parameters and create their masters."""
        self._add_names(group)
        for param in group["params"]:
            if param.requires_grad:
                self._masters[param] = self._new_master(param)

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._masters.get(param, param) for param in group["params"]]}

    def _complete(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Put the model's parameters and blank states into a group that the inner optimizer filled in."""
        decay = group.get(EMA_DECAY)
        group.update({"params": params, **self._own_entries, **({EMA_DECAY: decay} if decay is not None else {})})
        for param in params:
            if param in self._masters:
                self._inner.state.pop(self._masters[param], None)  # made again before the first update
                self.state[param] = self._blank_state(param, group)

    @torch.no_grad()
    def _new_master(self, param: Tensor) -> Tensor:
        guards.check_trainable("MasterWeights", self._names[param], param, (*PLAIN_DTYPES, torch.float64))
        self._versions[param] = guards.weight_version(param)
        self._made_for[param] = param.dtype, param.shape
        if components.quantized_local(param) is None and param.dtype in (torch.float32, torch.float64):
            return param
        master = guards.initial_master(param)
        if isinstance(param, DTensor):
            master = components.as_dtensor(master, param, list(param.placements), tuple(param.shape))
        return nn.Parameter(master)

    @torch.no_grad()
    def initialize_state(self, param: Tensor) -> None:
        """Allocate the master and states of a parameter that was frozen when this optimizer was built."""
        self._adopt_replaced_parameters()
        group = next(group for group in self.param_groups if any(candidate is param for candidate in group["params"]))
        self._masters[param] = self._new_master(param)
        self.state[param] = self._blank_state(param, group)

    def _alone(self, tensor: Tensor, group: dict[str, Any]) -> torch.optim.Optimizer:
        """Build an inner optimizer for one tensor with a group's settings."""
        settings = {k: v for k, v in group.items() if k not in (*state_storage.PARAMETER_ENTRIES, *self._own_entries)}
        return self._make([{**settings, "params": [tensor]}])

    def _blank_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return zeros in the entries that the inner optimizer's first step creates for the parameter."""
        probe = nn.Parameter(torch.zeros_like(self._masters[param]))
        probe.grad = torch.zeros_like(probe)
        optimizer = self._alone(probe, group)
        try:
            optimizer.step()
        except TypeError as error:
            raise ConfigurationError(
                f"MasterWeights: {type(optimizer).__name__}.step() does not work without arguments ({error}); an "
                "optimizer that calls a closure itself would see the model's weights unchanged between its calls"
            ) from error
        state = optimizer.state.get(probe, {})
        for value in state.values():
            if isinstance(value, Tensor):
                private_torch.local_tensor(value).zero_()
        return self._with_own(param, state, torch.zeros((), dtype=torch.float32, device="cpu"))

    def _with_own(self, param: Tensor, state: dict[str, Any], updates: Tensor) -> dict[str, Any]:
        """Add the master, the update count and the average to an inner state, in place."""
        if self._masters[param] is not param:
            state[MASTER] = self._masters[param].detach()
        state[UPDATES] = updates
        if self._is_averaging:
            if param not in self._averages:
                self._averages[param] = self._masters[param].detach().clone()
            state[AVERAGE] = self._averages[param]
        return state

    # Averages --------------------------------------------------------------------------------------------------------

    @property
    def _is_averaging(self) -> bool:
        return EMA_DECAY in self._own_entries

    @torch.no_grad()
    def begin_average(self, decay: float) -> None:
        """Start averaging, from the present masters; see `FusedAdam.begin_average`.

        Averages count steps from the updates already made: the largest count of a group's parameters.

        Raises:
            ConfigurationError: averages are already kept, or the decay is invalid.
        """
        self._adopt_replaced_parameters()
        self._check_begins(decay)
        self._own_entries |= _average_entries(decay)
        for group in self.param_groups:
            counts = (int(self.state[param][UPDATES]) for param in group["params"] if param in self._masters)
            group.update(_average_entries(decay, max(counts, default=0)))
        for param, state in ((param, self.state[param]) for param in self._masters):
            self._with_own(param, state, state[UPDATES])

    def drop_average(self) -> None:
        """Stop averaging and free the averages."""
        self._adopt_replaced_parameters()
        for entries in (self._own_entries, *self.param_groups, *(self.state[param] for param in self._masters)):
            for name in (EMA_DECAY, EMA_STEPS, AVERAGE):
                entries.pop(name, None)
        self._averages.clear()

    def _move_averages(self) -> None:
        """Update the averages after a step, including those of parameters without a gradient."""
        for group in self.param_groups if self._is_averaging else ():
            group[EMA_STEPS] += 1
            share = adam.average_share(float(group[EMA_DECAY]), int(group[EMA_STEPS]))
            for param in group["params"]:
                if param in self._masters:
                    average = private_torch.local_tensor(self._averages[param])
                    average.copy_(adam.moved_average(average, private_torch.local_tensor(self._masters[param]), share))

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Reset all masters, and the averages, from the parameters, after loading new weights into the model alone."""
        self._adopt_replaced_parameters()
        self._overflown = None
        for param, master in self._masters.items():
            if master is not param:
                private_torch.local_tensor(master).copy_(guards.initial_master(param))
            if self._is_averaging:
                private_torch.local_tensor(self._averages[param]).copy_(private_torch.local_tensor(master))
            self._versions[param] = guards.weight_version(param)

    @loading.with_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class into the states, without casts.

        Raises:
            CheckpointError: it belongs to other parameters or another inner optimizer; the message names the first
                difference.
            ConfigurationError: the optimizer's parameters were replaced; see `step`.
        """
        self._adopt_replaced_parameters()
        self._overflown = None
        self._is_assigned |= loading.load_optimizer_state(self, state_dict, self._names)
        self._versions = guards.plain_versions(self._versions)  # allows loading the model before or after

    # Step ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters and weights from the gradients, and return the result of `closure`.

        If this update makes a master infinite or NaN (a learning rate or weight decay too large for the inner
        optimizer), the next step raises an error that names the master. A checkpoint saved in between contains the bad
        master.

        Raises:
            RankMismatchError: a gradient is missing on some ranks only.
            NonFiniteGradientError: too many consecutive steps were skipped, or the previous update made a master
                infinite or NaN.
            ConfigurationError: a parameter that was frozen has a gradient; others wrote to a quantized parameter; a
                group has an invalid value; or parameters were replaced after the first update (replacements before it
                are adopted, with new masters and states).
        """
        self._adopt_replaced_parameters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            check_ranges(f"MasterWeights: param_groups[{number}]", group, self.checked_numbers)
        self._check_ours()
        reduction = FlatMax()
        layout = guards.FlagLayout((self._names[param], param) for param in self._masters)
        flags = guards.GradientFlags(layout, [param.grad for param in self._masters], reduction, wrong=self._overflown)
        reduction.reduce()
        flags.gather()
        flags.warn_of_no_gradient()
        if flags.skips(self.param_groups, self._max_skipped_in_a_row):
            return loss
        with self._inner_step():
            self._inner.step()
        self._overflown = self._found_overflown()
        self._write_weights()
        self._move_averages()
        return loss

    def _found_overflown(self) -> Tensor | None:
        """Return float32 [masters]: `guards.WEIGHT` where a master is now infinite or NaN, 0 elsewhere.

        Nothing waits for the result. The next step sends it together with its gradient flags; checking it now would
        cost a second synchronization and a second collective, because the shard of one rank can overflow alone.
        """
        if not self._masters:
            return None
        local_masters = [private_torch.local_tensor(master).detach() for master in self._masters.values()]
        flags = kernel_dispatch.exceeding(local_masters, torch.finfo(torch.float32).max)
        return (flags >= guards.NOT_FINITE) * guards.WEIGHT

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, as any optimizer does.

        Raises:
            ConfigurationError: the optimizer's parameters were replaced; see `step`.
        """
        self._adopt_replaced_parameters()
        return super().state_dict()

    def _check_ours(self) -> None:
        """Check that nothing but this optimizer has changed the parameters."""
        for param, name in self._names.items():
            if param not in self._masters:
                if param.grad is not None:
                    self._raise_for_frozen(param)
                continue
            if param.grad is not None:
                if self._made_for[param] != (param.dtype, param.shape):
                    self._check_fits(param, self._made_for[param], self._masters[param] is param)
                guards.check_alike(param, param.grad, name, "gradient")
            if self._versions.setdefault(param, guards.weight_version(param)) != guards.weight_version(param):
                self._take_over(param)

    def _take_over(self, param: Tensor) -> None:
        """Copy values that others wrote to a plain parameter into its master."""
        if components.quantized_local(param) is not None:
            self._raise_for_new_values(param)
        if self._masters[param] is not param:
            master = private_torch.local_tensor(self._masters[param]).detach()
            rounding.adopt(master, private_torch.local_tensor(param).detach(), master.to(param.dtype))
        self._versions[param] = guards.weight_version(param)

    @contextmanager
    def _inner_step(self) -> Iterator[None]:
        """Give the inner optimizer the masters, their float32 gradients and states, and restore all of them on exit."""
        params = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                for param in self._updated(group["params"]):
                    master, state = self._masters[param], self.state[param]
                    master.grad = param.grad if master is param else param.grad.float()  # type: ignore[union-attr]
                    if state[UPDATES] == 0:
                        self._inner.state.pop(master, None)
                        state = self._alone(master, group).state.get(master)
                    if state is not None:
                        self._inner.state[master] = state
                group["params"] = self._inner_group(group)["params"]
            yield
            for param in self._updated(self._masters):
                updates = self.state[param][UPDATES] + 1
                self.state[param] = self._with_own(param, self._inner.state[self._masters[param]], updates)
        finally:
            for group, model_params in zip(self.param_groups, params, strict=True):
                group["params"] = model_params
            for param, master in self._masters.items():
                if master is not param:
                    master.grad = None

    def _updated(self, params: Iterable[Tensor]) -> list[Tensor]:
        return [param for param in params if param in self._masters and param.grad is not None]

    def _write_weights(self) -> None:
        """Round the masters to the nearest values that the parameters can represent."""
        reduction, pending = FlatMax(), []
        for param in self._updated(self._masters):
            values = private_torch.local_tensor(self._masters[param])
            if components.quantized_local(param) is not None:
                weight = make_weight(param)
                pending.append((weight, values, weight.begin(values, reduction)))
            elif self._masters[param] is not param:
                private_torch.local_tensor(param).copy_(values)
        reduction.reduce()
        for weight, values, measured in pending:
            weight.write(values, measured)
        self._versions.update({param: guards.weight_version(param) for param in self._updated(self._masters)})


def _average_entries(decay: float, steps: int = 0) -> dict[str, Any]:
    return {EMA_DECAY: float(decay), EMA_STEPS: steps}
