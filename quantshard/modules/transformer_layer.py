"""TransformerLayer: attention and MLP with residual connections, one block of a decoder-only or encoder model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard import private_torch
from quantshard.distributed import tensor_parallel
from quantshard.errors import ConfigurationError
from quantshard.modules.activation_storage import HIGH_PRECISION, check_storage
from quantshard.modules.attention import MultiheadAttention
from quantshard.modules.attention_backends import AUTO
from quantshard.modules.base.composite import CompositeModule, child_name
from quantshard.modules.base.initialization import InitMethod
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts.context import autocast_input
from quantshard.modules.layernorm_mlp import LayerNormMLP
from quantshard.modules.norm import LayerNorm, RMSNorm
from quantshard.modules.rotary import RotaryEmbedding


class TransformerLayer(CompositeModule):
    """A transformer block: x = x + attention(norm(x)), then x + mlp(norm(x)).

    Children: `self_attention` (`MultiheadAttention`), `layernorm_mlp` (`LayerNormMLP`) and, with `output_layernorm`,
    `layernorm`. The defaults give a GPT-like layer. For a Llama-like layer use normalization="RMSNorm",
    activation="swiglu", bias=False, num_gqa_groups=..., hidden_dropout=0, attention_dropout=0, and pass
    `rotary_pos_emb` to `forward`.

    Args:
        hidden_size: size of the last dim of input and output.
        ffn_hidden_size: features between the two linear layers of the MLP.
        hidden_dropout: probability of dropping an element of a block's output in training, before the residual is
            added. Under tensor parallelism, torch's CPU generator must have the same state on all ranks of a
            tensor-parallel group; different groups can have different states.
        init_method: function that fills the full qkv weight and the full fc1 weights in place. Default: N(0, 0.023**2),
            drawn by global element index.
        output_layer_init_method: `init_method` for the last projection of attention and of MLP.
        self_attn_mask_type: `attn_mask_type` of `DotProductAttention`; `forward` can override it.
        output_layernorm: normalize the layer's output instead of the attention's input.
        parallel_attention_mlp: attention and MLP both read the layer's input (Falcon), and their outputs are added.
        set_parallel_mode: let tensor parallelism shard the heads and the features of the MLP.
        attn_input_format: "sbhd" (input [s, b, hidden_size]) or "bshd" ([b, s, hidden_size]).

    Other arguments are passed to `MultiheadAttention` (heads, dropout, rotary positions, `qk_norm_type`, ...),
    `LayerNormMLP` (`activation`, `recompute_activation`, `activation_storage`), `LayerNormLinear` (`layernorm_epsilon`
    as `eps`, `normalization`, `zero_centered_gamma`) and `Linear` (`bias`, `params_dtype`, `device`, `name`); those of
    tensor parallelism are described in `module_meshes.TensorParallelConfig`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        *,
        params_dtype: torch.dtype | None = None,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        attention_backend: str = AUTO,
        recompute_activation: bool = False,
        activation_storage: str = HIGH_PRECISION,
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
    ) -> None:
        if parallel_attention_mlp and output_layernorm:
            raise ConfigurationError(
                "TransformerLayer: parallel_attention_mlp and output_layernorm exclude each other; choose one"
            )
        check_storage("TransformerLayer", activation_storage)
        super().__init__()
        self.hidden_dropout, self.layer_number, self.name = hidden_dropout, layer_number, name
        self.parallel_attention_mlp, self.output_layernorm = parallel_attention_mlp, output_layernorm
        norm: dict[str, Any] = {
            "tp_group": tp_group, "tp_size": tp_size, "sequence_parallel": sequence_parallel, "tp_mesh": tp_mesh,
            "zero_centered_gamma": zero_centered_gamma, "params_dtype": params_dtype, "device": device,
        }  # fmt: skip
        common = {
            **norm, "bias": bias, "normalization": normalization, "set_parallel_mode": set_parallel_mode,
        }  # fmt: skip
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon, init_method,
            output_layer_init_method, layer_number, self_attn_mask_type, num_gqa_groups=num_gqa_groups,
            input_layernorm=not output_layernorm, fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved, rotary_pos_interleaved=rotary_pos_interleaved,
            qkv_format=attn_input_format, attention_backend=attention_backend, qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps, qk_norm_before_rope=qk_norm_before_rope,
            name=child_name(name, "self_attention"), **common,
        )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, init_method=init_method, activation=activation,
            output_layer_init_method=output_layer_init_method, recompute_activation=recompute_activation,
            activation_storage=activation_storage, name=child_name(name, "layernorm_mlp"), **common,
        )  # fmt: skip
        if output_layernorm:
            kind = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = kind(hidden_size, layernorm_epsilon, **norm)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        *,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: RotaryEmbedding | None = None,
    ) -> Tensor:
        """Apply the block: [s, b, hidden_size] ([b, s, hidden_size] for "bshd") -> the same shape and dtype.

        Args:
            hidden_states: the input.
            attention_mask: bool, True where masked out; required by the mask types that use a mask.
            self_attn_mask_type: overrides the module's value.
            checkpoint_core_attention: recompute the core attention in backward instead of saving its activations.
            rotary_pos_emb: angles from `RotaryPositionEmbedding`, or a pair of them for queries and keys.
        """
        hidden_states = autocast_input(hidden_states)
        attention_out: Tensor = self.self_attention(
            hidden_states, attention_mask, attn_mask_type=self_attn_mask_type,
            checkpoint_core_attention=checkpoint_core_attention, rotary_pos_emb=rotary_pos_emb,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            return hidden_states + self._dropped(attention_out + self.layernorm_mlp(hidden_states))
        if isinstance(self.layernorm_mlp, LayerNormMLP) and not private_torch.has_hooks(self.layernorm_mlp):
            block, hidden_states = self.layernorm_mlp(self._dropped(attention_out), residual=hidden_states)
        else:
            # a replacement takes no residual, and hooks that read or cast the inputs do not expect one
            hidden_states = hidden_states + self._dropped(attention_out)
            block = self.layernorm_mlp(hidden_states)
        out = hidden_states + self._dropped(block)
        return self.layernorm(out) if self.output_layernorm else out

    def _dropped(self, block: Tensor) -> Tensor:
        if not self.training or self.hidden_dropout == 0:
            return block
        # read from the first sharded module: users can replace any of the children
        modules = (module for module in self.modules() if isinstance(module, QuantizedModule))
        sharded = next((module for module in modules if module.tp_mesh is not None), None)
        tp = tensor_parallel.NONE if sharded is None else sharded.tensor_parallel_of(None)
        return tensor_parallel.dropout(block, self.hidden_dropout, tp)

    def extra_repr(self) -> str:
        number = f"layer_number={self.layer_number}, " if self.layer_number is not None else ""
        return f"{number}hidden_dropout={self.hidden_dropout}, parallel_attention_mlp={self.parallel_attention_mlp}"
