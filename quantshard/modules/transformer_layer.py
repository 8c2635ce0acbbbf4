"""TransformerLayer: attention and MLP with residual connections, one block of a decoder, an encoder, or both."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
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
from quantshard.modules.attention_masks import AttentionMask, WindowSize, check_choice
from quantshard.modules.base.composite import CompositeModule, child_name
from quantshard.modules.base.initialization import InitMethod
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts.context import autocast_input
from quantshard.modules.layernorm_mlp import LayerNormMLP
from quantshard.modules.norm import LayerNorm, RMSNorm
from quantshard.modules.rotary import RotaryEmbedding

_OF_ENCODER = {"cu_seqlens_kv", "cu_seqlens_kv_padded", "max_seqlen_kv"}
"""Arguments of attention that describe the keys of cross-attention."""


class TransformerLayer(CompositeModule):
    """A transformer block: x = x + attention(norm(x)), then x + mlp(norm(x)).

    Children: `self_attention` (`MultiheadAttention`), with layer_type="decoder" `inter_attention` after it,
    `layernorm_mlp` (`LayerNormMLP`) and, with `output_layernorm`, `layernorm`. The defaults give a GPT-like layer. For
    a Llama-like layer use normalization="RMSNorm", activation="swiglu", bias=False, num_gqa_groups=...,
    hidden_dropout=0, attention_dropout=0, and pass `rotary_pos_emb` to `forward`.

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
        window_size, bottom_right_diagonal: see `DotProductAttention`, of the self-attention; `forward` can override
            them.
        layer_type: "encoder", or "decoder" for cross-attention to another sequence (`encoder_output`) after the
            self-attention.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: the same for the cross-attention.
        apply_residual_connection_post_layernorm: add the output of a block to its normalized input.
        drop_path_rate: probability of dropping the whole output of a block for a batch entry in training.
        output_layernorm: normalize the layer's output instead of the attention's input.
        parallel_attention_mlp: attention and MLP both read the layer's input (Falcon), and their outputs are added.
        set_parallel_mode: let tensor parallelism shard the heads and the features of the MLP.
        attn_input_format: "sbhd" (input [s, b, hidden_size]), "bshd" ([b, s, hidden_size]) or "thd"
            ([tokens, hidden_size]).
        softmax_type, softcap: see `DotProductAttention`.

    Other arguments are passed to `MultiheadAttention` (heads, dropout, rotary positions, `qk_norm_type`, ...),
    `LayerNormMLP` (`activation`, `activation_params`, `recompute_activation`, `activation_storage`), `LayerNormLinear`
    (`layernorm_epsilon` as `eps`, `normalization`, `zero_centered_gamma`) and `Linear` (`bias`, `params_dtype`,
    `device`, `name`, `fuse_wgrad_accumulation`, `delay_wgrad_compute`). `module_meshes.TensorParallelConfig` describes
    the arguments of tensor parallelism.
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
        window_size: WindowSize | None = None,
        bottom_right_diagonal: bool | None = None,
        layer_type: str = "encoder",
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: WindowSize | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        drop_path_rate: float = 0.0,
        params_dtype: torch.dtype | None = None,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
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
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        softmax_type: str = "vanilla",
        softcap: float = 0.0,
    ) -> None:
        check_choice("TransformerLayer", "layer_type", layer_type, ("encoder", "decoder"))
        post_layernorm, is_decoder = apply_residual_connection_post_layernorm, layer_type == "decoder"
        excluded = {
            "output_layernorm": output_layernorm, "layer_type='decoder'": is_decoder,
            "apply_residual_connection_post_layernorm": post_layernorm,
        }  # fmt: skip
        for option in [option for option, is_set in excluded.items() if parallel_attention_mlp and is_set]:
            raise ConfigurationError(f"TransformerLayer: parallel_attention_mlp and {option} exclude each other")
        check_storage("TransformerLayer", activation_storage)
        super().__init__()
        self.hidden_dropout, self.layer_number, self.name = hidden_dropout, layer_number, name
        self.layer_type, self.drop_path_rate = layer_type, drop_path_rate
        self.apply_residual_connection_post_layernorm = post_layernorm
        self.parallel_attention_mlp, self.output_layernorm = parallel_attention_mlp, output_layernorm
        norm: dict[str, Any] = {
            "tp_group": tp_group, "tp_size": tp_size, "sequence_parallel": sequence_parallel, "tp_mesh": tp_mesh,
            "zero_centered_gamma": zero_centered_gamma, "params_dtype": params_dtype, "device": device,
        }  # fmt: skip
        common = {
            **norm, "bias": bias, "normalization": normalization, "set_parallel_mode": set_parallel_mode,
            "return_layernorm_output": post_layernorm, "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "delay_wgrad_compute": delay_wgrad_compute,
        }  # fmt: skip
        attention = partial(
            MultiheadAttention, hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            init_method, output_layer_init_method, layer_number, num_gqa_groups=num_gqa_groups,
            fuse_qkv_params=fuse_qkv_params, qkv_weight_interleaved=qkv_weight_interleaved,
            rotary_pos_interleaved=rotary_pos_interleaved, qkv_format=attn_input_format,
            attention_backend=attention_backend, qk_norm_type=qk_norm_type, qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope, softmax_type=softmax_type, softcap=softcap, **common,
        )  # fmt: skip
        self.self_attention = attention(
            attn_mask_type=self_attn_mask_type, window_size=window_size, bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm, name=child_name(name, "self_attention"),
        )  # fmt: skip
        if is_decoder:
            self.inter_attention = attention(
                attn_mask_type=enc_dec_attn_mask_type, window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal, attention_type="cross", input_layernorm=True,
                name=child_name(name, "inter_attention"),
            )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, init_method=init_method, activation=activation,
            output_layer_init_method=output_layer_init_method, recompute_activation=recompute_activation,
            activation_params=activation_params, activation_storage=activation_storage,
            name=child_name(name, "layernorm_mlp"), **common,
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
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: AttentionMask | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: WindowSize | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        window_size: WindowSize | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: RotaryEmbedding | None = None,
        **core: Any,
    ) -> Tensor:
        """Apply the block: [s, b, hidden_size] ([b, s, hidden_size] for "bshd", [tokens, hidden_size] for "thd") -> the
        same shape and dtype.

        Args:
            hidden_states: the input.
            attention_mask: bool, True where masked out; required by the mask types that use a mask.
            self_attn_mask_type, window_size, bottom_right_diagonal: override the module's values.
            encoder_output: the sequence that a decoder's cross-attention reads.
            enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: the same for
                the cross-attention.
            checkpoint_core_attention: recompute the core attention in backward instead of saving its activations.
            rotary_pos_emb: angles from `RotaryPositionEmbedding`, or a pair of them for queries and keys.
            core: further arguments of `DotProductAttention.forward`, such as `cu_seqlens_q`. A decoder passes those of
                keys, such as `cu_seqlens_kv`, to its cross-attention.
        """
        hidden_states = autocast_input(hidden_states)
        core |= {"checkpoint_core_attention": checkpoint_core_attention, "rotary_pos_emb": rotary_pos_emb}
        of_self = core
        if self.layer_type == "decoder":
            of_self = {name: value for name, value in core.items() if name not in _OF_ENCODER}
        attention_out = self.self_attention(
            hidden_states, attention_mask, attn_mask_type=self_attn_mask_type, window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal, **of_self,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            return hidden_states + self._dropped(attention_out + self.layernorm_mlp(hidden_states))
        if self.layer_type == "decoder":
            hidden_states = self._add(attention_out, hidden_states)
            attention_out = self.inter_attention(
                hidden_states, enc_dec_attn_mask, attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size, bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                encoder_output=encoder_output, **core,
            )  # fmt: skip
            drop_path = False
        elif encoder_output is not None:
            raise ConfigurationError("TransformerLayer: encoder_output needs layer_type='decoder'")
        else:
            drop_path = True
        mlp = self.layernorm_mlp
        takes_residual = isinstance(mlp, LayerNormMLP) and not private_torch.forward_hooks(mlp)
        if takes_residual and not self.apply_residual_connection_post_layernorm:
            block, hidden_states = mlp(self._dropped(attention_out, drop_path), residual=hidden_states)
        else:
            # a replacement takes no residual, and hooks that read or cast the inputs do not expect one
            hidden_states = self._add(attention_out, hidden_states, drop_path)
            block = mlp(hidden_states)
        out = self._add(block, hidden_states)
        return self.layernorm(out) if self.output_layernorm else out

    def _add(self, block: Tensor | tuple[Tensor, ...], residual: Tensor, drop_path: bool = True) -> Tensor:
        """Add the output of a block to the residual, or to the normalized input that the block returned."""
        if isinstance(block, tuple):
            block, residual = block
        return residual + self._dropped(block, drop_path)

    def _dropped(self, block: Tensor, drop_path: bool = True) -> Tensor:
        drops_path = drop_path and self.drop_path_rate > 0
        if not self.training or (self.hidden_dropout == 0 and not drops_path):
            return block
        # read from the first sharded module: users can replace any of the children
        modules = (module for module in self.modules() if isinstance(module, QuantizedModule))
        sharded = next((module for module in modules if module.tp_mesh is not None), None)
        tp = tensor_parallel.NONE if sharded is None else sharded.tensor_parallel_of(None)
        if self.hidden_dropout > 0:
            block = tensor_parallel.dropout(block, self.hidden_dropout, tp)
        if not drops_path:
            return block
        layout = self.self_attention.qkv_format
        if layout == "thd":
            raise ConfigurationError("TransformerLayer: drop_path_rate needs batch entries, which 'thd' does not have")
        mask = torch.ones(block.shape[layout.index("b")], 1, dtype=block.dtype, device=block.device)
        mask = tensor_parallel.dropout(
            mask, self.drop_path_rate, replace(tp, sequence_parallel=tp.sequence_parallel and layout == "bshd")
        )
        return block * (mask if layout == "sbhd" else mask[:, None])

    def extra_repr(self) -> str:
        number = f"layer_number={self.layer_number}, " if self.layer_number is not None else ""
        return f"{number}hidden_dropout={self.hidden_dropout}, parallel_attention_mlp={self.parallel_attention_mlp}"
