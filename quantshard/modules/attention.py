"""Attention: the core (`DotProductAttention`) and the core with its projections (`MultiheadAttention`).

The core is PyTorch's scaled_dot_product_attention, in high precision for all recipes. A recipe quantizes only the
projections.

PyTorch runs the first of its backends that works, in its own order, which starts with flash. On Hopper cuDNN is faster:
causal attention over 2 x 8192 tokens in bf16, with 32 query heads and 8 key heads of 128 features, takes 7.1 ms forward
and backward on an H200 by cuDNN and 13.0 ms by flash. So "auto" tries cuDNN first on Hopper for the inputs that this
was measured on. It skips backends that the caller disabled (`torch.nn.attention.sdpa_kernel`). Under
`torch.use_deterministic_algorithms(True)` it skips cuDNN, whose gradients differ between runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from quantshard import private_torch
from quantshard.collectives.process_groups import Group
from quantshard.distributed.module_meshes import mesh_of_group
from quantshard.errors import ConfigurationError
from quantshard.modules import norm as norms
from quantshard.modules import rotary
from quantshard.modules.base.composite import CompositeModule, child_name
from quantshard.modules.base.initialization import InitMethod
from quantshard.modules.contexts.context import autocast_input
from quantshard.modules.layernorm_mlp import LayerNormLinear
from quantshard.modules.linear import Linear
from quantshard.modules.rotary import RotaryEmbedding

QKV_FORMATS = ("sbhd", "bshd")
MASK_TYPES = ("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "arbitrary")
_TAKES_MASK = ("padding", "padding_causal", "arbitrary")

AUTO = "auto"
_KINDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS = (AUTO, *_KINDS)


@private_torch.constant_in_graphs
def backend_order(
    backend: str, device: torch.device, dtype: torch.dtype, head_size: int, unmasked: bool
) -> tuple[str, ...]:
    """Return the backends to try, in order; empty for PyTorch's own order.

    `backend`: one of `BACKENDS`. `unmasked`: there is neither a mask nor dropout.
    """
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
    enabled = {
        "flash": cuda.flash_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return tuple(name for name in names if enabled[name])


def attend(backends: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Run PyTorch's scaled_dot_product_attention on the first of `backends` that works."""
    if not backends:
        return F.scaled_dot_product_attention(q, k, v, **options)
    try:
        with sdpa_kernel([_KINDS[name] for name in backends], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, **options)
    except RuntimeError as error:
        # on GPUs and on the CPU
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        raise ConfigurationError(
            f"attention by {' or '.join(backends)} is not available for queries {tuple(q.shape)}, keys "
            f"{tuple(k.shape)}, {q.dtype} on {q.device}; use attention_backend='auto'"
        ) from error


def describe_order(backend: str, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Describe the result of `backend_order` without mask and dropout."""
    is_available = device.type != "cuda" or torch.cuda.is_available()
    backends = backend_order(backend, device, dtype, head_size, True) if is_available else ()
    first, *fallbacks = backends or ("PyTorch's own choice",)
    return first + (f", else {', '.join(fallbacks)}" if fallbacks else "")


def check_choice(owner: str, argument: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ConfigurationError if an argument is not one of its `choices`."""
    if value not in choices:
        raise ConfigurationError(f"{owner}({argument}={value!r}) is not supported; use one of: {', '.join(choices)}")


class DotProductAttention(nn.Module):
    """Attention for every head, in high precision: softmax(q @ k^T * softmax_scale) @ v.

    Mask types: "no_mask"; "causal" (a query sees the keys up to its position) and "causal_bottom_right" (positions are
    counted from the ends if there are more keys than queries); "padding" and "padding_causal", with a mask
    [b, 1, 1, keys] that is True where a key is padding; "arbitrary", with a mask that is True where a key is hidden and
    that broadcasts to [b, h, queries, keys]. A query that sees no key gets zeros.

    Args:
        num_attention_heads: number of query heads.
        kv_channels: features of a head.
        num_gqa_groups: number of key and value heads, each shared by consecutive query heads (default: one each).
        attention_dropout: probability of dropping a softmax weight in training.
        qkv_format: "sbhd" (sequence first) or "bshd" (batch first).
        attn_mask_type: default mask type, see above; `forward` can override it.
        tp_group, tp_size, tp_mesh: tensor parallelism; this rank computes `num_attention_heads` / size query heads and
            `num_gqa_groups` / size key and value heads.
        layer_number: shown in printed tables.
        softmax_scale: factor of q @ k^T. Default: 1 / sqrt(kv_channels).
        attention_backend: "auto", "flash", "cudnn", "efficient" or "math"; see `modules/attention.py`.
        name: shown in printed tables and messages.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        *,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        layer_number: int | None = None,
        softmax_scale: float | None = None,
        attention_backend: str = AUTO,
        name: str | None = None,
    ) -> None:
        owner = "DotProductAttention"
        check_choice(owner, "qkv_format", qkv_format, QKV_FORMATS)
        check_choice(owner, "attn_mask_type", attn_mask_type, MASK_TYPES)
        check_choice(owner, "attention_backend", attention_backend, BACKENDS)
        super().__init__()
        self.num_attention_heads, self.kv_channels = num_attention_heads, kv_channels
        self.num_gqa_groups = _groups(owner, num_attention_heads, num_gqa_groups)
        self.attention_dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.softmax_scale, self.layer_number, self.name = softmax_scale, layer_number, name
        self.attention_backend, self.tp_size = attention_backend, tp_size
        self._check_heads()
        self.set_tensor_parallel_group(tp_group)
        self.set_device_mesh(tp_mesh)

    def set_device_mesh(self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None:
        """Divide the heads over the tensor-parallel axis of a mesh; its size must divide both kinds of heads."""
        if tp_mesh is not None:
            self.tp_size = tp_mesh.size()
            self._check_heads()

    def set_tensor_parallel_group(self, tp_group: Group) -> None:
        """Divide the heads over the ranks of a process group."""
        if tp_group is not None:
            self.set_device_mesh(mesh_of_group(tp_group, torch.device("cpu")))

    def _check_heads(self) -> None:
        common = math.gcd(self.num_attention_heads, self.num_gqa_groups)
        if common % self.tp_size:
            raise ConfigurationError(
                f"DotProductAttention: tp_size {self.tp_size} does not divide num_attention_heads "
                f"{self.num_attention_heads} and num_gqa_groups {self.num_gqa_groups}; choose a divisor of {common}"
            )

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        *,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        checkpoint_core_attention: bool = False,
    ) -> Tensor:
        """Attend: queries [s, b, h, d], keys and values [s', b, groups, d] -> [s, b, h * d]; [b, s, ...] for "bshd".

        Args:
            query_layer, key_layer, value_layer: tensors of one dtype.
            attention_mask: bool, True where masked out; required by the mask types that use a mask.
            qkv_format, attn_mask_type: override the module's values.
            checkpoint_core_attention: recompute the attention in backward instead of saving its activations.
        """
        owner = "DotProductAttention.forward"
        layout, kind = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        check_choice(owner, "qkv_format", layout, QKV_FORMATS)
        check_choice(owner, "attn_mask_type", kind, MASK_TYPES)
        self._check_shapes(layout, query_layer, key_layer, value_layer)
        order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)  # to [b, h, s, d]
        q, k, v = [autocast_input(x).permute(order) for x in (query_layer, key_layer, value_layer)]
        visible = _visible(kind, attention_mask, q.shape[-2], k.shape[-2], q.device)
        unmasked = visible is None and self._dropout == 0
        backends = backend_order(self.attention_backend, q.device, q.dtype, self.kv_channels, unmasked)
        if checkpoint_core_attention:
            out = checkpoint(self._attend, q, k, v, visible, kind, backends, use_reentrant=False)
            private_torch.mark_recomputed(out)
        else:
            out = self._attend(q, k, v, visible, kind, backends)
        return out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)).flatten(-2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, kind: str, backends: tuple[str, ...]
    ) -> Tensor:
        return attend(
            backends, q, k, v, attn_mask=visible, dropout_p=self._dropout,
            is_causal=visible is None and kind != "no_mask", scale=self.softmax_scale,
            enable_gqa=self.num_gqa_groups != self.num_attention_heads,
        )  # fmt: skip

    @property
    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def describe_backend(self, device: torch.device, dtype: torch.dtype) -> str:
        """Name the backend that a device would use without mask and dropout; for `explain`."""
        return describe_order(self.attention_backend, device, dtype, self.kv_channels)

    def _check_shapes(self, layout: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        heads, groups = self.num_attention_heads // self.tp_size, self.num_gqa_groups // self.tp_size
        size = self.kv_channels
        fits = query.ndim == 4 and key.ndim == 4 and key.shape == value.shape
        if not fits or tuple(query.shape[2:]) != (heads, size) or tuple(key.shape[2:]) != (groups, size):
            raise ConfigurationError(
                f"DotProductAttention: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; "
                f"in {layout!r} the last dims must be ({heads}, {size}) for queries, ({groups}, {size}) for others"
            )

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_attention_heads}, kv_channels={self.kv_channels}, groups={self.num_gqa_groups}, "
            f"dropout={self.attention_dropout}, qkv_format={self.qkv_format!r}, "
            f"attn_mask_type={self.attn_mask_type!r}, attention_backend={self.attention_backend!r}"
        )


def _visible(kind: str, masked_out: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Return where a query sees a key, broadcastable to [b, h, queries, keys]; None for no mask or plain causality."""
    if (kind in _TAKES_MASK) != (masked_out is not None):
        requirement = "needs an attention_mask" if kind in _TAKES_MASK else "takes no attention_mask"
        raise ConfigurationError(
            f"attention: attn_mask_type={kind!r} {requirement}; the types that take one are {', '.join(_TAKES_MASK)}"
        )
    if masked_out is not None and masked_out.dtype != torch.bool:
        raise ConfigurationError(f"attention_mask is {masked_out.dtype}; use bool, True where masked out")
    if masked_out is None:
        shifted = kind == "causal_bottom_right" and queries != keys
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries) if shifted else None
    if kind == "padding_causal":
        return ~masked_out & torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
    return ~masked_out


class MultiheadAttention(CompositeModule):
    """Self-attention with its projections, optionally after a normalization.

    Children: `qkv`, a `Linear`, or with `input_layernorm` `layernorm_qkv`, a `LayerNormLinear`; `core_attention`;
    `proj`, a `Linear`. Queries, keys and values have the weights `query_weight`, `key_weight` and `value_weight`, head
    by head. With `fuse_qkv_params` they share one `weight`, with rows group by group: the group's queries, its key, its
    value. If also `qkv_weight_interleaved=False`, the rows are all queries, then all keys, then all values.

    Args:
        hidden_size: size of the last dim of input and output.
        num_attention_heads: number of query heads.
        kv_channels: features of a head. Default: hidden_size / num_attention_heads.
        init_method: fills the full qkv weight in place. Default: N(0, 0.023**2), drawn by global element index.
        output_layer_init_method: `init_method` for `proj`.
        num_gqa_groups: number of key and value heads. Default: num_attention_heads.
        return_bias: return the bias of `proj` after the output instead of adding it.
        input_layernorm: normalize the input.
        fuse_qkv_params: store queries, keys and values in one weight, see above.
        qkv_weight_interleaved: order of the rows of the fused weight, see above.
        rotary_pos_interleaved: layout of the rotary embedding.
        set_parallel_mode: let tensor parallelism shard the heads: qkv by columns, `proj` by rows. A fused weight must
            be interleaved (the default).
        qkv_format: "sbhd" (input [s, b, hidden_size]) or "bshd" ([b, s, hidden_size]).
        attention_dropout, layer_number, attn_mask_type, attention_backend: see `DotProductAttention`.
        qk_norm_type, qk_norm_eps, qk_norm_before_rope: normalize the heads of queries and keys; see
            `norm.head_norm`.
        layernorm_epsilon (`eps` there), normalization, zero_centered_gamma, return_layernorm_output: see
            `LayerNormLinear`.
        bias, params_dtype, device, name: see `Linear`.
        tp_group, tp_size, sequence_parallel, tp_mesh: see `module_meshes.TensorParallelConfig`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        *,
        num_gqa_groups: int | None = None,
        set_parallel_mode: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        attention_backend: str = AUTO,
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
    ) -> None:
        owner = "MultiheadAttention"
        super().__init__()
        self.hidden_size, self.num_attention_heads, self.name = hidden_size, num_attention_heads, name
        if not kv_channels and hidden_size % num_attention_heads:
            raise ConfigurationError(
                f"{owner}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}; "
                "give kv_channels"
            )
        self.kv_channels = kv_channels or hidden_size // num_attention_heads
        self.num_gqa_groups = _groups(owner, num_attention_heads, num_gqa_groups)
        self.fused, self.interleaved = fuse_qkv_params, qkv_weight_interleaved
        self.rotary_pos_interleaved, self.qkv_format = rotary_pos_interleaved, qkv_format
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output and input_layernorm
        kv_features = self.num_gqa_groups * self.kv_channels
        parts = {"query": num_attention_heads * self.kv_channels, "key": kv_features, "value": kv_features}
        features = sum(parts.values())
        mesh: dict[str, Any] = {"tp_group": tp_group, "tp_size": tp_size, "tp_mesh": tp_mesh}
        norm = {**mesh, "params_dtype": params_dtype, "device": device}
        common: dict[str, Any] = {**norm, "sequence_parallel": sequence_parallel, "bias": bias}
        self.set_parallel_mode = set_parallel_mode
        qkv = {
            **common, "parallel_mode": "column" if set_parallel_mode else None, "init_method": init_method,
            "parameters_split": None if fuse_qkv_params else parts,
            "separate_outputs": not fuse_qkv_params,
        }  # fmt: skip
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size, features, layernorm_epsilon, normalization=normalization,
                zero_centered_gamma=zero_centered_gamma, return_layernorm_output=self.return_layernorm_output,
                name=child_name(name, "layernorm_qkv"), **qkv,
            )  # fmt: skip
        else:
            self.qkv = Linear(hidden_size, features, name=child_name(name, "qkv"), **qkv)
        self.qk_norm_before_rope = qk_norm_before_rope
        self.q_norm, self.k_norm = (
            norms.head_norm(owner, qk_norm_type, self.kv_channels, qk_norm_eps, **norm) for _ in range(2)
        )
        self.core_attention = DotProductAttention(
            num_attention_heads, self.kv_channels, self.num_gqa_groups, attention_dropout, qkv_format, attn_mask_type,
            layer_number=layer_number, name=child_name(name, "core_attention"),
            attention_backend=attention_backend,
            **(mesh if set_parallel_mode else {}),
        )  # fmt: skip
        self.proj = Linear(
            num_attention_heads * self.kv_channels, hidden_size, init_method=output_layer_init_method,
            return_bias=return_bias, name=child_name(name, "proj"),
            parallel_mode="row" if set_parallel_mode else None, **common,
        )  # fmt: skip
        self._on_mesh()

    def _on_mesh(self) -> None:
        if self.fused and not self.interleaved and self.core_attention.tp_size > 1:
            raise ConfigurationError(
                "MultiheadAttention: tensor parallelism cannot split fuse_qkv_params=True with "
                "qkv_weight_interleaved=False by heads; leave qkv_weight_interleaved=True, or fuse_qkv_params=False"
            )
        for norm in (self.q_norm, self.k_norm):
            # ranks that hold different heads sum the gradients of weights, as for sharded rows
            if isinstance(norm, norms.RMSNorm | norms.LayerNorm):
                norm.sequence_parallel = self.set_parallel_mode and norm.tp_mesh is not None

    def set_device_mesh(self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None:
        """Shard the parameters over the tensor-parallel axis of a mesh; see `Linear.set_device_mesh`."""
        super().set_device_mesh(tp_mesh, weight_mesh)
        self._on_mesh()

    def set_tensor_parallel_group(self, tp_group: Group) -> None:
        """Shard the parameters over a process group. Under FSDP2 use `set_device_mesh`."""
        super().set_tensor_parallel_group(tp_group)
        self._on_mesh()

    def _cut(self) -> Iterable[Any]:
        return [child for child in self.children() if self.set_parallel_mode or child is not self.core_attention]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: RotaryEmbedding | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Attend: [s, b, hidden_size] ([b, s, hidden_size] for "bshd") -> the same shape and dtype.

        With `return_bias` or `return_layernorm_output` the result is a tuple: output, bias, normalized input.

        Args:
            hidden_states: the input.
            attention_mask: bool, True where masked out; required by the mask types that use a mask.
            attn_mask_type: overrides the module's value.
            checkpoint_core_attention: recompute the core attention in backward instead of saving its activations.
            rotary_pos_emb: angles from `RotaryPositionEmbedding`, or a pair of them for queries and keys.
        """
        projected = (self.layernorm_qkv if self.input_layernorm else self.qkv)(hidden_states)
        normed = None
        if self.return_layernorm_output:
            projected, normed = projected
        q, k, v = self._split_and_rotate(projected, rotary_pos_emb)
        context = self.core_attention(
            q, k, v, attention_mask, attn_mask_type=attn_mask_type,
            checkpoint_core_attention=checkpoint_core_attention,
        )  # fmt: skip
        out = self.proj(context)
        if normed is None:
            return cast(Tensor, out)
        return (*out, normed) if self.return_bias else (out, normed)

    def _split_and_rotate(self, qkv: Tensor | Sequence[Tensor], freqs: RotaryEmbedding | None) -> Sequence[Tensor]:
        """Split [..., features], or take its three parts, into queries [..., h, d], keys and values [..., groups, d];
        rotate queries and keys."""
        layout = rotary.HeadLayout(self.qkv_format, self.rotary_pos_interleaved)
        tp_size = self.core_attention.tp_size
        heads, groups = self.num_attention_heads // tp_size, self.num_gqa_groups // tp_size
        rotates_projection = not self.interleaved and self.q_norm is None
        if rotates_projection and isinstance(qkv, Tensor) and isinstance(freqs, Tensor):
            by_head = qkv.unflatten(-1, (-1, self.kv_channels))
            return rotary.rotate_projection(by_head, heads, groups, freqs, layout)
        q, k, v = self._split(qkv, heads, groups)
        if self.q_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if freqs is not None:
            q, k = rotary.rotate_queries_and_keys(q, k, freqs, layout)
        if self.q_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _split(self, qkv: Tensor | Sequence[Tensor], heads: int, groups: int) -> Sequence[Tensor]:
        if not isinstance(qkv, Tensor):
            return [part.unflatten(-1, (-1, self.kv_channels)) for part in qkv]
        by_head = qkv.unflatten(-1, (-1, self.kv_channels))
        if not self.interleaved:
            return by_head.split((heads, groups, groups), dim=-2)
        by_group = by_head.unflatten(-2, (groups, -1)).split((heads // groups, 1, 1), dim=-2)
        return [part.flatten(-3, -2) for part in by_group]


def _groups(owner: str, heads: int, groups: int | None) -> int:
    groups = heads if groups is None else groups
    if groups < 1 or heads % groups:
        raise ConfigurationError(
            f"{owner}: num_attention_heads {heads} is not a multiple of num_gqa_groups {groups}; choose a divisor"
        )
    return groups
