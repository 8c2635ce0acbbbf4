"""FusedAdam: Adam over quantized weights, with float32 masters and moments of 32 or 8 bits.

A step is: one flat collective (the amaxes of blocks that ranks share, and whether any gradient is missing or not
finite), then reading, updating and writing each parameter by itself. Parameters with shared blocks are computed twice,
once to measure and once to write, so that no copy of the model is held between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import amax, components, private_torch
from quantshard.amax import FlatMax, Requantization
from quantshard.errors import (
    CheckpointError,
    ConfigurationError,
    NonFiniteGradientError,
    RankMismatchError,
    UnsupportedOperationError,
)
from quantshard.optimizers.adam import Hyperparameters, Updated, adam
from quantshard.optimizers.state import FloatState, State, make_state
from quantshard.storage import KEY

LARGEST_GRADIENT = 1e19
"""The square of a larger one is infinite in float32, and would freeze its weight for good: it counts as infinite."""

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW for models with quantized weights; on any number of ranks its states are as the parameters' are.

    Every parameter that is not float32 has a float32 master, seeded from `get_high_precision_init_val` where that was
    kept, else from the (dequantized) parameter. States are allocated here, so that a new process can load them, and
    are DTensors exactly where parameters are.

    A step whose gradients are not all finite is skipped on all ranks: no weight, moment, scale or history changes, and
    `skipped_steps` counts it.

    Args:
        params: parameters, (name, parameter) pairs or groups. Parameters must not be on the meta device.
        lr: learning rate; `group["lr"]` may be set between steps, as LR schedulers do.
        betas, eps, weight_decay: Adam's.
        bias_correction: divide the moments by 1 - beta**step.
        adam_w_mode: decoupled weight decay (AdamW); False adds it to the gradient (L2).
        master_weights: must be True where the model has parameters that are not float32.
        exp_avg_dtype, exp_avg_sq_dtype: float32, or uint8 for FP8 (E4M3 with a scale for 128 elements of a row; the
            moments of parameters that are not 2-D stay float32).
        max_skipped_in_a_row: raise after this many skipped steps in a row.

    Raises:
        ConfigurationError: an argument does not fit; the message says which.
        RankMismatchError: ranks have different random keys for one weight.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        master_weights: bool = True,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        max_skipped_in_a_row: int = 10,
    ) -> None:
        if amsgrad:
            raise ConfigurationError("FusedAdam(amsgrad=True) is not supported; use Adam or AdamW")
        if master_weight_dtype is not torch.float32:
            raise ConfigurationError(f"FusedAdam(master_weight_dtype={master_weight_dtype}): masters are float32")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "step": 0,
            "skipped_steps": 0,
            "skipped_in_a_row": 0,
        }
        super().__init__(params, defaults)
        self._dtypes = dict(zip(MOMENTS, (exp_avg_dtype, exp_avg_sq_dtype), strict=True))
        self._master_weights = master_weights
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._states: dict[Tensor, dict[str, State]] = {}
        self._versions: dict[Tensor, int] = {}
        self._names: dict[Tensor, str] = {}
        for group in self.param_groups:
            self._adopt(group)
        self._check_keys()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its states are allocated at once."""
        super().add_param_group(param_group)
        if hasattr(self, "_states"):  # not from the base class's constructor
            self._adopt(self.param_groups[-1])

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because a gradient was not finite."""
        return int(self.param_groups[0]["skipped_steps"])

    # State -----------------------------------------------------------------------------------------------------------

    def _adopt(self, group: dict[str, Any]) -> None:
        names = group.get("param_names") or [f"parameter {len(self._names) + i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            self._names[param] = name
            if param.requires_grad:
                self.initialize_state(param)

    @torch.no_grad()
    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Allocate a parameter's states: zero moments, and a master seeded from the parameter."""
        name = self._names[param]
        if store_param_remainders:
            raise ConfigurationError("FusedAdam(store_param_remainders=True) is not supported; masters are float32")
        if param.is_meta:
            raise ConfigurationError(
                f"FusedAdam: {name} is on the meta device; call reset_parameters() on the modules first"
            )
        states = {
            moment: make_state(param, dtype, keep_positive=moment == "exp_avg_sq")
            for moment, dtype in self._dtypes.items()
        }
        local = private_torch.local_tensor(param)
        if local.dtype is not torch.float32 or components.quantized(param) is not None:
            if not self._master_weights:
                what = local.dtype if components.quantized(param) is None else repr(local)
                raise ConfigurationError(
                    f"FusedAdam(master_weights=False): {name} is {what}, and small updates to it would be lost; use "
                    "master_weights=True"
                )
            states[MASTER] = FloatState(param)
            states[MASTER].write(_initial_master(local), None)
        self._states[param] = states
        self._versions[param] = _version(param)
        self.state[param] = {k: v for state, held in states.items() for k, v in held.tensors(state).items()}

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Seed all masters anew from the parameters, after new weights were loaded into the model alone."""
        for param, states in self._states.items():
            if MASTER in states:
                states[MASTER].write(_initial_master(private_torch.local_tensor(param)), None)
            self._versions[param] = _version(param)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedAdam:
        raise UnsupportedOperationError(
            "a FusedAdam is not copied: its states belong to its parameters; build another one over the copied model "
            "and load this one's state_dict() into it"
        )

    def _check_keys(self) -> None:
        keys: dict[dist.ProcessGroup, dict[str, Tensor]] = {}
        for param, name in self._names.items():
            quantized, group = components.quantized(param), private_torch.mesh_group(param)
            if quantized is not None and group is not None:
                keys.setdefault(group, {})[name] = quantized._storage.state[KEY]
        for group, named in keys.items():
            amax.check_equal_on_ranks(named, group, "the random key")

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """A state in float32 ("exp_avg", "exp_avg_sq" or "master_param"); a DTensor where the parameter is one."""
        held = self._states[param][state_name]
        if isinstance(param, DTensor):
            return components.as_dtensor(held.read(), param, list(param.placements), tuple(param.shape))
        return held.read()

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Set a state from high-precision values of the parameter's shape, quantizing them; a DTensor where it is one.

        Raises:
            ConfigurationError: the shape differs, or one is a DTensor and the other is not.
        """
        held = self._states[param][state_name]
        self._check_alike(param, unscaled_state, state_name)
        if unscaled_state.shape != param.shape:
            raise ConfigurationError(
                f"set_scaled_state: {state_name} of {self._names[param]} has shape {tuple(param.shape)}, not "
                f"{tuple(unscaled_state.shape)}"
            )
        values = private_torch.local_tensor(unscaled_state).float()
        reduction = FlatMax()
        begun = held.begin(values, reduction)
        reduction.reduce()
        held.write(values, begun)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class into the states, without casting any.

        Raises:
            CheckpointError: it is of other parameters or other state dtypes; the message names the first difference.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]  # dcp_to_torch_save makes strings of numbers
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise CheckpointError(
                f"the optimizer state has groups of {[len(g['params']) for g in groups]} parameters, this optimizer "
                f"{[len(g['params']) for g in self.param_groups]}; build it over the same model"
            )
        for saved, own in zip(groups, self.param_groups, strict=True):
            _check_names(saved.get("param_names"), own.get("param_names"))
        pairs = [
            (param, states.get(index, states.get(str(index), {})))
            for saved, own in zip(groups, self.param_groups, strict=True)
            for index, param in zip(saved["params"], own["params"], strict=True)
        ]
        for param, loaded in pairs:
            self._check_loadable(param, loaded)
        for param, loaded in pairs:
            self._versions.pop(param, None)  # the model may be loaded before or after
            for key, live in self.state[param].items():
                private_torch.local_tensor(live).copy_(private_torch.local_tensor(loaded[key]))
        for saved, own in zip(groups, self.param_groups, strict=True):
            kept = {k: v for k, v in saved.items() if k not in ("params", "param_names")}
            # set_optimizer_state_dict(full_state_dict=True) makes lists of tuples
            own.update({k: tuple(v) if isinstance(own.get(k), tuple) else v for k, v in kept.items()})

    def _check_loadable(self, param: Tensor, loaded: dict[str, Tensor]) -> None:
        live, name = self.state.get(param, {}), self._names[param]
        if loaded.keys() != live.keys():
            raise CheckpointError(
                f"{name}: the optimizer state holds {sorted(loaded)}, this optimizer {sorted(live)}; construct it with "
                "the master_weights, exp_avg_dtype and exp_avg_sq_dtype that it was saved with"
            )
        for key, value in loaded.items():
            own, new = private_torch.local_tensor(live[key]), private_torch.local_tensor(value)
            if own.dtype != new.dtype or own.shape != new.shape:
                raise CheckpointError(
                    f"{name}: optimizer state {key} is {new.dtype} {tuple(new.shape)}, this optimizer's is {own.dtype} "
                    f"{tuple(own.shape)}; construct it over the same model and mesh, with the same state dtypes"
                )

    # Step ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One optimizer step; a collective call where parameters are sharded.

        Raises:
            ConfigurationError: a parameter is a DTensor and its gradient is not, or the reverse.
            RankMismatchError: some ranks only have a gradient for a parameter.
            NonFiniteGradientError: this was one skipped step too many in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reduction = FlatMax()
        work = [_Work(self, group, param, reduction) for group, param in self._updated()]
        flags = _Flags(work, reduction)
        reduction.reduce()
        flags.check_missing(self._names)
        bad = flags.first_non_finite(self._names)
        if bad is not None:
            self._skip(bad)
            return loss
        for group in self.param_groups:
            group["step"] += 1
            group["skipped_in_a_row"] = 0
        for item in work:
            item.finish()
            self._versions[item.param] = _version(item.param)
        return loss

    def _updated(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """The parameters with a state, and their groups; checked to be as this optimizer left them."""
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self._states:
                    if param.grad is not None:
                        raise ConfigurationError(
                            f"{self._names[param]} was frozen when this FusedAdam was built and has a gradient now; "
                            "call initialize_state(parameter) when you unfreeze it"
                        )
                    continue
                if self._versions.setdefault(param, _version(param)) != _version(param):
                    raise ConfigurationError(
                        f"{self._names[param]} was given new values after this FusedAdam was built, and the next step "
                        "would overwrite them with its masters; load the optimizer's state too, or reseed_masters()"
                    )
                yield group, param

    def _skip(self, name: str) -> None:
        for group in self.param_groups:
            group["skipped_steps"] += 1
            group["skipped_in_a_row"] += 1
        in_a_row = self.param_groups[0]["skipped_in_a_row"]
        if in_a_row >= self._max_skipped_in_a_row:
            raise NonFiniteGradientError(
                f"{in_a_row} steps in a row had infinite or NaN gradients, first in {name}; no weight "
                "was changed by them. Lower the learning rate, look at the data of these steps, or load an older "
                "checkpoint"
            )

    def _check_alike(self, param: Tensor, other: Tensor, what: str) -> None:
        if isinstance(param, DTensor) != isinstance(other, DTensor):
            kinds = ["a DTensor" if isinstance(t, DTensor) else "a plain tensor" for t in (param, other)]
            raise ConfigurationError(
                f"{self._names[param]} is {kinds[0]} but its {what} is {kinds[1]}; both must be the same"
            )


def _version(param: Tensor) -> int:
    """How often a quantized parameter was given new values; 0 for others."""
    quantized = components.quantized(param)
    return 0 if quantized is None else quantized._storage.version


def _check_names(saved: list[str] | None, own: list[str] | None) -> None:
    if saved is None or own is None:
        return
    for index, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        if theirs != ours:
            raise CheckpointError(
                f"parameter {index} of the optimizer state is {theirs!r}, of this optimizer {ours!r}; pass the same "
                "parameters in the same order"
            )


def _initial_master(local: Tensor) -> Tensor:
    quantized = components.quantized(local)
    if quantized is None:
        return local.float()
    kept = quantized.get_high_precision_init_val()
    return quantized._storage.dequantize() if kept is None else kept.float()


class _Work:
    """One parameter's part of a step: measured at construction, finished after the reduction."""

    def __init__(self, optimizer: FusedAdam, group: dict[str, Any], param: Tensor, reduction: FlatMax) -> None:
        self.param = param
        self.states = optimizer._states[param]
        beta1, beta2 = group["betas"]
        self.hyperparameters = Hyperparameters(
            step=group["step"] + 1,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["adam_w_mode"],
            bias_correction=group["bias_correction"],
        )
        if param.grad is not None:
            optimizer._check_alike(param, param.grad, "gradient")
        self.grad = None if param.grad is None else private_torch.local_tensor(param.grad)
        self.group = amax.sharding_group(param)
        self.begun: dict[str, Requantization | None] = {}
        if self._shares_blocks():
            # Without a gradient, zeros hold the place: all ranks must register the same shapes.
            self._begin(self._update(), reduction)

    def _targets(self) -> dict[str, Any]:
        quantized = components.quantized(self.param)
        storages = {name: state.storage for name, state in self.states.items()}
        storages["param"] = None if quantized is None else quantized._storage
        return {name: storage for name, storage in storages.items() if storage is not None}

    def _shares_blocks(self) -> bool:
        return self.group is not None and any(
            storage.shard.shares_blocks(component)
            for storage in self._targets().values()
            for component in storage.cell.format.components
        )

    def _update(self) -> Updated:
        values = {name: state.read() for name, state in self.states.items()}
        master = values.get(MASTER)
        if master is None:
            master = private_torch.local_tensor(self.param)
        grad = torch.zeros_like(master) if self.grad is None else self.grad
        return adam(grad, master, values["exp_avg"], values["exp_avg_sq"], self.hyperparameters)

    def _begin(self, updated: Updated, reduction: FlatMax) -> None:
        for name in MOMENTS:
            self.begun[name] = self.states[name].begin(getattr(updated, name), reduction)
        quantized = components.quantized(self.param)
        if quantized is not None:
            self.begun["param"] = Requantization(quantized._storage, updated.master, self.group, reduction)

    def finish(self) -> None:
        """Write states and parameter."""
        if self.grad is None:
            return
        updated = self._update()
        if not self.begun:
            self._begin(updated, FlatMax())
        for name in MOMENTS:
            self.states[name].write(getattr(updated, name), self.begun[name])
        if MASTER in self.states:
            self.states[MASTER].write(updated.master, None)
        requantization = self.begun.get("param")
        if requantization is not None:
            requantization.commit(updated.master)
            torch.autograd.graph.increment_version(private_torch.local_tensor(self.param))
        else:
            private_torch.local_tensor(self.param).copy_(updated.master)


class _Flags:
    """What all ranks must know of each gradient: is it there, is it missing, is it not finite.

    Float32 [3, parameters] per process group, reduced with the amaxes.
    """

    def __init__(self, work: list[_Work], reduction: FlatMax) -> None:
        self.by_group: dict[Any, tuple[list[Tensor], Tensor]] = {}
        for group in dict.fromkeys(item.group for item in work):
            items = [item for item in work if item.group is group]
            device = private_torch.local_tensor(items[0].param).device
            columns = [_flags_of(item.grad, device) for item in items]
            flags = torch.stack(columns, dim=1)
            reduction.add(flags, group)
            self.by_group[group] = ([item.param for item in items], flags)

    def check_missing(self, names: dict[Tensor, str]) -> None:
        """Raise on every rank if a gradient is missing on some."""
        found = self._first(lambda flags: flags[0] * flags[1], names)
        if found is not None:
            raise RankMismatchError(
                f"{found} has a gradient on some ranks only; all ranks must use the same parameters in every step"
            )

    def first_non_finite(self, names: dict[Tensor, str]) -> str | None:
        """Name of the first parameter whose gradient is not finite on some rank, or None."""
        return self._first(lambda flags: flags[2], names)

    def _first(self, choose: Callable[[Tensor], Tensor], names: dict[Tensor, str]) -> str | None:
        found = None
        for params, flags in self.by_group.values():
            chosen = choose(flags).nonzero()
            if found is None and chosen.numel():
                found = names[params[int(chosen[0])]]
        if len(self.by_group) > 1 and amax.any_rank(found is not None, amax.world()):
            # parameters are sharded over several groups: a rank that is not in the group must do the same
            return found or "a parameter of other ranks"
        return found


def _flags_of(grad: Tensor | None, device: torch.device) -> Tensor:
    if grad is None:
        return torch.tensor([0.0, 1.0, 0.0], device=device)
    non_finite = (~(grad.abs() <= LARGEST_GRADIENT).all()).float()  # NaN is not <= either
    return torch.stack([torch.ones_like(non_finite), torch.zeros_like(non_finite), non_finite])
