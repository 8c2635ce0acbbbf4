"""Adapter for TransformerEngine's arguments that quantshard lacks. They are listed by name, so that none is ignored.

Each entry lists the classes and methods that have the argument in TransformerEngine, its default, and the reason why it
is not supported. The default, None and False are accepted because they need nothing; any other value raises, unless the
argument is only a performance hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from quantshard.errors import ConfigurationError
from quantshard.modules import DotProductAttention

_Module = TypeVar("_Module", bound=nn.Module)


class UnsupportedArgument(NamedTuple):
    """An argument of TransformerEngine that is not supported.

    `default`: default in TransformerEngine. `reason`: why other values are rejected, and what to do instead. `hint`:
    whether the argument changes no result, so that all values are accepted.
    """

    default: Any
    reason: str
    hint: bool = False


_NO_OVERLAP = "the collectives of tensor parallelism are not overlapped with GEMMs; leave it out"
_NO_CONTEXT_PARALLEL = "context parallelism is not there; leave it out, and keep each sequence whole on its rank"
_NO_CROSS_ATTENTION = "there is no cross-attention; build it from Linear and DotProductAttention"
_NO_SLIDING_WINDOW = "there is no sliding window; use attn_mask_type='arbitrary' with a mask of the window"

_BLOCKS = ("LayerNormMLP", "MultiheadAttention", "TransformerLayer")
_LINEAR = ("Linear", "LayerNormLinear", *_BLOCKS)
_ATTENTION = ("MultiheadAttention", "TransformerLayer")
_ATTENTION_CALLS = ("DotProductAttention.forward", "MultiheadAttention.forward", "TransformerLayer.forward")

ARGUMENTS: dict[str, dict[str, UnsupportedArgument]] = {}
"""Class or method -> name -> unsupported argument of TransformerEngine."""


def _because(owners: Sequence[str], reason: str, /, *, hint: bool = False, **defaults: Any) -> None:
    """Add arguments and their defaults to `ARGUMENTS`; a later entry replaces an earlier one."""
    for owner in owners:
        arguments = {name: UnsupportedArgument(default, reason, hint) for name, default in defaults.items()}
        ARGUMENTS.setdefault(owner, {}).update(arguments)


_hints = partial(_because, hint=True)

# fmt: off
_because((*_LINEAR, "GroupedLinear", "DotProductAttention", "checkpoint"),
    "dropout draws from torch's generator; leave it out", get_rng_state_tracker=None)
_because((*_LINEAR, "GroupedLinear"), "gradients go to .grad, where autograd and FSDP2 look for them; leave it out",
    fuse_wgrad_accumulation=False, delay_wgrad_compute=False)
_because((*_LINEAR, "GroupedLinear"), _NO_OVERLAP, ub_overlap_ag=False, ub_overlap_rs=False)
_because(_LINEAR, _NO_OVERLAP, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False)
_because(["TransformerLayer"], _NO_OVERLAP, ub_tp_comm_overlap=False,  # the others have no effect without it
    ub_overlap_ag=True, ub_overlap_rs=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True)
_because(_LINEAR, "sums over ranks are those of the communication backend; leave it out", symmetric_ar_type=None)
_because(["Linear", "GroupedLinear"], "backward keeps what wgrad reads, quantized; leave it out",
    save_original_input=False)
_hints(["Linear", "GroupedLinear", "LayerNormLinear"], "there are no communication buffers to name", ub_name=None)
_hints(["Linear", "GroupedLinear"], "without get_rng_state_tracker it names nothing", rng_tracker_name=None)
_hints(_BLOCKS, "there is no JIT warm-up, so no shape is needed", seq_length=None, micro_batch_size=None)
_hints([f"{owner}.forward" for owner in (*_LINEAR, "GroupedLinear")],
    "weights that are not stored quantized are quantized in each forward, to the same codes", is_first_microbatch=None)
_because(["Linear.forward", "LayerNormLinear.forward"], "modules take and return high precision; leave it out",
    fp8_output=False, fp8_grad=False)

_because(["GroupedLinear"],
    "how many tokens an expert gets is the dispatcher's business; gather the tokens before the dispatch "
    "(quantshard.dispatch_tokens), and leave it out", sequence_parallel=False)
_because(["GroupedLinear"],
    "each expert has a weight of its own, so that it is sharded, saved and moved between ranks by itself; leave it out",
    single_grouped_weight=False, single_grouped_bias=False, use_grouped_tensor=None)
_because(["GroupedLinear.forward"], "results are new tensors; leave it out", out=None, dgrad_out=None)
_because(["LayerNormMLP", "TransformerLayer"], "only activations without parameters are there; leave it out",
    activation_params=None)
_because(["LayerNormMLP"], "recompute activations with quantshard.checkpoint around the module", checkpoint=False)

_because(["DotProductAttention", *_ATTENTION, *_ATTENTION_CALLS],
    "the mask type says it; use attn_mask_type='causal_bottom_right'", bottom_right_diagonal=None)
_because(["DotProductAttention", *_ATTENTION, *_ATTENTION_CALLS],
    "only the ordinary softmax is there; leave it out", softmax_type="vanilla")
_because(["DotProductAttention", "MultiheadAttention"], _NO_CROSS_ATTENTION, attention_type="self")
_because(["TransformerLayer"],
    f"{_NO_CROSS_ATTENTION}; for a decoder-only model use 'encoder', whose mask is causal by default",
    layer_type="encoder")
_hints(["DotProductAttention"], "the projections around it use it", sequence_parallel=False)
_because(["DotProductAttention"], _NO_CONTEXT_PARALLEL,
    cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p")
_because(["DotProductAttention"], "the largest logit is not returned; leave it out", return_max_logit=False)
_because(["DotProductAttention.forward"], "attention runs in high precision; leave it out",
    fp8_output=False, num_splits=1)
_because(_ATTENTION_CALLS, "there is no additive bias; leave it out",
    core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None)
_because(_ATTENTION_CALLS, "there is no cache of keys and values for generation; leave it out", inference_params=None)
_because(_ATTENTION_CALLS,
    "packed sequences ('thd') are not there; use attn_mask_type='padding' or 'arbitrary' with a mask",
    cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
    max_seqlen_kv=None, pad_between_seqs=None)
_because(_ATTENTION_CALLS, "there is no choice of how outputs are filled; leave it out", fast_zero_fill=True)
_because(["MultiheadAttention.forward", "TransformerLayer.forward"], _NO_CROSS_ATTENTION, encoder_output=None)

_because(["TransformerLayer"], _NO_CROSS_ATTENTION,
    enc_dec_attn_mask_type="no_mask", enc_dec_bottom_right_diagonal=None, enc_dec_window_size=None)
_because(["TransformerLayer.forward"], _NO_CROSS_ATTENTION, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None,
    enc_dec_bottom_right_diagonal=None, enc_dec_window_size=None)
_because(["TransformerLayer"],
    "residuals are taken before the normalization; compose MultiheadAttention and LayerNormMLP with "
    "return_layernorm_output=True for the other order", apply_residual_connection_post_layernorm=False)
_because(["TransformerLayer"], "there is no stochastic depth; leave it out", drop_path_rate=0.0)

_because(["checkpoint"],
    "the inputs of a checkpointed function are kept as they are; leave it out, or use sequence_parallel",
    distribute_saved_activations=False)
_hints(["checkpoint"], "it is the group to distribute saved activations over, and none are distributed", tp_group=None)
_because(["apply_rotary_pos_emb"], "there is no cache of keys and values for generation; slice freqs yourself",
    start_positions=None)
_because(["apply_rotary_pos_emb"], "there is one implementation; leave it out", fused=False)
_because(["apply_rotary_pos_emb"], "packed sequences ('thd') are not there; use 'sbhd' or 'bshd'", cu_seqlens=None)
_because(["apply_rotary_pos_emb"], _NO_CONTEXT_PARALLEL, cp_size=1, cp_rank=0)
# fmt: on


class ModuleAdapter(nn.Module):
    """Mixin that gives a module of quantshard the arguments of its TransformerEngine counterpart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **supported(_owner(self), kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; see `supported`."""
        return super().forward(*args, **supported(f"{_owner(self)}.forward", kwargs))


class AttentionAdapter(ModuleAdapter):
    """`ModuleAdapter`, for modules that contain attention."""

    def __init__(self, *args: Any, window_size: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_window(_owner(self), window_size, None)

    def forward(self, *args: Any, window_size: Sequence[int] | None = None, **kwargs: Any) -> Any:
        """Run the module's forward; see `supported`."""
        mask_type = kwargs.get("attn_mask_type") or kwargs.get("self_attn_mask_type")
        self._check_window(f"{_owner(self)}.forward", window_size, mask_type)
        return super().forward(*args, **kwargs)

    def set_context_parallel_group(self, cp_group: Any, *args: Any, **kwargs: Any) -> None:
        """Raise unless the context-parallel group is None."""
        if cp_group is not None:
            raise ConfigurationError(f"{_owner(self)}.set_context_parallel_group: {_NO_CONTEXT_PARALLEL}")

    def _check_window(self, owner: str, window_size: Sequence[int] | None, mask_type: str | None) -> None:
        """Raise for a sliding window. (-1, -1) means no window, and so does (-1, 0) with a causal mask."""
        if window_size is None or tuple(window_size) == (-1, -1):
            return
        core = next(module for module in self.modules() if isinstance(module, DotProductAttention))
        if tuple(window_size) != (-1, 0) or "causal" not in (mask_type or core.attn_mask_type):
            raise ConfigurationError(f"{owner}(window_size={window_size}) is not supported: {_NO_SLIDING_WINDOW}")


class NormAdapter(nn.Module):
    """Mixin for LayerNorm and RMSNorm; the old names of two arguments are `hidden_size` and `dtype`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        shape = hidden_size if normalized_shape is None else normalized_shape
        super().__init__(shape, eps, bool(sequence_parallel), params_dtype or dtype, zero_centered_gamma, **kwargs)


def adapted(kind: type[_Module], adapter: type[nn.Module], path: str) -> type[_Module]:
    """Create a subclass of a module's class with an adapter, under the same name. `path`: the module that has it."""
    return type(kind.__name__, (adapter, kind), {"__module__": path, "__doc__": kind.__doc__})


def _owner(module: nn.Module) -> str:
    """Name of TransformerEngine's class, also for subclasses."""
    return next(kind.__name__ for kind in type(module).__mro__ if kind.__name__ in ARGUMENTS)


def supported(owner: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that quantshard's module takes. Arguments without an effect here are dropped."""
    table = ARGUMENTS.get(owner, {})
    for name, value in arguments.items():
        if name not in table or table[name].hint or value is None or value is False:
            continue
        if not isinstance(value, torch.Tensor) and value == table[name].default:
            continue
        text = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ConfigurationError(f"{owner}({name}={text}) is not supported: {table[name].reason}")
    return {name: value for name, value in arguments.items() if name not in table}
