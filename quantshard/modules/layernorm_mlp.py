"""LayerNormLinear and LayerNormMLP: a normalization and the linear layers after it in one module.

The activation of the MLP runs in float32 and is rounded once. Backward keeps only its input, unchanged or in 8 bits
(`activation_storage`). A gated activation (GLU) computes `act(gate) * up` from the outputs of two weights. They are two
parameters rather than halves of one, so that tensor parallelism shards each of them and each has its own block grid.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from quantshard import kernel_dispatch, kernels, limits, private_torch
from quantshard.distributed import tensor_parallel
from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules import fused
from quantshard.modules.activation_storage import AS_IS, HIGH_PRECISION, STORAGES, ActivationStorage, check_storage
from quantshard.modules.base.initialization import InitMethod
from quantshard.modules.base.module import QuantizedModule, by_own_recipe
from quantshard.modules.base.projections import Projection, split_sizes
from quantshard.modules.contexts import context, recompute, settings
from quantshard.modules.gemms import compiled
from quantshard.modules.gemms.functional import RecomputedInput
from quantshard.modules.norm import Normalization
from quantshard.tensor import component_loading

if kernels.USABLE:
    from quantshard.kernels.fused import activation as activation_kernel, epilogue

_QGELU = 1.702  # x * sigmoid(1.702 x), the quick approximation of gelu


class ActivationFunction(NamedTuple):
    """An elementwise function and its gradient: (gradient of the output, input) -> gradient of the input."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


def _qgelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(_QGELU * x)
    return dy * (s + _QGELU * x * s * (1 - s))


class ClampedSwiGLU(NamedTuple):
    """The activation of gpt-oss: g * sigmoid(alpha g) * (clamp(up, -limit, limit) + glu_linear_offset), where g is
    min(gate, limit)."""

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0

    def value(self, x: Tensor) -> Tensor:
        """Return the factor of the gate."""
        x = x.clamp(max=self.limit)
        return x * torch.sigmoid(self.alpha * x)

    def gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the gate x. `dy`: gradient of `value`."""
        gate = x.clamp(max=self.limit)
        s = torch.sigmoid(self.alpha * gate)
        return dy * (s + self.alpha * gate * s * (1 - s)) * (x <= self.limit)


Activation = str | ClampedSwiGLU
"""One of `ACTIVATIONS`; a clamped SwiGLU with its parameters."""

_CURVES = {
    "gelu": ActivationFunction(
        lambda x: F.gelu(x, approximate="tanh"),  # TransformerEngine's gelu is the tanh form
        lambda dy, x: torch.ops.aten.gelu_backward.default(dy, x, approximate="tanh"),
    ),
    # a slope of 0 would hide NaN inputs
    "relu": ActivationFunction(F.relu, lambda dy, x: dy * torch.where(x.isnan(), x, (x > 0).to(x.dtype))),
    "silu": ActivationFunction(F.silu, torch.ops.aten.silu_backward.default),
    "srelu": ActivationFunction(lambda x: F.relu(x).square(), lambda dy, x: dy * 2 * F.relu(x)),
    "qgelu": ActivationFunction(lambda x: x * torch.sigmoid(_QGELU * x), _qgelu_gradient),
    "sigmoid": ActivationFunction(
        torch.sigmoid, lambda dy, x: torch.ops.aten.sigmoid_backward.default(dy, torch.sigmoid(x))
    ),
}
_GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu", "sreglu": "srelu", "qgeglu": "qgelu", "glu": "sigmoid"}
CLAMPED = "clamped_swiglu"
ACTIVATIONS = (*(name for name in _CURVES if name != "sigmoid"), *_GATED)
"""Activations without parameters, which kernels compute."""


def is_gated(activation: str) -> bool:
    return activation in _GATED or activation == CLAMPED


def activate(x: Tensor, activation: Activation, up: Tensor | None = None) -> Tensor:
    """Apply one of `ACTIVATIONS` to x [...], in its dtype; a gated one multiplies by `up`, of the same shape."""
    return cast(Tensor, _Activation.apply(x, up, activation, AS_IS))


def activate_stored(
    x: Tensor, activation: Activation, up: Tensor | None, storage: ActivationStorage
) -> tuple[Tensor, RecomputedInput]:
    """Apply `activate`, keeping its inputs as `storage` does. Also return how to recompute the result from those."""
    if storage is not AS_IS:
        storage = storage.for_backward(x, up)
    tensors = storage.keep((x, up))
    recomputed = RecomputedInput(partial(_activate_again, activation, storage, x.dtype), tuple(tensors))
    if storage is AS_IS:
        return activate(x, activation, up), recomputed
    return cast(Tensor, _Activation.apply(x, up, activation, storage, *tensors)), recomputed


def _activate_again(activation: Activation, storage: ActivationStorage, dtype: torch.dtype, *kept: Tensor) -> Tensor:
    gate, *up = storage.values(list(kept), dtype)
    return activate(gate, activation, *up)


def _has_kernels(x: Tensor, up: Tensor | None, activation: Activation) -> bool:
    same_layout = up is None or (up.shape == x.shape and up.dtype == x.dtype)
    return isinstance(activation, str) and same_layout and kernel_dispatch.has_float_kernels(x, up)


def _curve(activation: Activation) -> ActivationFunction | ClampedSwiGLU:
    if isinstance(activation, ClampedSwiGLU):
        return activation
    return _CURVES[_GATED.get(activation, activation)]


def _factor(up: Tensor, activation: Activation) -> Tensor:
    """Return what a gated activation multiplies its gate by."""
    if isinstance(activation, ClampedSwiGLU):
        return up.float().clamp(-activation.limit, activation.limit) + activation.glu_linear_offset
    return up.float()


def _gradients(dy: Tensor, x: Tensor, up: Tensor | None, activation: Activation) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and up."""
    curve, dy, high = _curve(activation), dy.float(), x.float()
    if up is None:
        return curve.gradient(dy, high).to(x.dtype), None
    dup = dy * curve.value(high)
    if isinstance(activation, ClampedSwiGLU):
        dup = dup * (up.abs() <= activation.limit)
    return curve.gradient(dy * _factor(up, activation), high).to(x.dtype), dup.to(up.dtype)


def _value(x: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    out = _curve(activation).value(x.float())
    return private_torch.cast(out if up is None else out * _factor(up, activation), x.dtype)


def _value_by_kernel(x: Tensor, up: Tensor | None, activation: str) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gate, up_rows = epilogue.matrix(x), None if up is None else epilogue.matrix(up)
    outputs = epilogue.KernelOutputs(high=epilogue.matrix(out))
    activation_kernel.activate_and_quantize(gate, activation, up_rows, outputs)
    return out


def _gradients_by_kernel(dy: Tensor, x: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor | None]:
    dh, gate, up_rows = epilogue.matrix(dy), epilogue.matrix(x), None if up is None else epilogue.matrix(up)
    dx = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = None if up_rows is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    into_x, into_up = epilogue.KernelOutputs(high=dx), None if dup is None else epilogue.KernelOutputs(high=dup)
    activation_kernel.activate_backward_and_quantize(dh, gate, activation, up_rows, into_x, into_up)
    return dx.view(x.shape), None if dup is None else dup.view(x.shape)


class _Activation(torch.autograd.Function):
    """An activation whose backward reads its inputs from `kept`, as a storage keeps them (default: the inputs)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor | None, activation: Activation, storage: ActivationStorage, *kept: Tensor
    ) -> Tensor:
        ctx.activation, ctx.storage, ctx.shape, ctx.dtype = activation, storage, x.shape, x.dtype
        by_kernel = _has_kernels(x, up, activation)
        if by_kernel:
            x, up = private_torch.plain(x), None if up is None else private_torch.plain(up)
        ctx.save_for_backward(*(kept or (x, up)))
        if by_kernel:
            return _value_by_kernel(x, up, cast(str, activation))
        return _value(x, up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *ups = tensors = list(ctx.saved_tensors)
        no_gradients = [None] * len(ctx.needs_input_grad[2:])
        if ctx.storage.spec is not None:
            if torch.is_grad_enabled():
                raise UnsupportedOperationError(limits.refusal("derivative of codes", f"activation {ctx.activation!r}"))
            x, *ups = (value.view(ctx.shape) for value in ctx.storage.values(tensors, ctx.dtype))
        up = ups[0] if ups else None
        # with create_graph=True: kernels have no derivative
        if torch.is_grad_enabled() or not _has_kernels(x, up, ctx.activation):
            return *_gradients(grads[0], x, up, ctx.activation), *no_gradients
        return *_gradients_by_kernel(private_torch.plain(grads[0]), x, up, ctx.activation), *no_gradients


class _NormedModule(QuantizedModule):
    """Base of modules that start with a normalization."""

    return_bias: bool
    return_layernorm_output: bool
    return_layernorm_output_gathered: bool

    def _with_extras(
        self, out: Any, layer: Projection, dtype: torch.dtype, normed: Tensor | None, totals: tuple[Tensor, ...] = ()
    ) -> Any:
        """The output alone, or with the bias of its layer, the normalized input and `totals`."""
        extras: tuple[Tensor | None, ...] = (self._joined_bias(layer, dtype),) if self.return_bias else ()
        if normed is not None and self.return_layernorm_output:
            if self.return_layernorm_output_gathered and self.sequence_parallel:
                # the gradient is whole on each rank
                normed = tensor_parallel.join_rows(normed, self.tensor_parallel_of(None))
            extras += (normed,)
        extras += totals
        return (out, *extras) if extras else out


class LayerNormLinear(_NormedModule):
    """A normalization followed by a linear layer: y = norm(x) @ weight^T + bias.

    The normalization runs in high precision, the GEMMs run as in `Linear`. Parameters: `layer_norm_weight`,
    `layer_norm_bias` (None for RMSNorm), `weight` [out_features, in_features], stored quantized under
    `quantized_model_init`, and `bias` (None without bias).

    Args:
        eps: constant added to the variance (LayerNorm) or the mean square (RMSNorm).
        normalization: "LayerNorm" or "RMSNorm".
        return_bias: return the bias after the output instead of adding it.
        return_layernorm_output: also return the normalized input, as the last result.
        return_layernorm_output_gathered: under sequence parallelism, gather the returned normalized input.
        parallel_mode: "column" or None; see `Linear`.
        zero_centered_gamma: multiply by 1 + layer_norm_weight, with a weight initialized to 0.
        in_features, out_features, init_method, bias, params_dtype, parameters_split, separate_outputs: see `Linear`.
        device, name, fuse_wgrad_accumulation, delay_wgrad_compute: see `Linear`.
        tp_group, tp_size, sequence_parallel, tp_mesh: see `module_meshes.TensorParallelConfig`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        separate_outputs: bool = False,
        zero_centered_gamma: bool = False,
        return_layernorm_output_gathered: bool = False,
        parallel_mode: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        if parallel_mode == "row":
            raise ConfigurationError("LayerNormLinear(parallel_mode='row'): a norm needs all features; use 'column'")
        super().__init__(device, params_dtype, TensorParallelConfig(tp_group, tp_size, sequence_parallel, tp_mesh))
        self.in_features, self.out_features, self.name = in_features, out_features, name
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output, self.separate_outputs = return_layernorm_output, separate_outputs
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.normalization = Normalization(normalization, in_features, eps, zero_centered_gamma)
        self.normalization.add_parameters(self, "layer_norm_")
        sizes = split_sizes("LayerNormLinear", out_features, parameters_split)
        self._layer = self._add_projection(sizes, in_features, init_method, bias, mode=parallel_mode)
        self._set_wgrad_options(fuse_wgrad_accumulation, delay_wgrad_compute)

    @by_own_recipe
    def forward(self, inp: Tensor) -> Any:
        """Apply the layer: [..., in_features] -> [..., out_features], in the input's dtype or the dtype of
        `torch.autocast`.

        With `return_bias` or `return_layernorm_output` the result is a tuple: output, bias, normalized input. Errors:
        see `Linear.forward`.
        """
        inp = self._input(inp)
        front, normed = fused.front(self, self.normalization, inp), None
        layer = self._prepare(self._layer, inp.shape, inp.device, with_bias=not self.return_bias)
        if not self.return_layernorm_output and fused.fits(front, layer):
            outputs: Sequence[Tensor] = fused.norm_linear(front, layer)[0]
        else:
            normed, _ = front.normalized()
            outputs = self._project(normed, self._layer, with_bias=not self.return_bias, prepared=layer)
        out = self._joined(outputs, self.separate_outputs)
        return self._with_extras(out, self._layer, inp.dtype, normed)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}{self._formats_repr()}"
        )


class LayerNormMLP(_NormedModule):
    """A normalization and a two-layer MLP: y = act(norm(x) @ fc1_weight^T + fc1_bias) @ fc2_weight^T + fc2_bias.

    Parameters: `layer_norm_weight`, `layer_norm_bias` (None for RMSNorm), `fc1_weight` [ffn_hidden_size, hidden_size],
    `fc1_bias`, `fc2_weight` [hidden_size, ffn_hidden_size], `fc2_bias` (biases are None without bias). A gated
    activation has `fc1_gate_weight`, which feeds the activation, and `fc1_up_weight`, with their biases, in place of
    fc1's. TransformerEngine's `fc1_weight`, gate over up, can be read and loaded from state dicts.

    Weights are stored quantized under `quantized_model_init`. Delayed scaling adds the amax histories `fc1_...` and
    `fc2_...`.

    Args:
        hidden_size: size of the last dim of input and output.
        ffn_hidden_size: features between the two linear layers.
        init_method: function that fills each full (unsharded) fc1 weight in place. Default: N(0, 0.023**2), drawn by
            global element index.
        activation: "gelu" (the tanh approximation, as in TransformerEngine), "relu", "silu", "srelu" (relu squared),
            "qgelu" (x * sigmoid(1.702 x)), or one of the gated "geglu", "reglu", "swiglu", "sreglu", "qgeglu",
            "glu" (sigmoid(gate) * up) and "clamped_swiglu" (of gpt-oss; computed without kernels).
        activation_params: of "clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}.
        output_layer_init_method: `init_method` for fc2_weight.
        return_bias: return fc2_bias after the output instead of adding it.
        set_parallel_mode: let tensor parallelism shard the weights: fc1 by columns, fc2 by rows.
        recompute_activation: recompute and requantize the activation in backward instead of keeping its quantized
            result, with kernels the normalization too. This saves `ffn_hidden_size` bytes per token in FP8 and needs no
            extra GEMM. Gradients keep the same bits. The option has no effect in high precision, or if `torch.compile`
            traces a module that returns the normalized input.
        checkpoint: keep only the module's input for backward, and recompute the rest.
        activation_storage: format in which the inputs of the activation (gate and up, the outputs of fc1) are kept for
            backward. "high_precision" keeps them unchanged. "fp8" keeps E4M3 codes with a float32 scale for each 128
            features of a token: 1.03 bytes per element instead of 2 or 4. Outputs have the same bits; for the error of
            gradients see `modules/activation_storage.py`. With `recompute_activation` the gradient of fc2's weight is
            computed from the codes too.
        eps, normalization, zero_centered_gamma, return_layernorm_output, return_layernorm_output_gathered: see
            `LayerNormLinear`.
        bias, params_dtype, device, name, fuse_wgrad_accumulation, delay_wgrad_compute: see `Linear`.
        tp_group, tp_size, sequence_parallel, tp_mesh: see `module_meshes.TensorParallelConfig`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        output_layer_init_method: InitMethod | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        recompute_activation: bool = False,
        checkpoint: bool = False,
        activation_params: Mapping[str, float] | None = None,
        activation_storage: str = HIGH_PRECISION,
        return_layernorm_output_gathered: bool = False,
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        if activation not in (*ACTIVATIONS, CLAMPED):
            names = ", ".join((*ACTIVATIONS, CLAMPED))
            raise ConfigurationError(f"LayerNormMLP(activation={activation!r}) is not known; use one of: {names}")
        if set(activation_params or ()) - set(ClampedSwiGLU._fields if activation == CLAMPED else ()):
            raise ConfigurationError(f"LayerNormMLP: only {CLAMPED!r} has activation_params: {ClampedSwiGLU._fields}")
        check_storage("LayerNormMLP", activation_storage)
        super().__init__(device, params_dtype, TensorParallelConfig(tp_group, tp_size, sequence_parallel, tp_mesh))
        self.hidden_size, self.ffn_hidden_size, self.name = hidden_size, ffn_hidden_size, name
        self.use_bias, self.return_bias, self.activation = bias, return_bias, activation
        self._function = ClampedSwiGLU(**(activation_params or {})) if activation == CLAMPED else activation
        self.recompute_activation, self.activation_storage = recompute_activation, activation_storage
        self.checkpoint = checkpoint
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.normalization = Normalization(normalization, hidden_size, eps, zero_centered_gamma)
        self.normalization.add_parameters(self, "layer_norm_")
        gated = ("fc1_gate_", "fc1_up_") if is_gated(activation) else ("fc1_",)
        if is_gated(activation):
            kinds = ("weight", "bias") if bias else ("weight",)
            self.stacked_names = {f"fc1_{kind}": tuple(part + kind for part in gated) for kind in kinds}
        modes = ("column", "row") if set_parallel_mode else (None, None)
        fc1_sizes = dict.fromkeys(gated, ffn_hidden_size)
        self._fc1 = self._add_projection(fc1_sizes, hidden_size, init_method, bias, prefix="fc1_", mode=modes[0])
        self._fc2 = self._add_projection(
            {"fc2_": hidden_size}, ffn_hidden_size, output_layer_init_method, bias, prefix="fc2_", mode=modes[1]
        )
        self._set_wgrad_options(fuse_wgrad_accumulation, delay_wgrad_compute)

    def __getattr__(self, name: str) -> Any:
        parts = vars(self).get("stacked_names", {}).get(name)
        if parts is None:
            return super().__getattr__(name)
        with torch.inference_mode():  # such tensors refuse writes, which would be lost
            return torch.cat([getattr(self, part) for part in parts])

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name in vars(self).get("stacked_names", {}):
            parts = " and ".join(self.stacked_names[name])
            raise UnsupportedOperationError(f"LayerNormMLP.{name} of a gated activation: assign {parts}")
        super().register_parameter(name, param)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(component_loading.split_stacked(self, state_dict, prefix), prefix, *args)

    def is_traced(self, setting: str, inp: Tensor) -> bool:
        is_fused = settings.quantizes(setting) and not self.return_layernorm_output and isinstance(self._function, str)
        return (is_fused or self.activation_storage == HIGH_PRECISION) and super().is_traced(setting, inp)

    @by_own_recipe
    def forward(self, inp: Tensor, *, residual: Tensor | None = None) -> Tensor | tuple[Tensor | None, ...]:
        """Apply the MLP: [..., hidden_size] -> the same shape and dtype, or the dtype of `torch.autocast`.

        With `return_bias`, `return_layernorm_output` or `residual` the result is a tuple: output, fc2_bias, normalized
        input, residual + inp. Errors: see `Linear.forward`.

        Args:
            inp: the input.
            residual: tensor of the input's shape, added to the input before the normalization, in the same kernel.
        """
        if self.checkpoint and torch.is_grad_enabled():
            return cast(Any, recompute.checkpoint(self._forward, inp, residual))
        return self._forward(inp, residual)

    def _forward(self, inp: Tensor, residual: Tensor | None) -> Any:
        inp = self._input(inp)
        residual = None if residual is None else context.autocast_input(residual)
        front, normed = fused.front(self, self.normalization, inp, residual), None
        fc1 = self._prepare(self._fc1, inp.shape, inp.device)
        hidden_shape = (*inp.shape[:-1], fc1.weights[0].shape[0])
        fc2 = self._prepare(self._fc2, hidden_shape, inp.device, with_bias=not self.return_bias)
        function = self._function
        if not self.return_layernorm_output and isinstance(function, str) and fused.fits(front, fc1, fc2):
            storage = STORAGES[self.activation_storage]
            out, total = fused.mlp(front, fc1, function, fc2, self.recompute_activation, storage)
        elif torch.compiler.is_compiling() and self.activation_storage != HIGH_PRECISION:
            return cast(Any, compiled.run_eagerly(LayerNormMLP.forward, self, inp, residual=residual))
        else:
            normed, total = front.normalized()
            storage = STORAGES[self.activation_storage]
            if storage is not AS_IS and self._fc1.mode is not None and self.tp_size > 1:
                storage = storage._replace(split=self.tensor_parallel_of(self._fc1.mode).split(1))
            first, *up = self._project(normed, self._fc1, prepared=fc1)
            hidden, recompute = activate_stored(first, self._function, up[0] if up else None, storage)
            source = recompute if self.recompute_activation else None
            (out,) = self._project(hidden, self._fc2, with_bias=not self.return_bias, prepared=fc2, recompute=source)
        return self._with_extras(out, self._fc2, inp.dtype, normed, () if total is None else (total,))

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.use_bias}, "
            f"activation={self.activation!r}, activation_storage={self.activation_storage!r}, "
            f"normalization={self.normalization}{self._formats_repr()}"
        )
