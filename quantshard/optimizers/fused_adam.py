"""FusedAdam: Adam over quantized weights, with masters and moments of 32, 16 or 8 bits, or without masters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import components, numerics, private_torch
from quantshard.amax import FlatMax
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.optimizers import guards, loading
from quantshard.optimizers.adam import Hyperparameters
from quantshard.optimizers.on_kernels import OnKernels
from quantshard.optimizers.state import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    PLAIN_DTYPES,
    ROLES,
    WEIGHT,
    State,
    assign,
    check_dtype,
    make_master,
    make_state,
    make_weight,
)
from quantshard.optimizers.step import Work, rounded_roles
from quantshard.storage import KEY, SEED_STREAM

COUNTERS = ("step", "skipped_steps", "skipped_in_a_row")
SEED = "rounding_seed"


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW for models with quantized weights; on any number of ranks its states are as the parameters' are.

    Every parameter that is coarser than `master_weight_dtype` has a master, seeded from `get_high_precision_init_val`
    where that was kept, else from the (dequantized) parameter. States are allocated here, so that a new process can
    load them, and are DTensors exactly where parameters are.

    All arithmetic is float32. A state of fewer bits is rounded stochastically when a step writes it, so that updates
    below its precision are kept on average, and a positive second moment never becomes zero. The random words depend
    on a seed (made at construction if one is needed, part of the state dict), the step,
    and the place in the global tensor: the bits are the same on any mesh and after any resumption.

    State dtypes: `torch.float32`; `torch.bfloat16`; `torch.float16`, scaled by a power of two for 128 elements of a
    row, for unscaled it would overflow above 65504 and lose the squares of gradients below 2e-4; `torch.uint8`, FP8
    E4M3 with a float32 scale for 128 elements. Scaled states are for 2-D parameters; those of others stay float32.

    A step whose gradients are not all finite is skipped on all ranks: no weight, moment, scale or history changes, and
    `skipped_steps` counts it.

    On GPUs a step runs in kernels over all parameters, with the same bits (`on_kernels`).

    Args:
        params: parameters, (name, parameter) pairs or groups. Parameters must not be on the meta device. Those that
            are trained are quantized, float32, bfloat16 or float16.
        lr: learning rate; `group["lr"]` may be set between steps, as LR schedulers do.
        betas, eps, weight_decay: Adam's.
        bias_correction: divide the moments by 1 - beta**step.
        adam_w_mode: decoupled weight decay (AdamW); False adds it to the gradient (L2).
        capturable: keep lr and the counts of steps in tensors on the parameters' device, and read nothing back from it
            in `step`, so that a CUDA graph can hold one. The bits are those of `capturable=False`. A bad step is then
            found out late: reading `skipped_steps` or `state_dict()` raises what `step` would have raised. Set the
            rate with `group["lr"].fill_(rate)`; LR schedulers do. Not for quantized weights without masters. Run a step
            before one is captured, and replace no tensor after it.
        master_weights: False keeps no masters: weights, quantized ones too, are read, updated and rounded
            stochastically into their own format. Their scales are chosen as always, so what a scale clips is lost: an
            element that has the largest code of its FP4 block grows only by steps of 3% or more, since that block's
            scale is rounded to E4M3; under delayed scaling the largest of the tensor grows every second step.
        master_weight_dtype: float32, float16 or bfloat16.
        exp_avg_dtype, exp_avg_sq_dtype: float32, float16, bfloat16 or uint8.
        use_decoupled_grad: read `param.decoupled_grad`, of any floating dtype, instead of `param.grad`.
        store_param_remainders: bfloat16 parameters keep, instead of a float32 master, the 16 bits that they lack of
            it: the same training, bit for bit, in half of the memory. Quantized and float16 weights have no such 16
            bits, so they keep a float32 master.
        set_grad_none: deprecated; what `zero_grad` does if it is not told. Use `zero_grad(set_to_none=...)`.
        max_skipped_in_a_row: raise after this many skipped steps in a row.

    Raises:
        ConfigurationError: an argument does not fit; the message says which.
        RankMismatchError: ranks have different random keys for one weight, or different seeds.
    """

    group_entries = (SEED,)
    """Entries of a group that `defaults` does not name and a checkpoint must have where this optimizer has them."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = True,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        max_skipped_in_a_row: int = 10,
    ) -> None:
        if amsgrad:
            raise ConfigurationError("FusedAdam(amsgrad=True) is not supported; use Adam or AdamW")
        if set_grad_none is not None:
            warnings.warn("set_grad_none is deprecated; call zero_grad(set_to_none=...)", DeprecationWarning, 2)
        self._dtypes = {EXP_AVG: exp_avg_dtype, EXP_AVG_SQ: exp_avg_sq_dtype, MASTER: master_weight_dtype}
        for role, dtype in self._dtypes.items():
            check_dtype(role, dtype)
        self._master_weights, self._remainders = master_weights, store_param_remainders
        if store_param_remainders:
            self._check_remainders()
        self._capturable, self._use_decoupled_grad = capturable, use_decoupled_grad
        self._set_to_none = set_grad_none is None or set_grad_none
        self._max_skipped_in_a_row = max_skipped_in_a_row
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            **dict.fromkeys(COUNTERS, 0),
        }
        super().__init__(params, defaults)
        if capturable:
            self.register_state_dict_post_hook(_make_numbers)  # the first, so that others see what is returned
        self._kernels = OnKernels()
        self._states: dict[Tensor, dict[str, State]] = {}
        self._weights: dict[Tensor, State] = {}
        self._versions: dict[Tensor, int] = {}
        self._names: dict[Tensor, str] = {}
        self._streams: dict[Tensor, int] = {}
        self._last_bad: guards.GradientFlags | None = None  # of the last skipped step, if capturable
        for group in self.param_groups:
            self._adopt(group)
        self._check_parameters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its states are allocated at once. A collective call where parameters are sharded."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if hasattr(self, "_states"):  # not from the base class's constructor
            self._adopt(self.param_groups[-1])
            self._check_parameters()

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because a gradient was not finite.

        Raises:
            NonFiniteGradientError, RankMismatchError: if `capturable`, what `step` could not raise.
        """
        if self._capturable:
            self._raise_for_bad_steps()
        return int(self.param_groups[0]["skipped_steps"])

    @property
    def _seed(self) -> int | None:
        """Of the random words; every group has it, so that state dicts do, if anything is rounded stochastically."""
        seed: int | None = self.param_groups[0].get(SEED)
        return seed

    # State -----------------------------------------------------------------------------------------------------------

    def _adopt(self, group: dict[str, Any]) -> None:
        names = group.get("param_names") or [f"parameter {len(self._names) + i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            self._streams[param] = len(self._names) * len(ROLES)
            self._names[param] = name
            if param.requires_grad:
                self.initialize_state(param)
        if self._seed is not None:
            group[SEED] = self._seed
        if self._capturable:
            first = next(iter([*group["params"], *self._names]), torch.empty(0, dtype=torch.float32))
            device = private_torch.local_tensor(first).device
            lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            group["lr"] = lr.clone()  # of this group alone
            group.update({key: torch.tensor(int(group[key]), dtype=torch.int64, device=device) for key in COUNTERS})

    def _check_remainders(self) -> None:
        if not self._master_weights or self._dtypes[MASTER] is not torch.float32:
            raise ConfigurationError(
                "FusedAdam(store_param_remainders=True): parameter and remainder are a float32 master, so leave "
                f"master_weights=True (not {self._master_weights}) and master_weight_dtype=torch.float32 (not "
                f"{self._dtypes[MASTER]})"
            )

    @torch.no_grad()
    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Allocate a parameter's states: zero moments, and a master seeded from the parameter.

        `store_param_remainders`: for this parameter; default as the optimizer was constructed.
        """
        name = self._names[param]
        remainders = self._remainders if store_param_remainders is None else store_param_remainders
        if remainders:
            self._check_remainders()
        guards.check_trainable("FusedAdam", name, param, PLAIN_DTYPES)
        if self._capturable and not self._master_weights and components.quantized(param) is not None:
            raise ConfigurationError(
                f"FusedAdam(capturable=True, master_weights=False): {name} is {private_torch.local_tensor(param)!r}, "
                "and a step reads the number of its random draw on the host, so a captured one would repeat it; use "
                "masters, or capturable=False"
            )
        states = {moment: make_state(param, self._dtypes[moment], moment) for moment in MOMENTS}
        master = make_master(param, self._dtypes[MASTER], remainders) if self._master_weights else None
        if master is not None:
            assign(master, guards.initial_master(param))
            states[MASTER] = master
        self._states[param], self._weights[param] = states, make_weight(param)
        self._versions[param] = guards.weight_version(param)
        self.state[param] = {k: v for state, held in states.items() for k, v in held.tensors(state).items()}
        if self._seed is None and rounded_roles({**states, WEIGHT: self._weights[param]}):
            seed = self._new_seed()
            for group in self.param_groups:
                group[SEED] = seed

    def _new_seed(self) -> int:
        """From the key of the first quantized weight, which replicas share, DDP's too; else from torch's generator.

        Ranks may hold different experts, so where meshes differ it is the largest that one of their ranks has found.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        quantized = next((found for param in params if (found := components.quantized(param)) is not None), None)
        if quantized is None:
            info = torch.iinfo(torch.int64)
            seed = int(torch.randint(info.min, info.max, (), dtype=torch.int64, device="cpu"))
        else:
            key = int(quantized._storage.state[KEY])
            low, high = numerics.random_words(key, 0, SEED_STREAM, (1, 2))[0].tolist()
            seed = int(high << 32 | low) - (1 << 63)
        return guards.largest(seed, params)

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Seed all masters anew from the parameters, after new weights were loaded into the model alone."""
        for param, states in self._states.items():
            if MASTER in states:
                assign(states[MASTER], guards.initial_master(param))
            self._versions[param] = guards.weight_version(param)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedAdam:
        raise UnsupportedOperationError(
            "a FusedAdam is not copied: its states belong to its parameters; build another one over the copied model "
            "and load this one's state_dict() into it"
        )

    def _check_parameters(self) -> None:
        seed = {} if self._seed is None else {f"FusedAdam's {SEED}": torch.tensor([self._seed], dtype=torch.int64)}
        guards.check_parameters(((name, param) for param, name in self._names.items()), seed)

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """A state in float32 ("exp_avg", "exp_avg_sq" or "master_param"); a DTensor where the parameter is one."""
        held = self._states[param][state_name]
        if isinstance(param, DTensor):
            return components.as_dtensor(held.read(), param, list(param.placements), tuple(param.shape))
        return held.read()

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Set a state from high-precision values of the parameter's shape; a DTensor where the parameter is one.

        They are rounded to nearest. Of a parameter with remainders, the master is the parameter too.

        Raises:
            ConfigurationError: the shape differs, or one is a DTensor and the other is not.
        """
        held = self._states[param][state_name]
        guards.check_alike(param, unscaled_state, self._names[param], state_name)
        assign(held, private_torch.local_tensor(unscaled_state).float())

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's: entries of groups are numbers, also if `capturable`, so that either loads the other's.

        Raises:
            NonFiniteGradientError, RankMismatchError: if `capturable`, what `step` could not raise.
        """
        if self._capturable:
            self._raise_for_bad_steps()
        return super().state_dict()

    @loading.with_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class into the states, without casting any.

        Raises:
            CheckpointError: it is of other parameters or other state dtypes; the message names the first difference.
        """
        loading.load(self, state_dict, self._names, loading.fused_adam_options)
        self._versions = guards.plain_versions(self._versions)  # the model may be loaded before or after

    # Step ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: None = None) -> Any:  # type: ignore[override]
        """One optimizer step; a collective call where parameters are sharded.

        `grad_scaler` must be None: call `grad_scaler.unscale_(optimizer)` before, and `grad_scaler.step(optimizer)`.

        Raises:
            ConfigurationError: a parameter is a DTensor and its gradient is not, or the reverse.
            RankMismatchError: some ranks only have a gradient for a parameter.
            NonFiniteGradientError: this was one skipped step too many in a row.
        """
        if grad_scaler is not None:
            raise ConfigurationError(
                "FusedAdam.step(grad_scaler=...) is not supported; call grad_scaler.step(optimizer) instead, which "
                "unscales the gradients first"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hyperparameters = [self._hyperparameters(group) for group in self.param_groups]
        work = list(self._begin(hyperparameters))
        reduction, left = FlatMax(), work
        if self._kernels.take(work, hyperparameters, self._seed):
            flags = self._flags(work, reduction, self._kernels.exceeding())
            left = self._kernels.update(flags.bad() if self._capturable else flags.send())
        else:
            for item in work:
                item.measure(reduction)
            flags = self._flags(work, reduction)
        if self._capturable:
            self._finish_on_device(left, flags)
        elif not flags.skips(self.param_groups, self._max_skipped_in_a_row):
            for item in left:
                item.finish()
            for group in self.param_groups:
                group["step"] += 1
        else:
            return loss
        self._kernels.finished()
        for item in work:
            self._versions[item.param] = guards.weight_version(item.param)
        return loss

    def _flags(self, work: list[Work], reduction: FlatMax, exceeding: Tensor | None = None) -> guards.GradientFlags:
        """What all ranks know of the gradients, after all that was registered has been reduced."""
        gradients = ((self._names[item.param], item.param, item.grad) for item in work)
        flags = guards.GradientFlags(gradients, reduction, exceeding)
        reduction.reduce()
        flags.gather()
        return flags

    def _begin(self, hyperparameters: list[Hyperparameters]) -> Iterator[Work]:
        """The parameters with a state, checked to be as this optimizer left them."""
        seed = self._seed
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                grad = self._grad_of(param)
                if param not in self._states:
                    if grad is not None:
                        raise ConfigurationError(
                            f"{self._names[param]} was frozen when this FusedAdam was built and has a gradient now; "
                            "call initialize_state(parameter) when you unfreeze it"
                        )
                    continue
                states, version = self._states[param], guards.weight_version(param)
                if self._versions.setdefault(param, version) != version and MASTER in states:
                    self._take_over(param, states[MASTER])
                of_group, stream = hyperparameters[number], self._streams[param]
                yield Work(param, grad, states, self._weights[param], number, of_group, seed, stream)

    def _take_over(self, param: Tensor, master: State) -> None:
        """Take the values that others gave a parameter over into its master."""
        if components.quantized(param) is not None:
            raise ConfigurationError(
                f"{self._names[param]} was given new values after this FusedAdam was built, and the next step "
                "would overwrite them with its masters; load the optimizer's state too, or reseed_masters()"
            )
        master.adopt()

    def _hyperparameters(self, group: dict[str, Any]) -> Hyperparameters:
        beta1, beta2 = group["betas"]
        return Hyperparameters(
            step=group["step"] + 1,
            lr=group["lr"] if self._capturable else float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["adam_w_mode"],
            bias_correction=group["bias_correction"],
        )

    def _grad_of(self, param: Tensor) -> Tensor | None:
        what = "decoupled_grad" if self._use_decoupled_grad else "grad"
        grad: Tensor | None = getattr(param, what, None)
        if grad is not None:
            guards.check_alike(param, grad, self._names[param], "gradient" if what == "grad" else what)
        return grad

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, `decoupled_grad` too where it is used: to None (the default), or to zeros."""
        none = self._set_to_none if set_to_none is None else set_to_none
        super().zero_grad(none)
        if not self._use_decoupled_grad:
            return
        for param in self._names:
            grad = getattr(param, "decoupled_grad", None)
            if none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            elif grad is not None:
                grad.detach().zero_()

    def _finish_on_device(self, left: list[Work], flags: guards.GradientFlags) -> None:
        """What `step` does after the reduction, with nothing read back: a bad step is undone, not left out."""
        bad, table = flags.bad(), flags.table
        if self._last_bad is None or self._last_bad.table.shape != table.shape:
            self._last_bad, flags.table = flags, torch.zeros_like(table)
        remembered = self._last_bad.table
        remembered.copy_(torch.where(bad, table, remembered))
        for item in left:
            item.finish(skip=bad)
        for group in self.param_groups:
            skipped = bad.to(group["step"].device).to(torch.int64)
            group["step"].add_(1 - skipped)
            group["skipped_steps"].add_(skipped)
            group["skipped_in_a_row"].add_(1).mul_(skipped)

    def _raise_for_bad_steps(self) -> None:
        if self._last_bad is not None:
            self._last_bad.check_missing()
            self._last_bad.check_skipped(self.param_groups, self._max_skipped_in_a_row)


def _make_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Read the entries of groups that `capturable` keeps in tensors."""
    for group in state_dict["param_groups"]:
        group.update({key: group[key].item() for key in (*COUNTERS, "lr") if isinstance(group[key], Tensor)})


def _check_options(group: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless the numbers of a group, as it is added, make a step."""
    if len(group["betas"]) != 2:
        raise ConfigurationError(f"FusedAdam(betas={group['betas']}): give two, of the first and the second moment")
    for beta in group["betas"]:
        if not 0 <= beta or torch.tensor(beta, dtype=torch.float32) >= 1:
            raise ConfigurationError(
                f"FusedAdam(betas={group['betas']}): each must be 0 or more and, in float32, less than 1; with 1 the "
                "bias correction divides by zero"
            )
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise ConfigurationError(f"FusedAdam({name}={group[name]}): it must be a finite number, 0 or more")
