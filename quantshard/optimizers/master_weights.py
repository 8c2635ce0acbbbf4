"""MasterWeights: any `torch.optim` optimizer, run on float32 masters of a model's quantized weights.

A step is one small collective (is any gradient missing or not finite), the inner optimizer's step on the masters, and
one flat collective of amaxes, after which every weight is the nearest quantization of its master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.numerics import averages
from quantshard.numerics.states import AVERAGE, EMA_DECAY, MASTER
from quantshard.optimizers import guards, loading, options, parameter_registry, rounding
from quantshard.optimizers.master_check import warn_of_other_weights
from quantshard.optimizers.state import PLAIN_DTYPES, make_weight
from quantshard.tensor import components

UPDATES = "updates"
OWN_ENTRIES = {"skipped_steps": 0, "skipped_in_a_row": 0}
"""What a group holds besides the inner optimizer's entries."""
EMA_STEPS = "ema_steps"
"""The entry that counts the steps of averages, where they are kept, beside `EMA_DECAY`."""


class MasterWeights(torch.optim.Optimizer):
    """Runs an optimizer on float32 masters, and gives the weights of the model their nearest quantization.

        optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3, weight_decay=0.1)

    It is an optimizer over the model's parameters: `param_groups` are those of the inner optimizer, so LR schedulers
    and `group["lr"] = ...` reach it, and `state[parameter]` is the inner optimizer's state of its master together with
    `master_param` (float32) and `updates` (how many it had; float32 scalar). Masters and states are DTensors where
    parameters are. Quantized, bfloat16 and float16 parameters have a master, seeded from `get_high_precision_init_val`
    where that was kept, else from the (dequantized) parameter; float32 and float64 ones are given to the inner
    optimizer as they are. During its step float32 copies of all gradients are held too.

    States are allocated here, so that a new process can load them: zeros, of the kinds that a first step of the inner
    optimizer makes. Entries that it makes only in later steps cannot be loaded.

    A step whose gradients are not all finite is skipped on all ranks: no master, weight, scale or state changes, and
    `skipped_steps` counts it.

    Args:
        optimizer_class: a `torch.optim.Optimizer` class, or a function that returns such an optimizer for
            `(groups, **options)`. Its `step()` must work without a closure.
        params: parameters, (name, parameter) pairs or groups. Parameters must not be on the meta device. Those that
            are trained are quantized, float64, float32, bfloat16 or float16.
        max_skipped_in_a_row: raise after this many skipped steps in a row.
        ema_decay: keep an average of the masters, and of parameters without one, as the state `ema_param`, in their
            dtype; see `FusedAdam`.
        settings: those of `optimizer_class`, e.g. lr and weight_decay; `fused=True` and `foreach=True` are fine.

    Raises:
        ConfigurationError: a parameter is on the meta device or of another dtype, or a closure is needed.
        RankMismatchError: ranks have different random keys for one weight.
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
        if not callable(optimizer_class):
            given = type(optimizer_class).__name__
            wanted = given if isinstance(optimizer_class, torch.optim.Optimizer) else "AdamW"
            raise ConfigurationError(
                f"MasterWeights({given} object): give the class first, which is built over the masters, then the "
                f"parameters and its options: MasterWeights(torch.optim.{wanted}, params, lr=...)"
            )
        guards.keep_out_of_graphs(type(self))
        options.check_any("MasterWeights", settings)  # of text the inner optimizer would say that it compares badly
        options.check_decay("MasterWeights", ema_decay)
        self._own_entries: dict[str, Any] = {**OWN_ENTRIES, **(_average_entries(ema_decay) if ema_decay else {})}
        self._averages_swapped_in = False
        self._members, self._is_assigned = parameter_registry.ParameterRegistry("MasterWeights"), False
        super().__init__(
            parameter_registry.checked_params("MasterWeights", params), {}
        )  # the inner optimizer fills in its defaults
        self._make = lambda groups: optimizer_class(groups, **settings)
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._masters: dict[Tensor, Tensor] = {}
        self._averages: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self._names: dict[Tensor, str] = {}
        self._overflown: Tensor | None = None  # of each master, what the last update made wrong
        self._has_loaded = False  # masters, which no step has read yet
        groups = self.param_groups
        given = [dict(group) for group in groups]
        for group in groups:
            self._adopt(group)
        self._inner = self._make([self._inner_group(group) for group in groups])
        self.param_groups = self._inner.param_groups  # one list of one set of dicts
        self.defaults = self._inner.defaults
        for group in given:
            self._check_entries(group)
        for group, model_group in zip(self.param_groups, groups, strict=True):
            self._complete(group, model_group["params"])
        self._check_parameters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its masters and states are allocated at once. A collective call where parameters are sharded.

        Raises:
            ConfigurationError: it has no parameters or one twice, or a number of it makes no step.
        """
        is_built = hasattr(self, "_inner")  # else it is the base class's constructor that calls
        if is_built:
            self._adopt_replaced_parameters()
        group = parameter_registry.checked_group("MasterWeights", len(self.param_groups), param_group)
        if is_built:
            self._check_entries(group)
        super().add_param_group(group)
        if is_built:
            group = self.param_groups.pop()
            self._adopt(group)
            self._inner.add_param_group(self._inner_group(group))
            self._complete(self.param_groups[-1], group["params"])
            self._check_parameters()

    def _check_entries(self, group: Mapping[str, Any]) -> None:
        options.check_no_states(type(self), group, inner=self.defaults)
        options.warn_of_typos("MasterWeights", group, {*self.defaults, *self._own_entries}, OWN_ENTRIES)

    @property
    def group_entries(self) -> tuple[str, ...]:
        """As of `FusedAdam`: entries that `defaults` does not name and a checkpoint must have."""
        return tuple(self._own_entries)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because a gradient was not finite."""
        return int(self.param_groups[0]["skipped_steps"])

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeights:
        raise UnsupportedOperationError(
            "a MasterWeights is not copied: its states belong to its parameters; build another one over the copied "
            "model and load this one's state_dict() into it"
        )

    def _check_parameters(self) -> None:
        guards.check_parameters((name, param) for param, name in self._names.items())

    # State -----------------------------------------------------------------------------------------------------------

    def _adopt_replaced_parameters(self) -> None:
        """Make masters and states for parameters that others have put in the places of those that this optimizer knew;
        see `parameter_registry`. Called before anything that reads or writes a state."""
        guards.check_own_weights("MasterWeights", self._averages_swapped_in)
        swaps = self._members.replaced(self.param_groups, self._names, self._kept)
        self._add_masters(self._members.recast())
        if not swaps:
            return
        for swap in swaps:
            self._inner.state.pop(self._masters.pop(swap.old, swap.old), None)
            for mapping in (self._versions, self._averages, self.state):
                mapping.pop(swap.old, None)
            self._names[swap.new] = self._names.pop(swap.old)
        for swap in swaps:
            if swap.new.requires_grad:
                self.initialize_state(swap.new)
        for name in ("_masters", "_names"):
            setattr(self, name, parameter_registry.reordered(getattr(self, name), self.param_groups))
        self._check_parameters()

    @torch.no_grad()
    def _add_masters(self, recast: list[Tensor]) -> None:
        """Give float32 parameters that a cast of the model made coarser the masters that they lack now."""
        for param in recast:
            if self._masters.get(param) is param and param.dtype in PLAIN_DTYPES:
                self._masters[param] = self._new_master(param)
                self._with_own(param, self.state[param], self.state[param][UPDATES])

    def _kept(self) -> str:
        """What the states hold that new ones would not."""
        updates = max((int(self.state[param][UPDATES]) for param in self._masters if param in self.state), default=0)
        return parameter_registry.UPDATES if updates > 0 else parameter_registry.VALUES if self._is_assigned else ""

    def _adopt(self, group: dict[str, Any]) -> None:
        """Give a group's parameters names and masters."""
        options.check_group_decay("MasterWeights", group, self._is_averaging)
        self._members.add(group["params"])
        names = group.get("param_names") or [f"parameter {len(self._names) + i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            self._names[param] = name
            if param.requires_grad:
                self._masters[param] = self._new_master(param)
                self._versions[param] = guards.weight_version(param)

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._masters.get(param, param) for param in group["params"]]}

    def _complete(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Make a group that the inner optimizer filled in one of the model's parameters, with their blank states."""
        decay = group.get(EMA_DECAY)
        group.update({"params": params, **self._own_entries, **({EMA_DECAY: decay} if decay is not None else {})})
        for param in params:
            if param in self._masters:
                self._inner.state.pop(self._masters[param], None)  # made again before the first update
                self.state[param] = self._blank_state(param, group)

    @torch.no_grad()
    def _new_master(self, param: Tensor) -> Tensor:
        guards.check_trainable("MasterWeights", self._names[param], param, (*PLAIN_DTYPES, torch.float64))
        self._members.record_states(param, of_any_dtype=True)
        if components.quantized_local(param) is None and param.dtype in (torch.float32, torch.float64):
            return param
        master = guards.initial_master(param)
        if isinstance(param, DTensor):
            master = components.as_dtensor(master, param, list(param.placements), tuple(param.shape))
        return nn.Parameter(master)

    @torch.no_grad()
    def initialize_state(self, param: Tensor) -> None:
        """Allocate the master and the states of a parameter that was frozen when this optimizer was built."""
        self._adopt_replaced_parameters()
        group = next(group for group in self.param_groups if any(other is param for other in group["params"]))
        self._masters[param] = self._new_master(param)
        self._versions[param] = guards.weight_version(param)
        self.state[param] = self._blank_state(param, group)

    def _alone(self, tensor: Tensor, group: dict[str, Any]) -> torch.optim.Optimizer:
        """A new inner optimizer for one tensor, with a group's settings."""
        settings = {k: v for k, v in group.items() if k not in (*components.PARAMETER_ENTRIES, *self._own_entries)}
        return self._make([{**settings, "params": [tensor]}])

    def _blank_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The entries that one step of the inner optimizer makes for such a parameter, zero."""
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
        """An inner state, completed in place."""
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
        """Keep averages from here on, which begin with the present masters; see `FusedAdam.begin_average`.

        They count steps from the updates that were made before: of a group, the most that one of its parameters had.

        Raises:
            ConfigurationError: there are some already, or the decay is none.
        """
        self._adopt_replaced_parameters()
        options.check_decay("MasterWeights.begin_average", decay)
        if self._is_averaging or not decay:
            raise ConfigurationError(
                f"MasterWeights.begin_average({decay}): "
                + ("averages are kept already; set group['ema_decay']" if decay else "a decay of 0 keeps no average")
            )
        self._own_entries |= _average_entries(decay)
        for group in self.param_groups:
            made = (int(self.state[param][UPDATES]) for param in group["params"] if param in self._masters)
            group.update(_average_entries(decay, max(made, default=0)))
        for param, state in ((param, self.state[param]) for param in self._masters):
            self._with_own(param, state, state[UPDATES])

    def drop_average(self) -> None:
        """Keep no averages from here on, and free their memory."""
        self._adopt_replaced_parameters()
        for entries in (self._own_entries, *self.param_groups, *(self.state[param] for param in self._masters)):
            for name in (EMA_DECAY, EMA_STEPS, AVERAGE):
                entries.pop(name, None)
        self._averages.clear()

    def _move_averages(self) -> None:
        """After a step that was made: of all parameters, those too that had no gradient."""
        for group in self.param_groups if self._is_averaging else ():
            group[EMA_STEPS] += 1
            share = averages.share(float(group[EMA_DECAY]), int(group[EMA_STEPS]))
            for param in group["params"]:
                if param in self._masters:
                    average = private_torch.local_tensor(self._averages[param])
                    average.copy_(averages.moved(average, private_torch.local_tensor(self._masters[param]), share))

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Seed all masters anew from the parameters, after new weights were loaded into the model alone; averages begin
        with them."""
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
        """Copy a state dict of this class into the states, without casting any.

        Raises:
            CheckpointError: it is of other parameters or another inner optimizer; the message names the first
                difference.
            ConfigurationError: its parameters were replaced; see `step`.
        """
        self._adopt_replaced_parameters()
        self._overflown = None
        self._is_assigned |= loading.load_optimizer_state(
            self, state_dict, self._names, lambda *_: "the inner optimizer and the options that it was saved with"
        )
        self._versions = guards.plain_versions(self._versions)  # the model may be loaded before or after
        self._has_loaded = True

    # Step ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters and weights from the gradients; returns what `closure` returned.

        A master that this update makes infinite or NaN, as a rate or a weight decay that the inner optimizer cannot
        take does, is named by the next step, of which there is none after the last; a checkpoint that is saved in
        between has it.

        Raises:
            RankMismatchError: a gradient is missing on some ranks only.
            NonFiniteGradientError: this was one skipped step too many in a row, or the update before it made a master
                infinite or NaN.
            ConfigurationError: a parameter that was frozen has a gradient, or one was given new values by others; a
                number of a group makes no step; or parameters in groups were replaced after the first update (before
                it, those that took their places are adopted, with new masters and states).
        """
        self._adopt_replaced_parameters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            where = f"MasterWeights: group {number} has been given numbers that make no step: group"
            options.check_any(where, group)
            options.check_decay(where, group.get(EMA_DECAY, 0.0))
            options.check_group_decay("MasterWeights", group, self._is_averaging)
        self._check_ours()
        if self._has_loaded:
            self._has_loaded = False
            warn_of_other_weights("MasterWeights", self._with_masters())
        reduction = FlatMax()
        gradients = ((self._names[param], param, param.grad) for param in self._masters)
        flags = guards.GradientFlags(gradients, reduction, wrong=self._overflown)
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
        """Float32 [masters], `guards.WEIGHT` for those that are now infinite or NaN; nothing waits for it.

        The next step sends it with what it tells other ranks of its gradients, and reads both together. In this one it
        would be a second wait for the device, and a second collective: one rank's part may overflow alone.
        """
        if not self._masters:
            return None
        locals_ = [private_torch.local_tensor(master).detach() for master in self._masters.values()]
        found = kernel_dispatch.exceeding(locals_, torch.finfo(torch.float32).max)
        return (found >= guards.NOT_FINITE) * guards.WEIGHT

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's.

        Raises:
            ConfigurationError: its parameters were replaced; see `step`.
        """
        self._adopt_replaced_parameters()
        return super().state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: to None, or to zeros."""
        self._adopt_replaced_parameters()
        super().zero_grad(set_to_none)

    def _check_ours(self) -> None:
        """Check that the parameters are as this optimizer left them."""
        for param, name in self._names.items():
            if param not in self._masters:
                if param.grad is not None:
                    raise ConfigurationError(
                        f"{name} was frozen when this MasterWeights was built and has a gradient now; call "
                        "initialize_state(parameter) when you unfreeze it"
                    )
                continue
            if param.grad is not None:
                self._members.check_stored(param, name)
                guards.check_alike(param, param.grad, name, "gradient")
            if self._versions.setdefault(param, guards.weight_version(param)) != guards.weight_version(param):
                self._take_over(param, name)

    def _with_masters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Names, values and masters of the parameters that have masters, and values here."""
        for param, master in self._masters.items():
            if master is not param and param.numel() > 0:
                yield self._names[param], make_weight(param).read(), private_torch.local_tensor(master).detach()

    def _take_over(self, param: Tensor, name: str) -> None:
        """Give the master of a parameter the values that others gave it."""
        if components.quantized_local(param) is not None:
            raise ConfigurationError(
                f"{name} was given new values after this MasterWeights was built, and the next step would "
                "overwrite them with its masters; load the optimizer's state too, or reseed_masters()"
            )
        if self._masters[param] is not param:
            master = private_torch.local_tensor(self._masters[param]).detach()
            rounding.adopt(master, private_torch.local_tensor(param).detach(), master.to(param.dtype))
        self._versions[param] = guards.weight_version(param)

    @contextmanager
    def _inner_step(self) -> Iterator[None]:
        """Give the inner optimizer masters with float32 gradients and their states; put all back afterwards."""
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
            for group, own in zip(self.param_groups, params, strict=True):
                group["params"] = own
            for param, master in self._masters.items():
                if master is not param:
                    master.grad = None

    def _updated(self, params: Iterable[Tensor]) -> list[Tensor]:
        return [param for param in params if param in self._masters and param.grad is not None]

    def _write_weights(self) -> None:
        """Round masters to the nearest values that the parameters can hold."""
        reduction, begun = FlatMax(), []
        for param in self._updated(self._masters):
            values = private_torch.local_tensor(self._masters[param])
            if components.quantized_local(param) is not None:
                weight = make_weight(param)
                begun.append((weight, values, weight.begin(values, reduction)))
            elif self._masters[param] is not param:
                private_torch.local_tensor(param).copy_(values)
        reduction.reduce()
        for weight, values, measured in begun:
            weight.write(values, measured)
        self._versions.update({param: guards.weight_version(param) for param in self._updated(self._masters)})


def _average_entries(decay: float, steps: int = 0) -> dict[str, Any]:
    """What a group holds of averages."""
    return {EMA_DECAY: float(decay), EMA_STEPS: steps}
