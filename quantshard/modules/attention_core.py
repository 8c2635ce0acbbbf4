"""The core of attention: softmax(q @ k^T * softmax_scale) @ v for each head, in high precision for all recipes.

`attention_backends.py` chooses what computes it, and `attention_masks.py` has the masks.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from quantshard import private_torch
from quantshard.collectives.process_groups import Group
from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.errors import ConfigurationError, warn_user
from quantshard.modules import attention_backends as backends, attention_masks as masks
from quantshard.modules.attention_backends import AUTO, BACKENDS, AttentionCall
from quantshard.modules.attention_masks import AttentionMask, Diagonals, Packing, WindowSize, check_choice, mask_type
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.context_parallel import METHODS, ContextParallel
from quantshard.modules.contexts.context import autocast_input

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class DotProductAttention(QuantizedModule):
    """Attention for every head, in high precision: softmax(q @ k^T * softmax_scale) @ v.

    Mask types: "no_mask"; "causal" (a query sees the keys up to its position) and "causal_bottom_right" (positions are
    counted from the ends if there are more keys than queries); "padding", "padding_causal" and
    "padding_causal_bottom_right", with the lengths of sequences or a mask that is True where a key is padding;
    "arbitrary", with a mask that is True where a key is hidden and that broadcasts to [b, h, queries, keys]. A query
    that sees no key gets zeros.

    Args:
        num_attention_heads: number of query heads.
        kv_channels: features of a head.
        num_gqa_groups: number of key and value heads, each shared by consecutive query heads (default: one each).
        attention_dropout: probability of dropping a softmax weight in training.
        qkv_format: "sbhd" (sequence first), "bshd" (batch first) or "thd" (tokens of all sequences in one dim).
        attn_mask_type: default mask type, see above; `forward` can override it.
        window_size: (left, right): a query at position i sees the keys from i - left to i + right; -1 for no limit.
        bottom_right_diagonal: count positions for windows and ALiBi from the ends, if there are more keys than queries.
            Default: True, except for "causal" and "padding_causal", whose positions always count from the starts.
        softmax_type: "vanilla"; "off-by-one" adds exp(0) to the sum of the softmax, "learnable" exp(softmax_offset), a
            parameter [num_attention_heads] (attention sinks).
        softcap: c limits scores to c * tanh(score / c) before masks and bias; 0 for no limit.
        attention_type: "self" or "cross"; for TransformerEngine, without effect.
        tp_group, tp_size, tp_mesh: tensor parallelism; this rank computes `num_attention_heads` / size query heads and
            `num_gqa_groups` / size key and value heads.
        layer_number: shown in printed tables.
        softmax_scale: factor of q @ k^T. Default: 1 / sqrt(kv_channels).
        attention_backend: one of `attention_backends.BACKENDS`. "auto" chooses by what a call needs.
        params_dtype, device: of `softmax_offset`; see `Linear`.
        name: shown in printed tables and messages.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: see `set_context_parallel_group`.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        *,
        window_size: WindowSize | None = None,
        bottom_right_diagonal: bool | None = None,
        attention_type: str = "self",
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        layer_number: int | None = None,
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        softcap: float = 0.0,
        attention_backend: str = AUTO,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        cp_group: Group = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        owner = "DotProductAttention"
        check_choice(owner, "qkv_format", qkv_format, masks.QKV_FORMATS)
        check_choice(owner, "attention_type", attention_type, ("self", "cross"))
        check_choice(owner, "softmax_type", softmax_type, SOFTMAX_TYPES)
        check_choice(owner, "attention_backend", attention_backend, BACKENDS)
        super().__init__(device, params_dtype, TensorParallelConfig(tp_group, tp_size, False, tp_mesh))
        self.num_attention_heads, self.kv_channels = num_attention_heads, kv_channels
        self.num_gqa_groups = key_groups(owner, num_attention_heads, num_gqa_groups)
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self.window_size = mask_type(owner, attn_mask_type), window_size
        self.bottom_right_diagonal, self.attention_type = bottom_right_diagonal, attention_type
        self.softmax_scale, self.layer_number, self.name = softmax_scale, layer_number, name
        self.softmax_type, self.softcap, self.attention_backend = softmax_type, softcap, attention_backend
        Diagonals.of(owner, self.attn_mask_type, window_size, bottom_right_diagonal)
        if softcap < 0:
            raise ConfigurationError(f"{owner}(softcap={softcap}) must be positive, or 0 for no limit")
        self._check_heads()
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        if softmax_type == "learnable":
            self.add_vector("softmax_offset", num_attention_heads, 0.0, cut=0)
        else:
            self.register_parameter("softmax_offset", None)

    def set_device_mesh(self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None:
        """Divide the heads over the tensor-parallel axis of a mesh; its size must divide both kinds of heads."""
        if tp_mesh is not None:
            self._check_heads(tp_mesh.size())
        super().set_device_mesh(tp_mesh, weight_mesh)

    def _check_heads(self, tp_size: int | None = None) -> None:
        size, common = tp_size or self.tp_size, math.gcd(self.num_attention_heads, self.num_gqa_groups)
        if common % size:
            problem = f"tp_size {size} must divide num_attention_heads and num_gqa_groups"
            raise ConfigurationError(f"DotProductAttention: {problem}; choose a divisor of {common}")

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: AttentionMask | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: WindowSize | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """Attend: queries [s, b, h, d], keys and values [s', b, groups, d] -> [s, b, h * d]; [b, s, ...] for "bshd",
        [tokens, ...] for "thd".

        Args:
            query_layer, key_layer, value_layer: tensors of one dtype.
            attention_mask: bool, True where masked out, for the mask types that use a mask. For padding a mask
                [b, 1, 1, keys], or a pair of masks, of queries and of keys.
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal: override the module's values.
            cu_seqlens_q, cu_seqlens_kv: cumulative lengths of the sequences, int32 [sequences + 1], for "thd" and
                the padding mask types. An empty sequence repeats an entry. By default keys have the lengths of queries.
                [b, sequences + 1]: each row of "sbhd" or "bshd" is full of sequences, the same for queries and keys.
                The lengths are checked on the CPU, or if `max_seqlen_q` is missing, but not in compiled code.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: for "thd", cumulative lengths with the unused tokens after each
                sequence. Outputs of these tokens are 0.
            max_seqlen_q, max_seqlen_kv: at least the largest lengths. Without them, "thd" reads lengths on the host, so
                it waits for the GPU.
            checkpoint_core_attention: recompute the attention in backward instead of saving its activations.
            core_attention_bias_type: "no_bias", "pre_scale_bias" or "post_scale_bias" (before or after
                `softmax_scale`), or "alibi".
            core_attention_bias: added to scores; broadcasts to [b, heads of this rank, queries, keys].
            alibi_slopes: float32 [heads of this rank] or [b, heads]. Default: by the number of heads.
            pad_between_seqs: True requires `cu_seqlens_q_padded`.
        """
        owner = "DotProductAttention.forward"
        layout, kind = self.qkv_format, self.attn_mask_type
        if qkv_format is not None:
            check_choice(owner, "qkv_format", layout := qkv_format, masks.QKV_FORMATS)
        if attn_mask_type is not None:
            kind = mask_type(owner, attn_mask_type)
        self._check_shapes(layout, query_layer, key_layer, value_layer)
        q, k, v = [autocast_input(x) for x in (query_layer, key_layer, value_layer)]
        window = self.window_size if window_size is None else window_size
        corner = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        if pad_between_seqs and cu_seqlens_q_padded is None:
            raise ConfigurationError(f"{owner}(pad_between_seqs=True) needs cu_seqlens_q_padded")
        packings, parallel = None, self.context_parallel()
        if layout == "thd" or (cu_seqlens_q is not None and "padding" in kind):
            of_q = cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q
            of_kv = cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv
            tokens = (q, k) if parallel is None else (parallel.placeholder(q, layout), parallel.placeholder(k, layout))
            packings = _packings(layout, kind, tokens, of_q, of_kv)
        elif cu_seqlens_q is not None:
            warn_user(f"cu_seqlens_q is ignored: attn_mask_type={kind!r} is for sequences of full length")
        call = AttentionCall(
            layout, Diagonals.of(owner, kind, window, corner), self.softmax_scale,
            self.attention_dropout if self.training else 0.0, self.softcap,
            masks.used_mask(kind, attention_mask, packings is not None), packings,
        )  # fmt: skip
        bias = core_attention_bias
        if core_attention_bias_type != "no_bias" or bias is not None or alibi_slopes is not None:
            bias = self._bias(call, core_attention_bias_type, bias, alibi_slopes, q.device)
        sinks = None if self.softmax_type == "vanilla" else self._sinks(q.device)
        choose = partial(backends.prepare, self.attention_backend, sinks is not None)
        run: Any = choose(call, q, k, bias) if parallel is None else partial(parallel.attend, choose)
        arguments = call, q, k, v, bias, sinks
        if checkpoint_core_attention:
            out = checkpoint(run, *arguments, use_reentrant=False)
            private_torch.mark_recomputed(out)
        else:
            out = run(*arguments)
        return out.flatten(-2)

    def context_parallel(self) -> ContextParallel | None:
        """Return the ranks that share sequences: by `set_context_parallel_group`, or by PyTorch's context."""
        return ContextParallel.running() if self._context_parallel is None else self._context_parallel

    def set_context_parallel_group(
        self, cp_group: Group, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Let the ranks of a group share sequences, in the order of tokens that PyTorch's `context_parallel` makes.

        `cp_comm_type`: "p2p" for a ring, or "all_gather". The other arguments are TransformerEngine's and not used.
        """
        check_choice("DotProductAttention", "cp_comm_type", cp_comm_type, METHODS)
        self._context_parallel = None if cp_group is None else ContextParallel.of(cp_group, cp_comm_type)

    def _sinks(self, device: torch.device) -> Tensor | None:
        """Return what the softmax of each head of this rank adds to its sum, as a logarithm."""
        if self.softmax_type == "off-by-one":
            return torch.zeros(self.num_attention_heads // self.tp_size, dtype=torch.float32, device=device)
        return self._locals(("softmax_offset",))[0]

    def _bias(
        self, call: AttentionCall, kind: str, bias: Tensor | None, slopes: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Return the bias of scores, and put the slopes of ALiBi into `call`."""
        check_choice("DotProductAttention.forward", "core_attention_bias_type", kind, BIAS_TYPES)
        if bias is None and kind.endswith("scale_bias"):
            raise ConfigurationError(f"core_attention_bias_type={kind!r} needs core_attention_bias")
        if (bias is not None and not kind.endswith("scale_bias")) or (slopes is not None and kind != "alibi"):
            rule = "core_attention_bias is for '..._scale_bias' only, and alibi_slopes for 'alibi' only"
            raise ConfigurationError(f"core_attention_bias_type={kind!r}: {rule}")
        if kind == "alibi":
            call.slopes = self._alibi_slopes(device) if slopes is None else slopes
        scale = self.softmax_scale or self.kv_channels**-0.5
        return bias * scale if bias is not None and kind == "pre_scale_bias" else bias

    def _alibi_slopes(self, device: torch.device) -> Tensor:
        """Return the slopes of Press et al. (2022) for the heads of this rank."""
        heads = self.num_attention_heads
        power = 2 ** int(math.log2(heads))
        slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
        slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
        local = heads // self.tp_size
        start = 0 if self.tp_mesh is None else self.tp_mesh.get_local_rank() * local
        return torch.tensor(slopes[start : start + local], dtype=torch.float32, device=device)

    def describe_backend(self, device: torch.device, dtype: torch.dtype) -> str:
        """Name the backend that a device would use without mask, bias and dropout; for `explain`."""
        diagonals = Diagonals.of("DotProductAttention", self.attn_mask_type, self.window_size, True)
        needs = [name for name, is_needed in (
            ("packed", self.qkv_format == "thd"), ("window", diagonals.is_window),
            ("sinks", self.softmax_type != "vanilla"), ("softcap", self.softcap > 0),
        ) if is_needed]  # fmt: skip
        return backends.describe(self.attention_backend, tuple(needs), device, dtype, self.kv_channels)

    def _check_shapes(self, layout: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        ranks, size, ndim = self.tp_size, self.kv_channels, len(layout)
        heads, groups = self.num_attention_heads // ranks, self.num_gqa_groups // ranks
        fits = query.ndim == ndim and key.ndim == ndim and key.shape == value.shape
        fits = fits and (layout == "thd" or query.shape[layout.index("b")] == key.shape[layout.index("b")])
        if not fits or tuple(query.shape[-2:]) != (heads, size) or tuple(key.shape[-2:]) != (groups, size):
            shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
            expected = f"({heads}, {size}) for queries, ({groups}, {size}) for others, and batches equal"
            raise ConfigurationError(f"DotProductAttention: {shapes}; in {layout!r} the last dims must be {expected}")

    def extra_repr(self) -> str:
        special = ("window_size", None), ("softmax_type", "vanilla"), ("softcap", 0)
        options = [(name, getattr(self, name)) for name, default in special if getattr(self, name) != default]
        return (
            f"heads={self.num_attention_heads}, kv_channels={self.kv_channels}, groups={self.num_gqa_groups}, "
            f"dropout={self.attention_dropout}, qkv_format={self.qkv_format!r}, "
            f"attn_mask_type={self.attn_mask_type!r}, attention_backend={self.attention_backend!r}"
            + "".join(f", {name}={value!r}" for name, value in options)
        )


_Lengths = tuple[Tensor | None, Tensor | None, int | None]
"""Cumulative lengths, those with gaps, and the largest length."""


def _packings(
    layout: str, kind: str, tokens: tuple[Tensor, Tensor], of_q: _Lengths, of_kv: _Lengths
) -> tuple[Packing, Packing]:
    """Return the sequences of queries and of keys: the same object if both have the same boundaries."""
    cumulative, padded, longest = of_q
    if cumulative is None:
        raise ConfigurationError(f"qkv_format={layout!r} needs cu_seqlens_q, the cumulative lengths of the sequences")
    if "padding" not in kind:
        raise ConfigurationError(f"qkv_format={layout!r} needs a padding mask, as 'padding_causal', not {kind!r}")
    queries = masks.packing("q", cumulative, padded, longest, tokens[0], layout)
    has_same = of_kv[0] is None or (of_kv[0] is cumulative and of_kv[1] is padded)
    dims = len(layout) - len("hd")
    if has_same and tokens[0].shape[:dims] == tokens[1].shape[:dims]:
        return queries, queries
    if cumulative.ndim > 1:
        raise ConfigurationError("cu_seqlens_kv: rows of several sequences need the boundaries of the queries; omit it")
    keys = masks.packing("kv", *(of_q if of_kv[0] is None else of_kv), tokens[1], layout)  # type: ignore[arg-type]
    if len(keys.starts) != len(queries.starts):
        raise ConfigurationError(f"cu_seqlens_q has {len(queries.starts)} sequences, cu_seqlens_kv {len(keys.starts)}")
    return queries, keys


def key_groups(owner: str, heads: int, groups: int | None) -> int:
    """Return the number of key and value heads; they must divide the query heads."""
    groups = heads if groups is None else groups
    if groups < 1 or heads % groups:
        raise ConfigurationError(f"{owner}: num_gqa_groups {groups} must divide num_attention_heads {heads}")
    return groups
