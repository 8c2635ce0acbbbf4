"""Attention of transformers models by `DotProductAttention`'s backends; in training a mask is an `AttentionCall`."""

import importlib
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantshard import kernel_dispatch
from quantshard.errors import ConfigurationError
from quantshard.modules.attention_backends import AUTO, AttentionCall, prepare
from quantshard.modules.attention_masks import UNLIMITED, Diagonals, packing
from quantshard.modules.context_parallel import ContextParallel

NAME: Final = "quantshard"
"""The `attn_implementation` of transformers that `register` adds."""

boundaries: Tensor | None = None
"""Documents of the batch that a model runs on, int32 [rows, documents + 1]. None: read from positions on the host."""


def register(model: Any = None) -> None:
    """Add the implementation to transformers, and use it in a model that can use FlashAttention."""
    transformers: Any = importlib.import_module("transformers")
    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, layer_mask)
    if getattr(model, "_supports_flash_attn", False):
        model.set_attn_implementation(NAME)


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    """Compute attention as transformers does; windows come from the mask. Values can have fewer features than keys."""
    has_bias, sinks, cumulative = (options.get(name) for name in ("position_bias", "s_aux", "cu_seq_lens_q"))
    if has_bias is not None or ContextParallel.running() is not None:
        what = "context parallelism" if has_bias is None else "position_bias"
        raise ConfigurationError(f"attn_implementation={NAME!r} does not support {what}; use 'sdpa'")
    missing = query.shape[-1] - value.shape[-1]
    q, k, v = (x.transpose(1, 2) for x in (query, key, F.pad(value, (0, missing)) if missing else value))
    call, bias = attention_mask, None
    if not isinstance(call, AttentionCall):
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        right = 0 if is_causal and attention_mask is None and q.shape[1] > 1 else UNLIMITED
        bias = attention_mask if attention_mask is not None and attention_mask.is_floating_point() else None
        mask = None if attention_mask is bias else ~attention_mask
        call = AttentionCall("bshd", Diagonals(UNLIMITED, right, False), None, mask=mask)
    dropout, softcap = options.get("dropout", 0.0), options.get("softcap") or 0.0
    call = replace(call, scale=options.get("scaling"), dropout=dropout, softcap=softcap)
    if cumulative is not None and call.packings is None and call.mask is None and bias is None:
        call.packings = (packing("q", cumulative[None], None, None, q, "bshd"),) * 2
    out = prepare(AUTO, sinks is not None, call, q, k, bias)(call, q, k, v, bias, sinks)
    return out[..., : value.shape[-1]].contiguous(), None


def layer_mask(**options: Any) -> Any:
    """Build a mask from the arguments of transformers' `sdpa_mask`."""
    rows, length, window, cumulative = options["batch_size"], options["q_length"], options.get("local_size"), boundaries
    is_chunked = window is not None and getattr(options.get("config"), "attention_chunk_size", None) is not None
    is_plain = options.get("attention_mask") is None and not options.get("use_vmap") and not is_chunked
    if is_plain and length == options["kv_length"] and "allow_is_causal_skip" in options:
        earlier = UNLIMITED if window is None or window >= length else window - 1
        call = AttentionCall("bshd", Diagonals(earlier, 0, False), None)
        if cumulative is None and options["allow_is_causal_skip"]:
            return None if earlier == UNLIMITED else call
        cumulative = _boundaries(**options) if cumulative is None else cumulative
        if cumulative is not None:
            tokens = cumulative.new_empty(()).expand(rows, length)
            return replace(call, packings=(packing("q", cumulative, None, None, tokens, "bshd"),) * 2)
    return importlib.import_module("transformers.masking_utils").sdpa_mask(**options)


def _boundaries(batch_size: int, q_length: int, mask_function: Any, device: Any, **_: Any) -> Tensor | None:
    """Find the tokens that do not see the one before. Returns None if all do or one sees a later one, and in graphs."""
    if torch.compiler.is_compiling() or kernel_dispatch.is_capturing():
        return None
    index = torch.arange(q_length, dtype=torch.int64, device=device)
    row, before, after = torch.arange(batch_size, dtype=torch.int64, device=device)[:, None], index[:-1], index[1:]
    starts = F.pad(~mask_function(row, 0, after, before), (1, 0), value=True).expand(batch_size, -1)
    most, later = torch.stack((starts.sum(-1).amax(), mask_function(row, 0, before, after).sum())).tolist()
    # the deterministic backward of flash attention divides its sums if there are fewer sequences x heads than SMs
    firsts = torch.where(starts, index, q_length).sort().values[:, : max(most, -(-32 // batch_size))]
    return None if most == 1 or later else F.pad(firsts, (0, 1), value=q_length).int()
