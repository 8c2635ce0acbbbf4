"""Attention with its projections (`MultiheadAttention`). A recipe quantizes only the projections."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard.errors import ConfigurationError
from quantshard.modules import norm as norms, rotary
from quantshard.modules.attention_backends import AUTO
from quantshard.modules.attention_core import DotProductAttention, key_groups
from quantshard.modules.attention_masks import AttentionMask, WindowSize, check_choice
from quantshard.modules.base.composite import CompositeModule, child_name
from quantshard.modules.base.initialization import InitMethod
from quantshard.modules.layernorm_mlp import LayerNormLinear
from quantshard.modules.linear import Linear
from quantshard.modules.rotary import RotaryEmbedding


class MultiheadAttention(CompositeModule):
    """Attention with its projections, optionally after a normalization.

    Children: `qkv`, a `Linear`, or with `input_layernorm` `layernorm_qkv`, a `LayerNormLinear`; `core_attention`;
    `proj`, a `Linear`. Cross-attention has `query_layer` or `layernorm_query`, and `key_value`, in place of `qkv`.
    Queries, keys and values have the weights `query_weight`, `key_weight` and `value_weight`, head by head. With
    `fuse_qkv_params` they share one `weight`, with rows group by group: the group's queries, its key, its value. If
    also `qkv_weight_interleaved=False`, the rows are all queries, then all keys, then all values.

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
        attention_type: "self", or "cross" for keys and values of another sequence, `encoder_output`.
        qkv_format: "sbhd" (input [s, b, hidden_size]), "bshd" ([b, s, hidden_size]) or "thd" ([tokens, hidden_size]).
        attention_dropout, layer_number, attn_mask_type, attention_backend: see `DotProductAttention`.
        window_size, bottom_right_diagonal, softmax_type, softcap: see `DotProductAttention`.
        qk_norm_type, qk_norm_eps, qk_norm_before_rope: normalize the heads of queries and keys; see
            `norm.head_norm`.
        layernorm_epsilon (`eps` there), normalization, zero_centered_gamma, return_layernorm_output: see
            `LayerNormLinear`.
        bias, params_dtype, device, name, fuse_wgrad_accumulation, delay_wgrad_compute: see `Linear`.
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
        attention_type: str = "self",
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
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        window_size: WindowSize | None = None,
        bottom_right_diagonal: bool | None = None,
        softmax_type: str = "vanilla",
        softcap: float = 0.0,
    ) -> None:
        owner = "MultiheadAttention"
        check_choice(owner, "attention_type", attention_type, ("self", "cross"))
        super().__init__()
        self.hidden_size, self.num_attention_heads, self.name = hidden_size, num_attention_heads, name
        if not kv_channels and hidden_size % num_attention_heads:
            raise ConfigurationError(f"{owner}: {hidden_size} / {num_attention_heads} is no integer; give kv_channels")
        self.kv_channels = kv_channels or hidden_size // num_attention_heads
        self.num_gqa_groups = key_groups(owner, num_attention_heads, num_gqa_groups)
        self.attention_type = attention_type
        self.fused, self.interleaved = fuse_qkv_params, qkv_weight_interleaved
        self.rotary_pos_interleaved, self.qkv_format = rotary_pos_interleaved, qkv_format
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output and input_layernorm
        mesh: dict[str, Any] = {"tp_group": tp_group, "tp_size": tp_size, "tp_mesh": tp_mesh}
        norm = {**mesh, "params_dtype": params_dtype, "device": device}
        common: dict[str, Any] = {
            **norm, "sequence_parallel": sequence_parallel, "bias": bias, "delay_wgrad_compute": delay_wgrad_compute,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }  # fmt: skip
        self.set_parallel_mode = set_parallel_mode
        linear = {**common, "parallel_mode": "column" if set_parallel_mode else None, "init_method": init_method}
        normalize = {
            "eps": layernorm_epsilon, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": self.return_layernorm_output,
        }  # fmt: skip
        self._add_projections(linear, normalize)
        self.qk_norm_before_rope = qk_norm_before_rope
        self.q_norm, self.k_norm = (
            norms.head_norm(owner, qk_norm_type, self.kv_channels, qk_norm_eps, **norm) for _ in range(2)
        )
        self.core_attention = DotProductAttention(
            num_attention_heads, self.kv_channels, self.num_gqa_groups, attention_dropout, qkv_format, attn_mask_type,
            layer_number=layer_number, name=child_name(name, "core_attention"),
            attention_backend=attention_backend, attention_type=attention_type, params_dtype=params_dtype,
            device=device, **(mesh if set_parallel_mode else {}), window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal, softmax_type=softmax_type, softcap=softcap,
        )  # fmt: skip
        self.proj = Linear(
            num_attention_heads * self.kv_channels, hidden_size, init_method=output_layer_init_method,
            return_bias=return_bias, name=child_name(name, "proj"),
            parallel_mode="row" if set_parallel_mode else None, **common,
        )  # fmt: skip
        self._on_mesh()

    def _add_projections(self, linear: dict[str, Any], normalize: dict[str, Any]) -> None:
        """Create the layers of queries, keys and values. `linear`, `normalize`: arguments of `LayerNormLinear`."""
        kv_features = self.num_gqa_groups * self.kv_channels
        parts = {"query": self.num_attention_heads * self.kv_channels, "key": kv_features, "value": kv_features}

        def layer(name: str, *parts_of: str, normed: bool = False, split: bool = True) -> None:
            sizes = {part: parts[part] for part in parts_of}
            split = split and not self.fused
            options: dict[str, Any] = {
                **linear, **(normalize if normed else {}), "parameters_split": sizes if split else None,
                "separate_outputs": split and len(sizes) > 1, "name": child_name(self.name, name),
            }  # fmt: skip
            kind = LayerNormLinear if normed else Linear
            setattr(self, name, kind(self.hidden_size, sum(sizes.values()), **options))

        if self.attention_type == "self":
            layer("layernorm_qkv" if self.input_layernorm else "qkv", *parts, normed=self.input_layernorm)
        elif self.input_layernorm:
            layer("layernorm_query", "query", normed=True)
        else:
            layer("query_layer", "query", split=False)
        if self.attention_type == "cross":
            layer("key_value", "key", "value")

    def _on_mesh(self) -> None:
        if self.fused and not self.interleaved and self.core_attention.tp_size > 1:
            raise ConfigurationError("fuse_qkv_params under tensor parallelism needs qkv_weight_interleaved=True")
        for norm in (self.q_norm, self.k_norm):
            # ranks that hold different heads sum the gradients of weights, as for sharded rows
            if isinstance(norm, norms.RMSNorm | norms.LayerNorm):
                norm.sequence_parallel = self.set_parallel_mode and norm.tp_mesh is not None

    def _cut(self) -> Iterable[Any]:
        return [child for child in self.children() if self.set_parallel_mode or child is not self.core_attention]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask | None = None,
        *,
        attn_mask_type: str | None = None,
        encoder_output: Tensor | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: RotaryEmbedding | None = None,
        **core: Any,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Attend: [s, b, hidden_size] ([b, s, hidden_size] for "bshd", [tokens, hidden_size] for "thd") -> the same
        shape and dtype.

        With `return_bias` or `return_layernorm_output` the result is a tuple: output, bias, normalized input.

        Args:
            hidden_states: the input.
            attention_mask: bool, True where masked out; required by the mask types that use a mask.
            attn_mask_type: overrides the module's value.
            encoder_output: the sequence that cross-attention takes keys and values from.
            checkpoint_core_attention: recompute the core attention in backward instead of saving its activations.
            rotary_pos_emb: angles from `RotaryPositionEmbedding`, or a pair of them for queries and keys. Positions
                start again in each sequence of "thd".
            core: other arguments of `DotProductAttention.forward`, such as `window_size` and `cu_seqlens_q`.
        """
        if (encoder_output is not None) != (self.attention_type == "cross"):
            raise ConfigurationError("MultiheadAttention: only attention_type='cross' needs encoder_output")
        inputs = (hidden_states,) if encoder_output is None else (hidden_states, encoder_output)
        projected, normed = self._project(*inputs)
        q, k, v = self._split_and_rotate(projected, rotary_pos_emb, core)
        context = self.core_attention(
            q, k, v, attention_mask, attn_mask_type=attn_mask_type,
            checkpoint_core_attention=checkpoint_core_attention, **core,
        )  # fmt: skip
        out = self.proj(context)
        if normed is None:
            return cast(Tensor, out)
        return (*out, normed) if self.return_bias else (out, normed)

    def _project(self, x: Tensor, encoder_output: Tensor | None = None) -> tuple[Any, Tensor | None]:
        """Return one tensor of queries, keys and values, or three, and the normalized input."""
        first: Any
        if encoder_output is None:
            first = self.layernorm_qkv if self.input_layernorm else self.qkv
        else:
            first = self.layernorm_query if self.input_layernorm else self.query_layer
        projected, normed = first(x) if self.return_layernorm_output else (first(x), None)
        if encoder_output is None:
            return projected, normed
        keys_and_values: Any = self.key_value
        pair = keys_and_values(encoder_output)
        if isinstance(pair, Tensor):
            by_head = pair.unflatten(-1, (-1, self.kv_channels))
            halves = by_head.unflatten(-2, (-1, 2)).unbind(-2) if self.interleaved else by_head.chunk(2, dim=-2)
            pair = [half.flatten(-2) for half in halves]
        return (projected, *pair), normed

    def _split_and_rotate(
        self, qkv: Tensor | Sequence[Tensor], freqs: RotaryEmbedding | None, core: dict[str, Any]
    ) -> Sequence[Tensor]:
        """Split [..., features] or three parts into queries [..., h, d], keys, values [..., groups, d], and rotate."""
        layout = rotary.HeadLayout(core.get("qkv_format") or self.qkv_format, self.rotary_pos_interleaved)
        tp_size = self.core_attention.tp_size
        heads, groups = self.num_attention_heads // tp_size, self.num_gqa_groups // tp_size
        q_positions = kv_positions = None
        parallel = None if freqs is None else self.core_attention.context_parallel()
        if freqs is not None and layout.tensor_format == "thd":
            size = 1 if parallel is None else parallel.ranks.size
            tokens = [(qkv if isinstance(qkv, Tensor) else qkv[part]).shape[0] * size for part in (0, 1)]
            positions = _positions(tokens, freqs, core)
            q_positions, kv_positions = positions if parallel is None else map(parallel.local, positions)
        elif freqs is not None and parallel is not None:
            freqs = parallel.local_angles(freqs, layout.length(qkv if isinstance(qkv, Tensor) else qkv[0]))
        rotates_projection = not self.interleaved and self.q_norm is None
        if rotates_projection and isinstance(qkv, Tensor) and isinstance(freqs, Tensor):
            by_head = qkv.unflatten(-1, (-1, self.kv_channels))
            return rotary.rotate_projection(by_head, heads, groups, freqs, layout, q_positions)
        q, k, v = self._split(qkv, heads, groups)
        if self.q_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if freqs is not None:
            q, k = rotary.rotate_queries_and_keys(q, k, freqs, layout, (q_positions, kv_positions))
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


def _positions(tokens: Sequence[int], freqs: RotaryEmbedding, core: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the positions of queries and of keys in their sequences."""
    names = "cu_seqlens_{}_padded", "cu_seqlens_{}", "max_seqlen_{}"
    of_q, of_kv = ([core.get(name.format(part)) for name in names] for part in ("q", "kv"))
    of_kv = of_q if of_kv[1] is None else of_kv
    for_q, for_kv = freqs if isinstance(freqs, tuple) else (freqs, freqs)
    (padded, plain, longest), (kv_padded, kv_plain, kv_longest) = of_q, of_kv
    queries = rotary.token_positions(tokens[0], for_q, plain if padded is None else padded, longest)
    if tokens[0] == tokens[1] and for_q is for_kv and plain is kv_plain and padded is kv_padded:
        return queries, queries
    return queries, rotary.token_positions(tokens[1], for_kv, kv_plain if kv_padded is None else kv_padded, kv_longest)
