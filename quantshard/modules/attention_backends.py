"""Backends of attention, in one table, and the choice between them.

A call needs some of `NEEDS`. The first row of `TABLE` that supports all of them on the device runs. Without special
needs this is PyTorch's scaled_dot_product_attention (SDPA), which runs the first of its own backends that works, in its
own order, which starts with flash. On Hopper cuDNN is faster, so "auto" tries it first for the inputs that this was
measured on, except under `torch.use_deterministic_algorithms(True)`, because its gradients differ between runs. "auto"
skips backends that the caller disabled (`torch.nn.attention.sdpa_kernel`).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantshard import private_torch
from quantshard.errors import ConfigurationError
from quantshard.modules.attention_masks import UNLIMITED, AttentionMask, Diagonals, Packing, keep_where

AUTO, RING = "auto", "ring"
_KINDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_FLAGS = {"efficient": "mem_efficient"}
NEEDS = {
    "packed": "packed sequences",
    "window": "a sliding window",
    "top left": "diagonals counted from the first query and key",
    "bottom right": "diagonals counted from the last query and key",
    "mask": "an attention mask",
    "bias": "a bias",
    "sinks": "attention sinks",
    "softcap": "softcap",
    "dropout": "dropout",
}
"""Features that a call can need in addition to plain causal attention, with their names in messages."""


@dataclass
class AttentionCall:
    """One call of the core attention, without the tensors that are differentiated.

    `layout`: "sbhd", "bshd" or "thd". `mask`: True where masked out. `packings`: sequences of queries and of keys.
    `slopes`: of ALiBi, float32 [heads] or [batch, heads]. `order`: backends of SDPA to try; empty for PyTorch's order.
    `ring`: ranks with other tokens of the sequences, which pass keys and values on.
    """

    layout: str
    diagonals: Diagonals
    scale: float | None
    dropout: float = 0.0
    softcap: float = 0.0
    mask: AttentionMask | None = None
    packings: tuple[Packing, Packing] | None = None
    slopes: Tensor | None = None
    order: tuple[str, ...] = ()
    ring: Any = None


_VARLEN, _FLEX = "torch.nn.attention.varlen", "torch.nn.attention.flex_attention"
_LOADED: dict[str, Any] = {}
"""Modules of backends by name, and whether `varlen_attn` has the argument enable_gqa."""

# The choice ----------------------------------------------------------------------------------------------------------


@private_torch.constant_in_graphs
def backend_order(
    backend: str, device: torch.device, dtype: torch.dtype, head_size: int, unmasked: bool
) -> tuple[str, ...]:
    """Return the backends of SDPA to try, in order; empty for PyTorch's own order.
    `backend`: "auto" or one of SDPA's. `unmasked`: there is neither a mask nor dropout."""
    if backend != AUTO:
        return (backend,)
    if device.type != "cuda":
        return ()
    cuda = torch.backends.cuda
    names: tuple[str, ...] = ("flash", "efficient", "math")
    if not torch.are_deterministic_algorithms_enabled():
        fits = unmasked and dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= 128
        is_hopper = fits and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
        if not is_hopper or not cuda.cudnn_sdp_enabled():
            return ()
        names = ("cudnn", *names)
    return tuple(name for name in names if getattr(cuda, f"{_FLAGS.get(name, name)}_sdp_enabled")())


@private_torch.constant_in_graphs
def choose(backend: str, needs: tuple[str, ...], device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Return the name of the row in `TABLE` that runs a call; ConfigurationError if none does, or not `backend`."""
    rows = {"sdpa", "masked sdpa"} if backend in _KINDS else {*TABLE} - {RING} if backend == AUTO else {backend}
    for name, row in TABLE.items():
        if name in rows and row.needs.issuperset(needs) and (not row.module or row.fits(device, dtype, head_size)):
            return name
    if any(TABLE[name].needs.issuperset(needs) for name in rows):
        what = f"{dtype} on {device.type} with {head_size} features, or its package is missing"
    else:
        what = " and ".join(NEEDS[need] for need in needs)
    if backend == RING:
        raise ConfigurationError(f"ring attention does not support {what}; use set_rotate_method('allgather')")
    raise ConfigurationError(f"attention_backend={backend!r} does not support {what}; use attention_backend='auto'")


def prepare(backend: str, has_sinks: bool, call: AttentionCall, q: Tensor, k: Tensor, bias: Tensor | None) -> Any:
    """Return the function that computes a call, and store the order of SDPA's backends in the call."""
    needs, head_size = _needs(call, q, k, bias is not None, has_sinks), q.shape[-1]
    name = choose(backend if call.ring is None else RING, needs, q.device, q.dtype, head_size)
    unmasked = not {"mask", "bias", "dropout"}.intersection(needs) and name in ("sdpa", RING)
    sdpa_choice = backend if name in ("sdpa", "masked sdpa", RING) else AUTO
    call.order = backend_order(sdpa_choice, q.device, q.dtype, head_size, unmasked)
    return TABLE[name].run


def _needs(call: AttentionCall, q: Tensor, k: Tensor, has_bias: bool, has_sinks: bool) -> tuple[str, ...]:
    """Return what a call needs of its backend, of `NEEDS`."""
    if call.packings is not None:
        same_lengths = call.packings[0] is call.packings[1]
    else:
        axis = call.layout.index("s")
        same_lengths = q.shape[axis] == k.shape[axis] and not isinstance(call.mask, tuple)
    has_corner = not same_lengths and (call.diagonals.is_limited or call.slopes is not None)
    needs = {
        "packed": call.packings is not None,
        "window": call.diagonals.is_window,
        "top left": has_corner and not call.diagonals.bottom_right,
        "bottom right": has_corner and call.diagonals.bottom_right,
        "mask": call.mask is not None,
        "bias": has_bias or call.slopes is not None,
        "sinks": has_sinks,
        "softcap": call.softcap > 0,
        "dropout": call.dropout > 0,
    }
    return tuple(filter(needs.get, needs))


def describe(backend: str, needs: tuple[str, ...], device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Describe the result of `choose` and `backend_order`."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "PyTorch's own choice"
    name = choose(backend, needs, device, dtype, head_size)
    if name not in ("sdpa", "masked sdpa"):
        return name
    first, *fallbacks = backend_order(backend, device, dtype, head_size, not needs) or ("PyTorch's own choice",)
    return ", else ".join(filter(None, (first, ", ".join(fallbacks)))) + " with a mask" * (name == "masked sdpa")


def attend(backends: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Run SDPA on the first of `backends` that works."""
    run = private_torch.local_attention()
    if not backends:
        return run(q, k, v, **options)
    try:
        with sdpa_kernel([_KINDS[name] for name in backends], set_priority=True):
            return run(q, k, v, **options)
    except RuntimeError as error:
        # on GPUs and on the CPU
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        inputs = f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, {q.dtype} on {q.device}"
        problem = f"attention by {' or '.join(backends)} is not available for {inputs}"
        raise ConfigurationError(f"{problem}; use attention_backend='auto'") from error


# SDPA, and plain PyTorch ---------------------------------------------------------------------------------------------


class _Dense(NamedTuple):
    """Queries, keys and values as [batch, heads, length, features], `visible` where a query sees a key (None:
    everywhere), and key position - query position, if the call has diagonals or ALiBi slopes."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor | None
    distance: Tensor | None


def _dense(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> _Dense:
    """Bring a call into the form of SDPA. `is_causal`: the kernel applies the diagonals."""
    if call.layout == "thd":
        assert call.packings is not None
        of_q, of_k = call.packings
        q, k, v = of_q.unpack(q), of_k.unpack(k), of_k.unpack(v)
    else:
        order = (1, 2, 0, 3) if call.layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = [x.permute(order) for x in (q, k, v)]
    queries, keys = q.shape[-2], k.shape[-2]
    sizes: tuple[Any, Any] = (queries, keys)
    visible = distance = None
    if call.packings is not None and call.layout != "thd" and not call.packings[0].has_gaps:
        packed = zip(call.packings, (q, k), strict=True)
        documents = [packing.documents(len(x) * x.shape[-2])[0].view(len(x), 1, -1) for packing, x in packed]
        visible = documents[0][..., None] == documents[1][:, :, None]
    elif call.packings is not None:
        of_q, of_k = call.packings
        in_q, in_k = of_q.slots()[1], of_k.slots()[1]
        visible = (in_q[:, :, None] & in_k[:, None, :])[:, None]
        if call.layout != "thd":
            # NaN in padding would reach other tokens
            q, k, v = (torch.where(x_in[:, None, :, None], x, 0) for x, x_in in ((q, in_q), (k, in_k), (v, in_k)))
        sizes = of_q.lengths[:, None, None, None], of_k.lengths[:, None, None, None]
    elif isinstance(call.mask, Tensor):
        visible = ~call.mask
    elif call.mask is not None:
        of_queries, of_keys = (~mask for mask in call.mask)
        visible = of_queries.mT & of_keys
        sizes = of_queries.sum(-1, keepdim=True), of_keys.sum(-1, keepdim=True)
    if not is_causal and (call.diagonals.is_limited or call.slopes is not None):
        places = torch.arange(max(queries, keys), device=q.device)
        distance = places[:keys] - places[:queries, None] - call.diagonals.shift(*sizes)
        allowed = call.diagonals.allow(distance)
        visible = allowed if visible is None else visible if allowed is None else visible & allowed
    return _Dense(q, k, v, visible, distance)


def _alibi_bias(slopes: Tensor, dense: _Dense) -> Tensor:
    assert dense.distance is not None
    return dense.distance.abs() * -slopes[..., None, None]


def _to_layout(call: AttentionCall, out: Tensor, tokens: int) -> Tensor:
    if call.layout == "thd":
        assert call.packings is not None
        return call.packings[0].pack(out, tokens)
    return out.permute((2, 0, 1, 3) if call.layout == "sbhd" else (0, 2, 1, 3))


def _sdpa(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, _: Tensor | None, masked: bool = False
) -> Tensor:
    has_mask = masked or call.mask is not None or bias is not None or call.slopes is not None
    is_causal = not has_mask and call.diagonals.right == 0
    dense = _dense(call, q, k, v, is_causal)
    mask, bias = dense.visible, bias if call.slopes is None else _alibi_bias(call.slopes, dense)
    if bias is not None:
        mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, -torch.inf)
    keys, values, sharing = dense.k, dense.v, q.shape[-2] // k.shape[-2]
    if sharing > 1 and mask is not None and q.device.type == "cuda":
        # of PyTorch's backends with masks, only "math" lets query heads share key heads
        keys, values = (x.repeat_interleave(sharing, dim=1) for x in (keys, values))
    out = attend(
        call.order, dense.q, keys, values, attn_mask=mask, dropout_p=call.dropout, is_causal=is_causal,
        scale=call.scale, enable_gqa=dense.q.shape[1] != keys.shape[1],
    )  # fmt: skip
    return _to_layout(call, out, q.shape[0])


def _ring(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    kernel, dense = call.order[0] if call.order else "flash", _dense(call, q, k, v, is_causal=True)
    if kernel not in ("flash", "cudnn") or (q.is_cuda and q.dtype.itemsize != 2):
        raise ConfigurationError(f"ring attention by {kernel} in {q.dtype} is not available; use 'auto' and 16 bits")
    is_causal = call.diagonals.right == 0
    out = private_torch.ring_attention(*dense[:3], call.ring, kernel, is_causal, call.scale)
    return _to_layout(call, out, q.shape[0])


def _unfused(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Compute attention by its definition, in float32 and with all scores in memory."""
    dense = _dense(call, q, k, v)
    queries = dense.q.float()
    keys, values = (x.float().repeat_interleave(q.shape[-2] // k.shape[-2], dim=1) for x in (dense.k, dense.v))
    scores = queries @ keys.mT * (call.scale or q.shape[-1] ** -0.5)
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    added = bias if call.slopes is None else _alibi_bias(call.slopes, dense)
    if added is not None:
        scores = scores + added
    if dense.visible is not None:
        scores = scores.masked_fill(~dense.visible, -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.float()[:, None, None]
        largest = torch.maximum(largest, sinks.detach())
    # a query that sees no key gets zeros
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total) if sinks is None else total + torch.exp(sinks - largest)
    out = F.dropout(weights / total, call.dropout) @ values
    return _to_layout(call, out.to(q.dtype), q.shape[0])


# Kernels for windows and packed sequences ----------------------------------------------------------------------------


def _as_packed(call: AttentionCall, *tensors: Tensor) -> tuple[list[Tensor], tuple[Packing, Packing]]:
    """Return [tokens, heads, features] of each tensor, and the sequences of queries and of keys."""
    if call.layout == "thd":
        assert call.packings is not None
        return list(tensors), call.packings
    batch_first = [x.transpose(0, 1) if call.layout == "sbhd" else x for x in tensors]
    of_q, of_k = call.packings or (Packing.of_batch(x.shape[0], x.shape[1], x.device) for x in batch_first[:2])
    return [x.flatten(0, 1) for x in batch_first], (of_q, of_k)


def _from_packed(call: AttentionCall, out: Tensor, q: Tensor) -> Tensor:
    if call.layout == "thd":
        return out
    out = out.unflatten(0, (q.shape[1 if call.layout == "sbhd" else 0], -1))
    return out.transpose(0, 1) if call.layout == "sbhd" else out


def _in_sequences(packing: Packing, x: Tensor) -> Tensor:
    """Return x without values and gradients in gaps, which kernels can leave uninitialized."""
    return keep_where(packing.documents(x.shape[0])[2], x) if packing.has_gaps else x


def _varlen(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    (q_tokens, *kv_tokens), (of_q, of_k) = _as_packed(call, q, k, v)
    q_tokens, (k, v) = _in_sequences(of_q, q_tokens), [_in_sequences(of_k, x) for x in kv_tokens]
    ends = of_q.boundaries(len(q_tokens))
    boundaries = ends, ends if of_k is of_q else of_k.boundaries(len(k)), of_q.longest, of_k.longest
    options: dict[str, Any] = {"scale": call.scale, "window_size": tuple(call.diagonals[:2])}
    if q_tokens.shape[1] != k.shape[1] and _LOADED["enable_gqa"]:
        options["enable_gqa"] = True
    elif q_tokens.shape[1] != k.shape[1]:
        k, v = [x.repeat_interleave(q_tokens.shape[1] // x.shape[1], dim=1) for x in (k, v)]
    out = _LOADED[_VARLEN].varlen_attn(q_tokens, k, v, *boundaries, **options)
    return _from_packed(call, _in_sequences(of_q, out), q)


_compiled = cache(torch.compile)


def _flex(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, _: Any, sinks: Tensor | None) -> Tensor:
    tokens, packings = _as_packed(call, q, k, v)
    (q_doc, q_pos, q_in), (k_doc, k_pos, k_in) = (p.documents(len(x)) for p, x in zip(packings, tokens, strict=False))
    shift = call.diagonals.shift(*(packing.lengths for packing in packings))
    q_pos = q_pos + (shift[q_doc] if isinstance(shift, Tensor) else shift)
    # tensors, because Inductor of torch 2.11 cannot compile a mask that reads a number which varies between calls
    first = q_pos - call.diagonals.left if call.diagonals.left != UNLIMITED else None
    last = q_pos + call.diagonals.right if call.diagonals.right != UNLIMITED else None

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (q_doc[query] == k_doc[key]) & q_in[query] & k_in[key]
        if first is not None:
            visible = visible & (k_pos[key] >= first[query])
        return visible if last is None else visible & (k_pos[key] <= last[query])

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return call.softcap * torch.tanh(score / call.softcap)

    flex = _LOADED[_FLEX]
    functions: Any = flex.flex_attention, flex.create_block_mask
    if q.device.type == "cuda" and not torch.compiler.is_compiling():
        functions = [_compiled(function) for function in functions]
    blocks = functions[1](sees, None, None, len(tokens[0]), len(tokens[1]), device=q.device)
    out, auxiliary = functions[0](
        *(x.transpose(0, 1)[None] for x in tokens), score_mod=capped if call.softcap else None, block_mask=blocks,
        scale=call.scale, enable_gqa=q.shape[-2] != k.shape[-2],
        return_aux=flex.AuxRequest(lse=sinks is not None),
    )  # fmt: skip
    if sinks is not None:
        out = out * torch.sigmoid(auxiliary.lse - sinks.float()[:, None])[..., None].to(out.dtype)
    return _from_packed(call, out[0].transpose(0, 1), q)


class Backend(NamedTuple):
    """A way to compute attention.

    `needs`: what it supports, of `NEEDS`. `run`: function of a call, q, k, v, the bias and the sinks. `module`: the
    module that it needs, which is for GPUs and 16 bits; "" for a row that runs anywhere.
    """

    needs: frozenset[str]
    run: Callable[..., Tensor]
    module: str = ""

    def fits(self, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
        """Return True if the module of the row is there, and runs on a device, with a dtype and a head size."""
        is_half, has_size = dtype in (torch.bfloat16, torch.float16), head_size % 8 == 0 and 16 <= head_size <= 256
        is_cuda = device.type == "cuda" and torch.version.hip is None
        return is_cuda and is_half and has_size and _load(self.module)


def _load(name: str) -> bool:
    """Import a module into `_LOADED`, and return False if it is missing or too old.
    PyTorch's modules take seconds, because they import Dynamo. Before PyTorch 2.11, `varlen_attn` has no windows."""
    if name not in _LOADED:
        _LOADED[name] = module = import_module(name) if find_spec(name) else None
        if name == _VARLEN and module is not None:
            arguments = inspect.signature(module.varlen_attn).parameters
            _LOADED["enable_gqa"] = "enable_gqa" in arguments
            _LOADED[name] = module if "window_size" in arguments else None
    return _LOADED[name] is not None


_MASKS = {"mask", "bias", "dropout"}
_BOTH_CORNERS = {"packed", "window", "top left", "bottom right"}

TABLE = {
    "sdpa": Backend(frozenset({"top left", *_MASKS}), _sdpa),
    "varlen": Backend(frozenset({"packed", "window", "bottom right"}), _varlen, _VARLEN),
    "flex": Backend(frozenset({*_BOTH_CORNERS, "sinks", "softcap"}), _flex, _FLEX),
    "masked sdpa": Backend(frozenset({*_BOTH_CORNERS, *_MASKS}), partial(_sdpa, masked=True)),
    "unfused": Backend(frozenset(NEEDS), _unfused),
    RING: Backend(frozenset(), _ring),
}  # fmt: skip
"""Backends in the order in which "auto" tries them."""

BACKENDS = (AUTO, *_KINDS, "varlen", "flex", "unfused")
