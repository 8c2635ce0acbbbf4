"""MasterWeights: any `torch.optim` optimizer, run on float32 masters of a model's quantized weights.

A step is one small collective (is any gradient missing or not finite), the inner optimizer's step on the masters, and
one flat collective of amaxes. Afterwards every weight is the nearest quantization of its master.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.numerics import adam
from quantshard.numerics.states import AVERAGE, EMA_DECAY, MASTER
from quantshard.optimizers import averaging, checks, loading
from quantshard.optimizers.base import ParameterOptimizer, check_alike, check_ranges, weight_version
from quantshard.optimizers.checks import SWITCHES
from quantshard.optimizers.guards import NOT_FINITE, WEIGHT, FlagLayout, GradientFlags, gradient_of, gradient_parts
from quantshard.optimizers.state import adopt, initial_master, make_weight
from quantshard.state_storage import PLAIN_DTYPES
from quantshard.tensor import components

UPDATES = "updates"
"""State of each parameter that counts its updates."""

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
    can load them. If any gradient is infinite or NaN, the step is skipped on all ranks: nothing changes, and
    `skipped_steps` counts it.

    Args:
        optimizer_class: a `torch.optim.Optimizer` class, or a function that returns such an optimizer for
            `(groups, **options)`. Its `step()` must work without a closure.
        params: parameters, (name, parameter) pairs or groups. No parameter can be on the meta device. Trained
            parameters are quantized, float64, float32, bfloat16 or float16.
        max_skipped_in_a_row: raise after this many consecutive skipped steps.
        ema_decay: keep an average of the masters (or of parameters without one), in their dtype, as the state
            `ema_param`; see `FusedAdam`.
        settings: arguments of `optimizer_class`, such as lr and weight_decay. `fused=True` and `foreach=True` work.
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
        self._own_entries: dict[str, Any] = {"skipped_steps": 0, "skipped_in_a_row": 0}
        if ema_decay:
            self._own_entries |= {EMA_DECAY: float(ema_decay), EMA_STEPS: 0}
        super().__init__(params, {})  # the inner optimizer fills in its defaults
        self._make = lambda groups: optimizer_class(groups, **settings)
        self._masters: dict[Tensor, Tensor] = {}
        self._overflown: Tensor | None = None  # see `_overflown_masters`
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
        """Add a group and allocate its masters and states. A collective call where parameters are sharded."""
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
        return tuple(self._own_entries)

    def _has_updates(self) -> bool:
        return any(int(state[UPDATES]) for state in self.state.values())

    def _make_states(self) -> None:
        for mapping in (self._masters, self._made_for, self._names, self._versions):
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
        self._add_names(group)
        self._masters |= {param: self._new_master(param) for param in group["params"] if param.requires_grad}

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._masters.get(param, param) for param in group["params"]]}

    def _complete(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Put the model's parameters and blank states into a group that the inner optimizer filled in."""
        decay = {EMA_DECAY: group[EMA_DECAY]} if EMA_DECAY in group else {}
        group.update({**self._own_entries, **decay, "params": params})
        for param in params:
            if param in self._masters:
                self._inner.state.pop(self._masters[param], None)  # made again before the first update
                self.state[param] = self._blank_state(param, group)

    @torch.no_grad()
    def _new_master(self, param: Tensor) -> Tensor:
        checks.check_trainable(f"{self._name}: {self._names[param]}", param, (*PLAIN_DTYPES, torch.float64))
        self._versions[param] = weight_version(param)
        self._made_for[param] = param.dtype, param.shape
        if components.quantized_local(param) is None and param.dtype in (torch.float32, torch.float64):
            return param
        master = initial_master(param).view(private_torch.local_tensor(param).shape)
        if isinstance(param, DTensor):
            master = components.as_dtensor(master, param, list(param.placements), tuple(param.shape))
        return nn.Parameter(master)

    @torch.no_grad()
    def initialize_state(self, param: Tensor) -> None:
        """Allocate the master and states of a parameter that was frozen when this optimizer was built."""
        self._adopt_replaced_parameters()
        group = self._group_of(param)
        self._masters[param] = self._new_master(param)
        self.state[param] = self._blank_state(param, group)

    def _alone(self, tensor: Tensor, group: dict[str, Any]) -> torch.optim.Optimizer:
        settings = {k: v for k, v in group.items() if k not in (*loading.PARAMETER_ENTRIES, *self._own_entries)}
        return self._make([{**settings, "params": [tensor]}])

    def _blank_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return zeros in the entries that the inner optimizer's first step creates for the parameter."""
        probe = nn.Parameter(torch.zeros_like(self._masters[param]))
        probe.grad = torch.zeros_like(probe)
        optimizer = self._alone(probe, group)
        optimizer.step()
        state = optimizer.state.get(probe, {})
        for value in state.values():
            if isinstance(value, Tensor):
                private_torch.local_tensor(value).zero_()
        updates = torch.zeros((), dtype=torch.float32, device="cpu")
        average = {AVERAGE: self._masters[param].detach().clone()} if self._is_averaging else {}
        master = {} if self._masters[param] is param else {MASTER: self._masters[param].detach()}
        return {**state, **master, UPDATES: updates, **average}

    @property
    def _is_averaging(self) -> bool:
        return EMA_DECAY in self._own_entries

    @torch.no_grad()
    def begin_average(self, decay: float) -> None:
        """Start averaging, from the present masters and counts of updates; see `FusedAdam.begin_average`."""
        self._adopt_replaced_parameters()
        averaging.check_begins(self, decay)
        self._own_entries |= {EMA_DECAY: float(decay), EMA_STEPS: 0}
        for group in self.param_groups:
            counts = (int(self.state[param][UPDATES]) for param in group["params"] if param in self._masters)
            group.update({EMA_DECAY: float(decay), EMA_STEPS: max(counts, default=0)})
        for param, master in self._masters.items():
            self.state[param][AVERAGE] = master.detach().clone()

    def drop_average(self) -> None:
        """Stop averaging and free the averages."""
        self._adopt_replaced_parameters()
        for entries in (self._own_entries, *self.param_groups, *(self.state[param] for param in self._masters)):
            for name in (EMA_DECAY, EMA_STEPS, AVERAGE):
                entries.pop(name, None)

    def _move_averages(self) -> None:
        for group in self.param_groups if self._is_averaging else ():
            group[EMA_STEPS] += 1
            share = adam.average_share(float(group[EMA_DECAY]), int(group[EMA_STEPS]))
            for param in self._masters.keys() & {*group["params"]}:
                average, master = map(private_torch.local_tensor, (self.state[param][AVERAGE], self._masters[param]))
                average.copy_(adam.moved_average(average, master, share))

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Reset all masters and averages from the parameters, after loading new weights into the model alone."""
        self._adopt_replaced_parameters()
        self._overflown = None
        for param, master in self._masters.items():
            if master is not param:
                local = private_torch.local_tensor(master)
                local.copy_(initial_master(param).view(local.shape))
            if self._is_averaging:
                private_torch.local_tensor(self.state[param][AVERAGE]).copy_(private_torch.local_tensor(master))
            self._versions[param] = weight_version(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._overflown = None
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters and weights from the gradients, and return the result of `closure`.

        If this update makes a master infinite or NaN (a learning rate or weight decay too large for the inner
        optimizer), the next step raises an error that names the master. A checkpoint saved in between contains it.
        """
        self._adopt_replaced_parameters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            self.check_group(f"MasterWeights: param_groups[{number}]", group)
        self._check_parameters_unchanged()
        if not self._has_updates():
            checks.warn_of_replaced_parameters(self._name, self._names)
        layout = FlagLayout((self._names[param], param) for param in self._masters)
        flags = GradientFlags(
            layout, [gradient_of(param, decoupled=False) for param in self._masters], FlatMax(), wrong=self._overflown
        )
        flags.warn_of_no_gradient()
        if self._skips(flags):
            return loss
        with self._inner_step():
            self._inner.step()
        self._overflown = self._overflown_masters()
        self._write_weights()
        self._move_averages()
        return loss

    def _overflown_masters(self) -> Tensor | None:
        """Return `guards.WEIGHT` where a master is now infinite or NaN, 0 elsewhere: flags for the next step."""
        if not self._masters:
            return None
        local_masters = [private_torch.local_tensor(master).detach() for master in self._masters.values()]
        flags = kernel_dispatch.exceeding(local_masters, torch.finfo(torch.float32).max)
        return (flags >= NOT_FINITE) * WEIGHT

    def _check_parameters_unchanged(self) -> None:
        for param, name in self._names.items():
            if param not in self._masters:
                if param.grad is not None:
                    self._raise_for_frozen(param)
                continue
            if (gradient := gradient_of(param, decoupled=False)) is not None:
                check_alike(param, gradient, name, "gradient")
            master, version = self._masters[param], weight_version(param)
            if self._is_overwritten(param, gradient, version, master is not param, depends_on_dtype=master is param):
                local_master = private_torch.local_tensor(master).detach()
                adopt(local_master, private_torch.local_tensor(param).detach(), local_master.to(param.dtype))
            self._versions[param] = version

    @contextmanager
    def _inner_step(self) -> Iterator[None]:
        """Give the inner optimizer the masters, their float32 gradients and states, and restore all of them on exit."""
        params = [group["params"] for group in self.param_groups]
        grads = {param: param.grad for param in self._masters}
        try:
            for group in self.param_groups:
                for param in self._updated(group["params"]):
                    master, state = self._masters[param], self.state[param]
                    gradient = gradient_of(param, decoupled=False)
                    master.grad = gradient if master is param else gradient.float()  # type: ignore[union-attr]
                    if state[UPDATES] == 0:
                        self._inner.state.pop(master, None)
                        state = self._alone(master, group).state.get(master)
                    if state is not None:
                        self._inner.state[master] = state
                group["params"] = self._inner_group(group)["params"]
            yield
            for param in self._updated(self._masters):
                own, inner = self.state[param], self._inner.state[self._masters[param]]
                own[UPDATES] = own[UPDATES] + 1
                self.state[param] = {**inner, **{key: own[key] for key in (MASTER, UPDATES, AVERAGE) if key in own}}
        finally:
            for group, model_params in zip(self.param_groups, params, strict=True):
                group["params"] = model_params
            for param, master in self._masters.items():
                master.grad = grads[param] if master is param else None

    def _updated(self, params: Iterable[Tensor]) -> list[Tensor]:
        return [param for param in params if param in self._masters and gradient_parts(param, decoupled=False)]

    def _write_weights(self) -> None:
        reduction, pending = FlatMax(), []
        for param in self._updated(self._masters):
            values = private_torch.local_tensor(self._masters[param])
            if components.quantized_local(param) is not None:
                weight = make_weight(param)
                values = components.as_matrix(values, weight.storage)
                pending.append((weight, values, weight.measure(values, reduction)))
            elif self._masters[param] is not param:
                private_torch.local_tensor(param).copy_(values)
        reduction.reduce()
        for weight, values, requantization in pending:
            weight.write(values, requantization)
        self._versions.update({param: weight_version(param) for param in self._updated(self._masters)})
