"""Adapter for TransformerEngine's arguments that quantshard lacks. They are listed by name, so that none is ignored.

Each entry lists the classes, methods and functions that have the argument in TransformerEngine, its default there, and
what to do instead. The default and None are accepted because they need nothing; any other value raises, unless the
argument is only a performance hint.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import nn

from quantshard.errors import ConfigurationError
from quantshard.modules.base.module import QuantizedModule
from quantshard.recipe import Format, MMParams

_Module = TypeVar("_Module", bound=nn.Module)

LEAVE_OUT: Final = "leave it out"


class UnsupportedArgument(NamedTuple):
    """An unsupported argument: its default, what to do `instead`, and whether it is only a `hint` for performance."""

    default: Any
    instead: str = LEAVE_OUT
    hint: bool = False


_BLOCKS = ("LayerNormMLP", "MultiheadAttention", "TransformerLayer")
_LINEAR = ("Linear", "LayerNormLinear", *_BLOCKS)
_ALL_LINEAR = (*_LINEAR, "GroupedLinear")
_ATTENTION = ("MultiheadAttention", "TransformerLayer")
_ATTENTION_CALLS = ("DotProductAttention.forward", "MultiheadAttention.forward", "TransformerLayer.forward")
_BLOCK_RECIPES = ("Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
_RECIPES = ("DelayedScaling", "Float8CurrentScaling", *_BLOCK_RECIPES)

ARGUMENTS: dict[str, dict[str, UnsupportedArgument]] = {}
"""Class, method or function -> name -> unsupported argument of TransformerEngine."""


def _unsupported(owners: Sequence[str], instead: str = LEAVE_OUT, /, *, hint: bool = False, **defaults: Any) -> None:
    """Add arguments and their defaults to `ARGUMENTS`; a later entry replaces an earlier one."""
    for owner in owners:
        arguments = {name: UnsupportedArgument(default, instead, hint) for name, default in defaults.items()}
        ARGUMENTS.setdefault(owner, {}).update(arguments)


_hints = partial(_unsupported, hint=True)

# fmt: off
_unsupported((*_ALL_LINEAR, "DotProductAttention", "checkpoint"), get_rng_state_tracker=None)
_unsupported(_ALL_LINEAR, ub_overlap_ag=False, ub_overlap_rs=False)
_unsupported(_LINEAR, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, symmetric_ar_type=None)
_unsupported(["Linear.forward", "LayerNormLinear.forward"], fp8_output=False, fp8_grad=False)
_unsupported(["GroupedLinear"], "gather the tokens before quantshard.dispatch_tokens", sequence_parallel=False)
_unsupported(["GroupedLinear"], single_grouped_weight=False, single_grouped_bias=False, use_grouped_tensor=None)
_unsupported(["GroupedLinear.forward"], out=None, dgrad_out=None)

_unsupported(["DotProductAttention"], return_max_logit=False)
_unsupported(["DotProductAttention.forward"], fp8_output=False, num_splits=1)
_unsupported(_ATTENTION_CALLS, inference_params=None)

_unsupported(["TransformerLayer"], ub_tp_comm_overlap=False)

_unsupported(["checkpoint"], "use sequence_parallel", distribute_saved_activations=False)
_unsupported(["apply_rotary_pos_emb"], "pass the angles of this rank's tokens", cp_size=1, cp_rank=0)
_unsupported(["apply_rotary_pos_emb"], fused=False)
_unsupported(["make_graphed_callables"], "train with delayed scaling", calibrating=False, fp8_calibrating=False)
_unsupported(["make_graphed_callables"], "capture each pipeline stage by itself",
    _order=None, _num_layers_per_chunk=None)
_unsupported(["make_graphed_callables"], "run hooks before or after the call",
    pre_warmup_hook=None, post_warmup_hook=None, capture_time_hooks=None)
_unsupported(["make_graphed_callables"], retain_graph_in_backward=False, _reuse_graph_input_output_buffers=False,
    _input_output_aliases=None, capture_stream=None)

_unsupported(_RECIPES, fp8_dpa=False, fp8_mha=False)
_unsupported(_RECIPES, 'write a recipe.MixedRecipe, as MixedRecipe("mxfp8", dgrad="bf16", wgrad="bf16")',
    backward_override=None)
_unsupported(_BLOCK_RECIPES, fp8_format=Format.E4M3)
_unsupported(["DelayedScaling"], reduce_amax=True, interval=1, scaling_factor_compute_algo=None)
_unsupported(["DelayedScaling"], "write a recipe.TableRecipe, in which a missing entry stays in high precision",
    override_linear_precision=(False, False, False))
_unsupported(["Float8BlockScaling"], x_block_scaling_dim=1, w_block_scaling_dim=2, grad_block_scaling_dim=1,
    fp8_gemm_fprop=MMParams(), fp8_gemm_dgrad=MMParams(), fp8_gemm_wgrad=MMParams())
_unsupported(["MXFP8BlockScaling"], margin=0)
_unsupported(["NVFP4BlockScaling"], fp4_format=Format.E2M1, row_scaled_activation=False, nvfp4_4over6="none",
    nvfp4_4over6_e4m3_use_256="all", nvfp4_4over6_err_mode="MAE")

# without ub_tp_comm_overlap these have no effect
_hints(["TransformerLayer"], ub_overlap_ag=True, ub_overlap_rs=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True)
_hints(["Linear", "GroupedLinear", "LayerNormLinear"], ub_name=None)
# without get_rng_state_tracker it names nothing
_hints(["Linear", "GroupedLinear"], rng_tracker_name=None)
_hints(_BLOCKS, seq_length=None, micro_batch_size=None)
# weights that are not stored quantized are quantized in each forward, to the same codes; see `ModuleAdapter.forward`
_hints([f"{owner}.forward" for owner in _ALL_LINEAR], is_first_microbatch=None)
# the smaller of the input and its codes is kept anyway, unless others keep the input
_hints(["Linear", "GroupedLinear"], save_original_input=None)
_hints(["make_graphed_callables"],
    cache_quantized_params=False, fp8_weight_caching=False, _clone_param_grads_on_return=True)
_hints(_ATTENTION_CALLS, fast_zero_fill=True)
# the projections around it use it
_hints(["DotProductAttention"], sequence_parallel=False)
_hints(["checkpoint"], tp_group=None)
# fmt: on


class ModuleAdapter(nn.Module):
    """Mixin that gives a module of quantshard the arguments of its TransformerEngine counterpart."""

    _runs_first_microbatch = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **supported(_owner(self), kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; see `supported`. Gradients of a first micro-batch overwrite `main_grad`."""
        is_first = kwargs.get("is_first_microbatch") is True
        for module in self.modules() if is_first is not self._runs_first_microbatch else ():
            if isinstance(module, QuantizedModule):
                module.overwrites_main_grad = is_first
        self._runs_first_microbatch = is_first
        return super().forward(*args, **supported(f"{_owner(self)}.forward", kwargs))


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
    """Return the arguments that quantshard takes. Arguments without an effect here are dropped."""
    table = ARGUMENTS.get(owner, {})
    for name, value in arguments.items():
        if name not in table or table[name].hint or value is None:
            continue
        default = table[name].default
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor and (value == default or (value is False and default is None)):
            continue
        text = f"a tensor {tuple(value.shape)}" if is_tensor else repr(value)
        raise ConfigurationError(f"{owner}({name}={text}) is not supported; {table[name].instead}")
    return {name: value for name, value in arguments.items() if name not in table}
