"""PyTorch's context parallelism: the context that code runs in, and ring attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from quantshard.private_torch.lookup import private_name_later

_PATH = "torch.distributed.tensor.experimental._context_parallel._attention"
# context_parallel is public, but imports FlexAttention
_NAMES = "_templated_ring_attention _templated_ring_attention_backward set_rotate_method context_parallel _cp_options"
_ring, _ring_backward, _set_rotate_method, _context_parallel, _options = (
    private_name_later(f"{_PATH}.{name}", "context parallelism") for name in _NAMES.split()
)


def _replacement() -> dict[str, Any]:
    """Return the variables of the function that replaces SDPA inside `context_parallel`; empty outside."""
    function: Any = F.scaled_dot_product_attention
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "device_mesh" not in names:
        return {}
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__, strict=True)}


def context_parallel_group() -> dist.ProcessGroup | None:
    """Return the ranks of the `context_parallel` that the calling code runs in; None if there is one rank."""
    mesh = _replacement().get("device_mesh")
    return None if mesh is None or mesh.size() == 1 else mesh.get_group()


@contextmanager
def shared_sequences(mesh: DeviceMesh | None, rotate_method: str, *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Enter `context_parallel`, and return this rank's tokens of tensors [batch, tokens]; without a mesh do nothing."""
    if mesh is None:
        yield tensors
        return
    _set_rotate_method()(rotate_method)
    local = [x.clone() for x in tensors]
    with _context_parallel()(mesh, buffers=local, buffer_seq_dims=[1] * len(local), no_restore_buffers={*local}):
        yield local


def rotates_by_all_to_all() -> bool:
    """Return whether `set_rotate_method` chose "alltoall"."""
    return bool(_options().rotate_method.name == "ALL_TO_ALL")


def local_attention() -> Callable[..., Tensor]:
    """Return SDPA, or what `context_parallel` replaces."""
    return _replacement().get("target_fn", F.scaled_dot_product_attention)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, kernel: str, is_causal: bool, scale: float | None
) -> Tensor:
    """Attend to the keys of all ranks: [batch, heads, local tokens, features]. `kernel`: "flash" or "cudnn"."""
    return _RingAttention.apply(q, k, v, group, kernel if q.is_cuda else "cpu", is_causal, scale)


_KERNELS: Final = {"flash": "flash_attention", "cudnn": "cudnn_attention", "cpu": "flash_attention_for_cpu"}
"""The names of PyTorch's attention kernels after "_scaled_dot_product_"."""


def _kernel(name: str, suffix: str = "") -> Any:
    return getattr(torch.ops.aten, f"_scaled_dot_product_{_KERNELS[name]}{suffix}").default


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, kernel: str, is_causal: bool, scale: float | None
    ) -> Tensor:
        options: Any = {"attn_bias": None, "compute_log_sumexp": True} if kernel == "cudnn" else {}
        with _balanced(is_causal):
            out, log_sums, *rest = _ring()(
                group, 2, _kernel(kernel), q, k, v, is_causal=is_causal, dropout_p=0.0, scale=scale, **options
            )
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.arguments, ctx.rest = (group, kernel, is_causal, scale), rest
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        group, kernel, is_causal, scale = ctx.arguments
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        options = dict(zip(names, ctx.rest, strict=False)) | ({"attn_bias": None} if kernel == "cudnn" else {})
        run = _kernel(kernel, "_backward")

        def step(**tensors: Any) -> Any:
            # PyTorch's own ring passes the lengths of the last step of forward
            sizes = {"max_q": tensors["query"].shape[2], "max_k": tensors["key"].shape[2]}
            return run(**tensors | (sizes if ctx.rest else {}))

        with _balanced(is_causal):
            gradients = _ring_backward()(
                group, 2, step, grads[0], "grad_out", q, k, v, out, log_sums, is_causal, dropout_p=0.0,
                scale=scale, **options,
            )  # fmt: skip
        return *gradients[:3], None, None, None, None


def _balanced(is_causal: bool) -> Any:
    """Set the options of PyTorch's ring: by all-to-all, and for causal attention balanced."""
    all_to_all = type(_options().rotate_method).ALL_TO_ALL
    return mock.patch.multiple(_options(), enable_load_balance=is_causal, rotate_method=all_to_all)
