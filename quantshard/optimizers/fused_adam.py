"""FusedAdam: Adam over quantized weights, with masters and moments of 32, 16 or 8 bits, or without masters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.numerics.adam import Hyperparameters
from quantshard.optimizers import guards, loading, options, parameter_registry
from quantshard.optimizers.capturable import COUNTERS, BadStepRecord, make_numbers, make_tensors, wrong_rates
from quantshard.optimizers.kernel_step import KernelStep
from quantshard.optimizers.state import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    PLAIN_DTYPES,
    ROLES,
    WEIGHT,
    OptimizerState,
    assign,
    check_dtype,
    floor_of,
    make_master,
    make_state,
    make_weight,
)
from quantshard.optimizers.step import ParameterStep, rounded_roles
from quantshard.tensor import components

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

    On GPUs a step runs in kernels over all parameters, with the same bits (`kernel_step`).

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
        self._bounds_ratio = floor_of(exp_avg_dtype) > floor_of(exp_avg_sq_dtype)
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
        self._members, self._kept = parameter_registry.ParameterRegistry("FusedAdam"), ""
        super().__init__(parameter_registry.checked_params("FusedAdam", params), defaults)
        if capturable:
            self.register_state_dict_post_hook(make_numbers)  # the first, so that others see what is returned
        self._kernels = KernelStep()
        self._states: dict[Tensor, dict[str, OptimizerState]] = {}
        self._weights: dict[Tensor, OptimizerState] = {}
        self._versions: dict[Tensor, int] = {}
        self._names: dict[Tensor, str] = {}
        self._streams: dict[Tensor, int] = {}
        self._remembered = BadStepRecord()
        for group in self.param_groups:
            self._adopt(group)
        self._check_parameters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its states are allocated at once. A collective call where parameters are sharded.

        Raises:
            ConfigurationError: it has no parameters or one twice, or a number of it makes no step.
        """
        is_built = hasattr(self, "_states")  # else it is the base class's constructor that calls
        if is_built:
            self._follow()
        group = parameter_registry.checked_group("FusedAdam", len(self.param_groups), param_group)
        options.check_adam("FusedAdam", {**self.defaults, **group}, self._bounds_ratio)
        super().add_param_group(group)
        if is_built:
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

    def _follow(self) -> None:
        """Make states for parameters that others have put in the places of those that this optimizer knew; see
        `parameter_registry`. Called before anything that reads or writes a state."""
        swaps = self._members.replaced(self.param_groups, self._names, lambda: self._kept)
        if not swaps:
            return
        for swap in swaps:
            for mapping in (self._states, self._weights, self._versions, self.state):
                mapping.pop(swap.old, None)
            self._names[swap.new], self._streams[swap.new] = self._names.pop(swap.old), self._streams.pop(swap.old)
        for group in self.param_groups:
            if any(components.quantized_local(swap.new) is not None for swap in swaps):
                group.pop(SEED, None)  # of a key: drawn again, it is what an optimizer built now would have
        for swap in swaps:
            if swap.new.requires_grad:
                self._initialize(swap.new)
        for name in ("_states", "_weights", "_names", "_streams"):
            setattr(self, name, parameter_registry.reordered(getattr(self, name), self.param_groups))
        self._check_parameters()

    def _adopt(self, group: dict[str, Any]) -> None:
        self._members.add(group["params"])
        names = group.get("param_names") or [f"parameter {len(self._names) + i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            self._streams[param] = len(self._names) * len(ROLES)
            self._names[param] = name
            if param.requires_grad:
                self._initialize(param)
        if self._seed is not None:
            group[SEED] = self._seed
        if self._capturable:
            first = next(iter([*group["params"], *self._names]), torch.empty(0, dtype=torch.float32))
            make_tensors(group, private_torch.local_tensor(first).device)

    def _check_remainders(self) -> None:
        if not self._master_weights or self._dtypes[MASTER] is not torch.float32:
            raise ConfigurationError(
                "FusedAdam(store_param_remainders=True): parameter and remainder are a float32 master, so leave "
                f"master_weights=True (not {self._master_weights}) and master_weight_dtype=torch.float32 (not "
                f"{self._dtypes[MASTER]})"
            )

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Allocate a parameter's states: zero moments, and a master seeded from the parameter.

        `store_param_remainders`: for this parameter; default as the optimizer was constructed.

        Raises:
            ConfigurationError: it is no parameter of this optimizer, or one that it does not train.
        """
        self._follow()
        self._check_known(param)
        self._initialize(param, store_param_remainders)

    @torch.no_grad()
    def _initialize(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        name = self._names[param]
        remainders = self._remainders if store_param_remainders is None else store_param_remainders
        if remainders:
            self._check_remainders()
        guards.check_trainable("FusedAdam", name, param, PLAIN_DTYPES)
        if self._capturable and not self._master_weights and components.quantized_local(param) is not None:
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
            seed = guards.rounding_seed([param for group in self.param_groups for param in group["params"]])
            for group in self.param_groups:
                group[SEED] = seed

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Seed all masters anew from the parameters, after new weights were loaded into the model alone."""
        self._follow()
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

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """A state in float32 ("exp_avg", "exp_avg_sq" or "master_param"); a DTensor where the parameter is one.

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
        if isinstance(param, DTensor) and not isinstance(unscaled_state, DTensor):
            guards.check_local(param, unscaled_state, name, state_name)
        else:
            guards.check_alike(param, unscaled_state, name, state_name)
        assign(held, private_torch.local_tensor(unscaled_state).to(private_torch.local_tensor(param).device).float())
        self._kept = parameter_registry.VALUES

    def _state_of(self, param: Tensor, state_name: str) -> OptimizerState:
        self._follow()
        self._check_known(param)
        held = self._states.get(param, {})
        if state_name not in held:
            raise ConfigurationError(
                f"{self._names[param]} has no state {state_name!r}, but {sorted(held) or 'none, being frozen'}; a "
                "master has a parameter that is coarser than master_weight_dtype, unless master_weights=False"
            )
        return held[state_name]

    def _check_known(self, param: Tensor) -> None:
        if param not in self._names:
            raise ConfigurationError(
                f"the tensor of shape {tuple(param.shape)} is no parameter of this FusedAdam; give the parameter "
                "itself, of a sharded one the DTensor, not its local tensor"
            )

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's: entries of groups are numbers, also if `capturable`, so that either loads the other's.

        Raises:
            NonFiniteGradientError, RankMismatchError: if `capturable`, what `step` could not raise.
            ConfigurationError: its parameters were replaced; see `step`.
        """
        self._follow()
        if self._capturable:
            self._raise_for_bad_steps()
        return super().state_dict()

    @loading.with_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class into the states, without casting any.

        Raises:
            CheckpointError: it is of other parameters or other state dtypes; the message names the first difference.
            ConfigurationError: its parameters were replaced; see `step`.
        """
        self._follow()
        if loading.load_optimizer_state(self, state_dict, self._names, loading.fused_adam_options):
            self._kept = parameter_registry.VALUES
        self._versions = guards.plain_versions(self._versions)  # the model may be loaded before or after

    # Step ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: None = None) -> Any:  # type: ignore[override]
        """One optimizer step; a collective call where parameters are sharded.

        `grad_scaler` must be None: call `grad_scaler.unscale_(optimizer)` before, and `grad_scaler.step(optimizer)`.

        Raises:
            ConfigurationError: a parameter is a DTensor and its gradient is not, or the reverse; a number of a group
                makes no step; or parameters in groups were replaced after the first step (before it, those that took
                their places are adopted, with new states).
            RankMismatchError: some ranks only have a gradient for a parameter.
            NonFiniteGradientError: this was one skipped step too many in a row.
        """
        if grad_scaler is not None:
            raise ConfigurationError(
                "FusedAdam.step(grad_scaler=...) is not supported; call grad_scaler.step(optimizer) instead, which "
                "unscales the gradients first"
            )
        self._follow()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hyperparameters = [self._hyperparameters(*numbered) for numbered in enumerate(self.param_groups)]
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
            self._remembered.finish(left, flags, self.param_groups)
        elif not flags.skips(self.param_groups, self._max_skipped_in_a_row):
            for item in left:
                item.finish()
            for group in self.param_groups:
                group["step"] += 1
        else:
            return loss
        self._kernels.finished()
        if any(item.grad is not None for item in work):
            self._kept = parameter_registry.UPDATES
        for item in work:
            self._versions[item.param] = guards.weight_version(item.param)
        return loss

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

    def _begin(self, hyperparameters: list[Hyperparameters]) -> Iterator[ParameterStep]:
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
                yield ParameterStep(param, grad, states, self._weights[param], number, of_group, seed, stream)

    def _take_over(self, param: Tensor, master: OptimizerState) -> None:
        """Take the values that others gave a parameter over into its master."""
        if components.quantized_local(param) is not None:
            raise ConfigurationError(
                f"{self._names[param]} was given new values after this FusedAdam was built, and the next step "
                "would overwrite them with its masters; load the optimizer's state too, or reseed_masters()"
            )
        master.adopt()

    def _hyperparameters(self, number: int, group: dict[str, Any]) -> Hyperparameters:
        where = f"FusedAdam: group {number} has been given numbers that make no step: group"
        options.check_adam(where, group, self._bounds_ratio, reads_rate=not self._capturable)
        beta1, beta2 = options.betas(where, group["betas"])
        return Hyperparameters(
            step=group["step"] + 1,
            lr=group["lr"] if self._capturable else float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
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
        self._follow()
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

    def _raise_for_bad_steps(self) -> None:
        self._remembered.check(self.param_groups, self._max_skipped_in_a_row)
