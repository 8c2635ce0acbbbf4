"""Weight gradients outside of autograd: added to `main_grad`, computed by `backward_dw`, or in a second backward pass.

`fuse_wgrad_accumulation` adds unrounded float32 sums. Plain products on a GPU add them as they write, others by
one more kernel. Zero-bubble schedules of pipelines run backward twice, first for inputs, then for weights:
the first pass keeps the operands of wgrad, so that both have the bits of one.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quantshard import private_torch
from quantshard.errors import ConfigurationError, warn_once
from quantshard.gemm import backend


class WgradProduct(NamedTuple):
    """The product that computes gradients of the weights `indices` of a layer.

    `compute`: returns them in a dtype, [out_features, in_features] or stacked. `matrices`: operands of a product of
    plain matrices. `sink`: None if autograd gets the gradients, in `dtype`.
    """

    compute: Callable[[torch.dtype], Tensor]
    matrices: tuple[Tensor, Tensor] | None
    sink: WeightGradients | None
    indices: Sequence[int]
    dtype: torch.dtype

    def run(self, in_second_pass: bool = False) -> list[Tensor | None]:
        """Compute the gradients, or leave them to `backward_dw`. Return what autograd gets."""
        if self.sink is None:
            return [*self.gradients(self.dtype)]
        params = [self.sink.params[index] for index in self.indices]
        delayed = None if in_second_pass else self.sink.delayed
        if delayed is not None:
            write = functools.partial(self._add_to_main_grads, self.sink) if self.sink.adds else self._add_to_grads
            delayed.setdefault(self.sink.names[self.indices[0]], deque()).append(functools.partial(write, params))
        elif self.sink.adds:
            self._add_to_main_grads(self.sink, params)
        else:
            # wider than the weight under FSDP2 that reduces gradients in float32
            return [*self.gradients(getattr(params[0], "grad_dtype", None) or self.dtype)]
        return [_placeholder(param, self.sink.adds, in_second_pass) for param in params]

    def gradients(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """Compute the gradients of all weights."""
        return _by_weight(self.compute(dtype), self.indices)

    def _add_to_main_grads(self, sink: WeightGradients, params: Sequence[Tensor]) -> None:
        main_grads = [main_grad_of(param) for param in params]
        for param, main_grad in zip(params, main_grads, strict=True):
            if main_grad is not None and (sink.overwrites or getattr(param, "overwrite_main_grad", False)):
                main_grad.zero_()
        first = main_grads[0]
        if self.matrices is not None and first is not None and first.is_cuda and first.dtype is torch.float32:
            a, b = self.matrices
            if a.dtype is torch.float32:
                first.addmm_(a, b)
            else:
                torch.addmm(first, a, b, out_dtype=torch.float32, out=first)
            return
        wide = torch.float32 if first is None else torch.promote_types(first.dtype, torch.float32)
        for main_grad, gradient in zip(main_grads, self.gradients(wide), strict=True):
            if main_grad is not None:
                main_grad.add_(gradient)

    def _add_to_grads(self, params: Sequence[Tensor]) -> None:
        for param, gradient in zip(params, self.gradients(self.dtype), strict=True):
            if isinstance(param, DTensor):
                gradient = private_torch.dtensor_around(gradient, param.device_mesh, [*param.placements], param.shape)
            if param.requires_grad:
                param.grad = gradient if param.grad is None else param.grad.add_(gradient)


def _placeholder(param: Tensor, adds: bool, is_required: bool) -> Tensor | None:
    """Return None, or zeros if a framework's hook or a second pass expects a gradient."""
    if adds and hasattr(param, "grad_added_to_main_grad"):
        param.grad_added_to_main_grad = is_required = True  # type: ignore[attr-defined]
    local = private_torch.local_tensor(param)
    return torch.zeros(local.shape, dtype=local.dtype, device=local.device) if is_required else None


def main_grad_of(param: Tensor) -> Tensor | None:
    """The local tensor that a parameter's gradients are added to, or None."""
    main_grad = getattr(param, "main_grad", None) if param.requires_grad else None
    return None if main_grad is None else private_torch.local_tensor(main_grad)


# Backward ------------------------------------------------------------------------------------------------------------


class _RunningPass(threading.local):
    """The backward that runs on this thread. `for_inputs`: a second pass computes gradients of weights."""

    for_inputs = False


RUNNING_PASS = _RunningPass()


def weight_gradients(
    compute: Callable[[torch.dtype], Tensor], sink: WeightGradients | None, indices: Sequence[int], dtype: torch.dtype,
    matrices: tuple[Tensor, Tensor] | None = None,
) -> Sequence[Any]:  # fmt: skip
    """Return the gradients of weights, for a backward `in_two_passes`; see `WgradProduct`."""
    if sink is None and not RUNNING_PASS.for_inputs:
        return _by_weight(compute(dtype), indices)
    product = WgradProduct(compute, matrices, sink, indices, dtype)
    return [product] * len(indices) if RUNNING_PASS.for_inputs else product.run()


def _by_weight(result: Tensor, indices: Sequence[int]) -> Sequence[Tensor]:
    """Split the gradients of several weights, but not that of one stack of experts' weights."""
    return (result,) if result.ndim == 2 or len(indices) < len(result) else result.unbind()


def in_two_passes(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a layer: a pass that needs no gradients of weights leaves them to the next pass.

    The first `ctx.num_inputs` (default 1) tensor arguments of the function are inputs, the others parameters.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        edges = private_torch.gradients_in_pass(ctx)
        if False not in edges:
            return backward(ctx, *grads)
        count, first = getattr(ctx, "num_inputs", 1), getattr(ctx, "first_pass", None)
        if first is not None and True not in edges[:count] and _same(first[0], grads):
            ctx.first_pass = None
            return None, None, *_finished(first[1][2:])
        if True in edges[count:]:
            return backward(ctx, *grads)
        RUNNING_PASS.for_inputs = True
        try:
            results = backward(ctx, *grads)
        finally:
            RUNNING_PASS.for_inputs = False
        ctx.first_pass = grads, results
        return tuple(None if isinstance(result, WgradProduct) else result for result in results)

    return run


def _same(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    """Return whether two passes have the same output gradients."""
    return all(
        old is new or (old is not None and new is not None and old.data_ptr() == new.data_ptr())
        for old, new in zip(first, second, strict=True)
    )


def _finished(results: Sequence[Any]) -> Iterator[Tensor | None]:
    """Replace the products in the results of a first pass by their gradients."""
    gradients: dict[int, Iterator[Tensor | None]] = {}
    for result in results:
        if isinstance(result, WgradProduct):
            if id(result) not in gradients:
                gradients[id(result)] = iter(result.run(in_second_pass=True))
            yield next(gradients[id(result)])
        else:
            yield result


class PlainLinear(torch.autograd.Function):
    """`torch.nn.functional.linear` on rows, in their dtype. Arguments: rows, (sink, index), weight, bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, others: tuple[WeightGradients, int], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.others, ctx.dtypes = others, (weight.dtype, None if bias is None else bias.dtype)
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @in_two_passes
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy,), (x, weight), (dtype, bias_dtype), (sink, index) = grads, ctx.saved_tensors, ctx.dtypes, ctx.others
        needs_x, _, needs_weight, needs_bias = ctx.needs_input_grad

        def compute(wanted: torch.dtype) -> Tensor:
            if wanted == dtype:
                return dy.t().mm(x).to(dtype)
            return backend.matmul(dy, x, wanted, transpose_a=True, precision=x.dtype)

        dx = dy.mm(weight) if needs_x else None
        dweight = None
        if needs_weight:
            (dweight,) = weight_gradients(compute, sink, [index], dtype, (dy.t(), x))
        return dx, None, dweight, dy.sum(0).to(bias_dtype) if needs_bias else None


# Modules -------------------------------------------------------------------------------------------------------------


class WeightGradients(NamedTuple):
    """Where the weight gradients of one call go.

    `params`, `names`: of the weights. `adds`: gradients are added to `main_grad`. `overwrites`: they replace it.
    `delayed`: name of a weight -> work for `backward_dw`; None: gradients are computed in backward.
    """

    params: Sequence[Tensor]
    names: Sequence[str]
    adds: bool
    overwrites: bool
    delayed: dict[str, deque[Callable[[], None]]] | None


class WgradModule(nn.Module):
    """Base of modules with the options `fuse_wgrad_accumulation` and `delay_wgrad_compute`.

    `overwrites_main_grad`: whether gradients of the next forward replace `main_grad`, as in a first micro-batch.
    """

    fuse_wgrad_accumulation = delay_wgrad_compute = has_wgrad_options = overwrites_main_grad = False

    def _set_wgrad_options(self, fuse_wgrad_accumulation: bool, delay_wgrad_compute: bool) -> None:
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.has_wgrad_options = fuse_wgrad_accumulation or delay_wgrad_compute
        self._delayed: dict[str, deque[Callable[[], None]]] = {}
        if self.has_wgrad_options:
            _watch_steps()
        if delay_wgrad_compute:
            _delaying.add(self)

    def _weight_gradients(self, names: Sequence[str], weights: Sequence[Tensor]) -> WeightGradients | None:
        """Where gradients of these weights go in this call; None: to autograd. `weights`: their local parts."""
        if not self.has_wgrad_options or not torch.is_grad_enabled():
            return None
        params = private_torch.parameters_or_values(self, names)
        is_sharded, delays = private_torch.has_gathered_parameters(self), self.delay_wgrad_compute
        for name, param, weight in zip(names, params, weights, strict=True):
            if param.requires_grad:
                self._check_wgrad(f"{type(self).__name__}.{name}", param, weight, is_sharded)
        adds = self.fuse_wgrad_accumulation and any(main_grad_of(param) is not None for param in params)
        return WeightGradients(params, names, adds, self.overwrites_main_grad, self._delayed if delays else None)

    def _check_wgrad(self, label: str, param: Tensor, weight: Tensor, is_sharded: bool) -> None:
        option = "delay_wgrad_compute" if self.delay_wgrad_compute else "fuse_wgrad_accumulation"
        main_grad = main_grad_of(param)
        if private_torch.in_ddp_forward() or (is_sharded and (self.delay_wgrad_compute or main_grad is not None)):
            owner = "FSDP2" if is_sharded else "DistributedDataParallel"
            raise ConfigurationError(f"{label}: {owner} owns the gradient; build it with {option}=False")
        if not param.is_leaf:
            raise ConfigurationError(f"{label} is computed from other parameters; build it with {option}=False")
        if not self.fuse_wgrad_accumulation:
            return
        if main_grad is None and not (is_sharded and getattr(param, "grad_dtype", None) is torch.float32):
            raise ConfigurationError(
                f"{label}: set main_grad, or in torch 2.15 MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        if main_grad is not None and (main_grad.shape != weight.shape or not main_grad.is_floating_point()):
            raise ConfigurationError(
                f"{label}: main_grad is {main_grad.dtype} {list(main_grad.shape)}; make it float32 {list(weight.shape)}"
            )

    def need_backward_dw(self) -> bool:
        """Return whether weight gradients wait for `backward_dw`."""
        return self.delay_wgrad_compute

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weight gradients of the first backward whose gradients wait (`delay_wgrad_compute`)."""
        for delayed in self._delayed.values() if self.delay_wgrad_compute else ():
            if delayed:
                delayed.popleft()()


# Steps of optimizers that would miss gradients ------------------------------------------------------------------------

_delaying: WeakSet[WgradModule] = WeakSet()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_warn_before_step)


def _warn_before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Warn once if weight gradients wait, or if the optimizer does not read `main_grad`: weights would not train."""
    waiting = [module for module in _delaying if any(module._delayed.values())]
    if waiting:
        warn_once("backward_dw", f"{type(waiting[0]).__name__}: gradients wait; call backward_dw() before each step")
    if getattr(optimizer, "reads_main_grad", False):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.grad is None and main_grad_of(param) is not None for param in params):
        kind = type(optimizer).__name__
        warn_once("main_grad", f"{kind} does not read main_grad; use quantshard.optimizers, or set grad from it")
