"""Base class of modules with weights. Its neighbors have the functions for initialization, state dicts and checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from quantshard import limits, private_torch
from quantshard.collectives.process_groups import Group
from quantshard.distributed import module_meshes, tensor_parallel
from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.distributed.tensor_parallel import TensorParallel
from quantshard.errors import ConfigurationError
from quantshard.gemm import predictions
from quantshard.modules.base import checks, initialization, state_dict
from quantshard.modules.base.assignment import AssignableModule
from quantshard.modules.base.initialization import InitMethod, WeightSpec
from quantshard.modules.base.projections import Projection
from quantshard.modules.contexts import context, recompute, settings
from quantshard.modules.contexts.context import InitPlan
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms import compiled, functional, graph_state, linear_state
from quantshard.modules.gemms.compiled import TracedLinear
from quantshard.modules.gemms.functional import PreparedLinear
from quantshard.modules.gemms.linear_state import LayerPlans, LinearState
from quantshard.modules.gemms.shared_input import InputReader
from quantshard.modules.gemms.weight_gradients import WgradModule
from quantshard.recipe import Recipe, resolve, stock_name
from quantshard.tensor import components, moves, parameter_state
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage

_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def by_own_recipe(forward: _Forward) -> _Forward:
    """Decorate the forward of a `QuantizedModule` to run under the module's own recipe, if there is one."""

    @functools.wraps(forward)
    def inside(self: QuantizedModule, inp: Tensor, *args: Any, **kwargs: Any) -> Any:
        own_autocast = None if self.recipe is None and self.model_recipe is None else self.own_autocast()
        if torch.compiler.is_compiling() and not self.is_traced(compiled.setting_in(own_autocast), inp):
            return compiled.run_eagerly(inside, self, inp, *args, **kwargs)
        if own_autocast is None:
            return forward(self, inp, *args, **kwargs)
        with own_autocast:
            return forward(self, inp, *args, **kwargs)

    return cast(_Forward, inside)


class QuantizedModule(WgradModule, AssignableModule):
    """Base of modules with quantized or high-precision weights. Subclasses call `_add_projection` and `add_vector`.

    `recipe`: recipe of its GEMMs inside an autocast that quantizes; None uses the recipe of that autocast.
    `model_recipe`: recipe of its GEMMs outside of every autocast; None dequantizes the weights there.
    `shared_input`: reader of an input that layers of other modules read too, or None.
    `zero_centered_gammas`: names of the parameters that are stored as gamma - 1.
    `_born_states`: the initial state of each weight, live only for weights in high precision.
    `_cuts`: the dim that tensor parallelism cuts of each parameter, or None.
    `_awaits_values`: whether the module was built on the meta device and has no values yet.
    """

    recipe: str | Recipe | None = None
    model_recipe: str | Recipe | None = None
    shared_input: InputReader | None = None
    zero_centered_gammas: tuple[str, ...] = ()
    _awaits_values = False

    def __init__(
        self,
        device: torch.device | str | None,
        params_dtype: torch.dtype | None,
        parallelism: TensorParallelConfig = TensorParallelConfig(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        self._device = torch.device(device) if device is not None else initialization.default_device()
        self._cuts: dict[str, int | None] = {}
        self._asked, self.sequence_parallel = parallelism, parallelism.sequence_parallel
        self.tp_mesh = parallelism.mesh(self._device)
        self._from_group = self.tp_mesh is not None and parallelism.tp_mesh is None
        self.use_bias = False
        self._plan = context.init_plan()
        self._dtype = params_dtype or torch.get_default_dtype()
        checks.check_dtype(f"{type(self).__name__}.params_dtype", self._dtype)
        self._weights: dict[str, WeightSpec] = {}
        self._vectors: dict[str, float] = {}
        self._born_states: dict[str, dict[str, Tensor]] = {}
        self._history_prefixes: list[str] = []
        self._awaits_values = self._device.type == "meta"
        self._handle, self.gemm_plans = graph_state.handle(self, self._device), LayerPlans()

    # Initialization --------------------------------------------------------------------------------------------------

    def _add_projection(
        self, sizes: Mapping[str, int], in_features: int, init_method: InitMethod | None, bias: bool, *,
        prefix: str = "", suffix: str = "", mode: str | None = None,
    ) -> Projection:  # fmt: skip
        """Register the parameters of a linear layer; `sizes` maps the name of each part to its out_features."""
        tensor_parallel.check_mode(type(self).__name__, mode, self.sequence_parallel)
        projection = Projection(tuple(sizes), prefix, mode, suffix)
        cut, bias_cut = {None: (None, None), "column": (0, 0), "row": (1, None)}[mode]
        for weight, name, size in zip(projection.weights, projection.biases, sizes.values(), strict=True):
            self._add_weight(weight, WeightSpec((size, in_features), init_method), cut)
            if bias:
                self.add_vector(name, size, 0.0, bias_cut)
            else:
                self.register_parameter(name, None)
        self._history_prefixes.append(prefix)
        initialization.make_histories(self, self._plan.recipe, prefix)
        return projection

    def _add_weight(self, name: str, spec: WeightSpec, cut: int | None = None) -> None:
        """Register a weight, and fill it unless it is on meta. `cut`: dim that tensor parallelism splits, or None."""
        checks.check_cut(self, name, spec.shape, cut)
        self._weights[name], self._cuts[name] = spec, cut
        quant_spec = self._plan.recipe.weight
        state = parameter_state.weight_state(quant_spec, self._device)
        stored_spec = quant_spec if self._plan.quantize else None
        self._born_states[name] = state if stored_spec is None else {key: value.clone() for key, value in state.items()}
        param = initialization.empty_weight(self, name, stored_spec, state, self._dtype, self._device)
        self.register_parameter(name, param)
        if not self.get_parameter(name).is_meta:
            initialization.fill(self, [name])

    def add_vector(self, name: str, size: int, fill: float, cut: int | None = None) -> None:
        """Register a 1-D high-precision parameter that is initialized to the constant `fill`."""
        checks.check_cut(self, name, (size,), cut)
        self._vectors[name], self._cuts[name] = fill, cut
        param = nn.Parameter(torch.full((size,), fill, dtype=self._dtype, device=self._device))
        if self.tp_mesh is not None:
            param = module_meshes.shard_parameter(param, self.tp_mesh, cut)
        self.register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Fill all parameters with their initial values, also after `fully_shard` and from the meta device.

        Parameters on the meta device are materialized on the device of their mesh (or the current accelerator).
        A second call gives the same bits. This is a collective call if parameters are sharded.
        """
        initialization.reset(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        """Move or cast, as `.to()` and `.half()` do. Amax histories stay float32; RNG counters move along."""
        before = dict(self.named_buffers(recurse=False))
        sharded = [param for param in self.parameters(recurse=False) if isinstance(param, DTensor)]
        with private_torch.set_aside(self, QuantizedTensor) as quantized, moves.attributes_kept(sharded):
            super()._apply(fn, recurse)
        for param in quantized:
            moves.move_parameter(param, fn)
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            if buffer.is_meta and not moved.is_meta:
                moved.zero_()  # to_empty leaves memory uninitialized, and a checkpoint need not have this buffer
            elif name.endswith(tuple(linear_state.HISTORIES.values())) and moved.dtype != buffer.dtype:
                self.register_buffer(name, buffer.to(moved.device))
        for name, state in self.plain_states.items():
            parameter_state.move_draws(state, private_torch.local_tensor(getattr(self, name)).device)
        self._handle = graph_state.handle_beside(self, self._handle)
        for name, param in self.named_parameters(recurse=False):
            checks.check_dtype(f"{type(self).__name__}.{name}", param.dtype)
        return self

    # Recipe ----------------------------------------------------------------------------------------------------------

    def is_traced(self, setting: str, inp: Tensor) -> bool:
        """Return whether graphs of torch.compile contain this module's forward, in an autocast of this setting."""
        weights = private_torch.registered_parameters(self, self._weights)
        return self.tp_size == 1 and not self.has_wgrad_options and compiled.can_trace(setting, inp, weights)

    def own_autocast(self) -> context.autocast | None:
        """The autocast that forward enters; None to use the enclosing one."""
        if self.model_recipe is not None and not context.in_autocast():
            return context.autocast(recipe=self.model_recipe)
        if self.recipe is None or not settings.quantizes(context.current_setting()) or context.runs_by(self.recipe):
            return None
        return context.autocast_by(self.recipe)

    def recipe_in(self, around: Recipe | None) -> Recipe | None:
        """The recipe of this module's GEMMs inside an autocast of recipe `around`. If None (unknown): the module's own
        recipe, or the one that its weights were quantized by."""
        if around is not None and not around.table:
            return around
        built_by = self._plan.recipe if around is None and self._plan.quantize else around
        return built_by if self.recipe is None else resolve(self.recipe)

    @torch.no_grad()
    def take_plan(self, plan: InitPlan, name: str, has_own_recipe: bool) -> None:
        """Convert in place to what `plan` would have built, keeping the current values.
        `name`: name of the module in the model. A collective call if tensor parallelism shards the module."""
        self._plan = plan
        if has_own_recipe:
            self.recipe = stock_name(plan.recipe) or plan.recipe
        for weight in self._weights:
            initialization.quantize_weight(self, weight, name)
        for prefix in self._history_prefixes:
            initialization.make_histories(self, plan.recipe, prefix)

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def plain_states(self) -> dict[str, dict[str, Tensor]]:
        """Live state of the weights that are not quantized."""
        states = self._born_states.items()
        return {name: s for name, s in states if components.quantized_local(getattr(self, name)) is None}

    def weight_state(self, name: str) -> dict[str, Tensor]:
        """Live RNG key, RNG counter and amax history of a weight."""
        (param,) = private_torch.parameters_or_values(self, (name,))
        local = param if isinstance(param, QuantizedTensor) else components.quantized_local(param)
        return self._born_states[name] if local is None else local.quantized_storage.state

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers; see `state_dict.component_buffers`."""
        return chain(super().named_buffers(*args, **kwargs), state_dict.component_buffers(self))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # `save_weights` replaces the weights, so detaching them here would be wasted
        super()._save_to_state_dict(destination, prefix, keep_vars=True)
        state_dict.save_weights(self, destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, entries: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        rest = state_dict.load_weights(self, entries, prefix, local_metadata, missing_keys, error_msgs)
        if rest is not None:
            missing: list[str] = []
            super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
            missing_keys += [key for key in missing if key.removeprefix(prefix) not in self._weights]
        self._awaits_values = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # torch.distributed.checkpoint.state_dict resolves every state-dict key by attributes, and so does
            # transformers' get_parameter, which returns only instances of nn.Parameter
            for weight in self.__dict__.get("_weights", ()):
                if name.startswith(weight + "_"):
                    entry = state_dict.state_keys(self, weight).get(name.removeprefix(weight))
                    if entry is not None:
                        return entry if isinstance(entry, nn.Parameter) else nn.Parameter(entry, requires_grad=False)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; when FSDP2 swaps a sharded parameter for an unsharded one or back, keep its attributes.
        FSDP2 calls this method several times a step because the class defines it, so swaps take a short path."""
        old = self.__dict__.get("_parameters", {}).get(name)
        sharded = isinstance(value, DTensor) or isinstance(old, DTensor)
        is_swap = old is not None and sharded and isinstance(value, nn.Parameter)
        if is_swap and (name not in self._weights or components.quantized_local(value) is not None):
            private_torch.put_parameter(self, name, value)
            moves.carry_attributes(old, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        checks.check_stays(self, name, dict(self.named_parameters(recurse=False)).get(name))
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        checks.check_stays(self, name, None if name in self._weights else param)
        super().register_parameter(name, param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = graph_state.handle(self, self._handle.device)  # a copied module needs a new handle

    # Tensor parallelism ----------------------------------------------------------------------------------------------

    @property
    def tp_size(self) -> int:
        """Number of ranks that share the parameters of one copy of this module."""
        return self._asked.tp_size if self.tp_mesh is None else self.tp_mesh.size()

    def set_tensor_parallel_group(self, tp_group: Group) -> None:
        """Cut the parameters over a process group. For a module under FSDP2, use `set_device_mesh`."""
        if tp_group is not None:
            device = next((param.device for param in self.parameters(recurse=False)), torch.device("cpu"))
            self.set_device_mesh(module_meshes.mesh_of_group(tp_group, device))
            self._from_group = True

    def set_device_mesh(self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None:
        """Convert the parameters to DTensors on the tensor-parallel axis of a mesh; each rank keeps its shard.

        Call it before `fully_shard`, before `reset_parameters` of a module on the meta device, and before building the
        optimizer. `weight_mesh` is accepted for TransformerEngine and not used.
        """
        if tp_mesh is not None:
            module_meshes.put_on_mesh(self, tp_mesh)

    def tensor_parallel_of(self, mode: str | None) -> TensorParallel:
        """Return this module's tensor-parallel part for a layer cut by `mode`."""
        if self.tp_mesh is not None:
            return TensorParallel.of(self.tp_mesh.get_group(), mode, self.sequence_parallel)
        if self._asked.tp_size > 1 and mode is not None:
            raise ConfigurationError(f"{type(self).__name__} has tp_size={self.tp_size}; call set_device_mesh()")
        return tensor_parallel.NONE

    def whole_on_rows(self, *names: str) -> list[Any]:
        """Return replicated parameters that each rank applies to its rows, such as norms."""
        params = self._locals(names)
        if self.sequence_parallel and self.tp_mesh is not None:
            tp = self.tensor_parallel_of(None)
            params = [None if param is None else tensor_parallel.all_reduce_gradient(param, tp) for param in params]
        return params

    def _locals(self, names: Sequence[str]) -> list[Any]:
        """Return this rank's parts of parameters, None for missing ones; see `module_meshes.local_part`."""
        params = private_torch.parameters_or_values(self, names)
        for index, param in enumerate(params):
            if self.tp_mesh is not None or isinstance(param, DTensor):
                params[index] = module_meshes.local_part(self, names[index], param)
        return params

    # Use -------------------------------------------------------------------------------------------------------------

    def _project(
        self, x: Tensor, layer: Projection, *, with_bias: bool = True,
        prepared: PreparedLinear | TracedLinear | None = None, recompute: functional.RecomputedInput | None = None,
    ) -> Sequence[Tensor]:  # fmt: skip
        """Apply a linear layer under the current recipe: x [..., in_features] @ w^T + b for each weight.

        `prepared`: result of `_prepare` for this call, if there is one. `recompute`: recomputes x in backward, so that
        eager code does not save x; in compiled code the compiler decides.
        """
        x = self._input(x)
        prepared = prepared or self._prepare(layer, x.shape, x.device, with_bias=with_bias)
        if isinstance(prepared, TracedLinear):
            return compiled.traced_linear(x, prepared)
        return functional.linear(x, prepared, recompute, self.shared_input)

    def _input(self, x: Tensor) -> Tensor:
        """Check the input and cast it to the dtype that this module computes in."""
        if isinstance(x, DTensor) or not x.is_floating_point():
            raise checks.wrong_input(type(self).__name__, x, self._dtype)
        x = context.autocast_input(x)
        if x.dtype.itemsize > 2 and self._weights:
            weight = private_torch.registered_parameter(self, next(iter(self._weights)))
            # not _dtype: casts of the module do not update it
            if weight is not None and weight.dtype.itemsize < x.dtype.itemsize:
                checks.warn_of_wide_input(type(self).__name__, x.dtype, weight.dtype)
        return x

    def _prepare(
        self, layer: Projection, x_shape: Sequence[int], device: torch.device, *, with_bias: bool = True
    ) -> PreparedLinear | TracedLinear:
        """Prepare a layer for an input of this shape under the current recipe. Each call counts as a forward.
        While torch.compile traces, the result has the weights' names."""
        if torch.compiler.is_compiling():
            weights = [getattr(self, name) for name in layer.weights]
            biases = self._locals(layer.biases) if with_bias else [None] * len(weights)
            setting = context.current_setting()
            return TracedLinear(weights, biases, self._handle, layer.weights, layer.prefix, self.training, setting)
        computed = vars(type(self))  # parametrize creates a class per module, with a property for the weight
        if computed.keys().isdisjoint(layer.weights):
            return self._prepare_eager(layer, x_shape, device, with_bias)
        with parametrize.cached():  # the weight is read more than once; each read of spectral_norm is a power iteration
            return self._prepare_eager(layer, x_shape, device, with_bias)

    def _prepare_eager(
        self, layer: Projection, x_shape: Sequence[int], device: torch.device, with_bias: bool
    ) -> PreparedLinear:
        tensors = self._locals(layer.tensors if with_bias else layer.weights)
        weights, biases = tensors[: len(layer.weights)], tensors[len(layer.weights) :]
        quantized = any([isinstance(weight, QuantizedTensor) for weight in weights])
        call = recompute.linear_context((id(self), layer.weights), quantized, self.training)
        for name, weight in zip(layer.weights, weights, strict=True):
            self._check_weight(name, weight, call, device)
        if x_shape[-1] != weights[0].shape[1]:
            raise checks.wrong_features(self, layer.weights[0], weights[0].shape[1], x_shape, layer.mode)
        state = self._linear_state(layer.weights, call.recipe, layer.prefix)
        # a recomputed forward follows the first one, even if train() or eval() was called in between
        state.record = call.record and not (state.stage is not None and state.stage.infers)
        state.tp = self.tensor_parallel_of(layer.mode)
        state.wgrads = self._weight_gradients(layer.weights, weights) if self.has_wgrad_options else None
        return PreparedLinear(weights, biases or [None] * len(weights), call, state)

    @staticmethod
    def _joined(outputs: Sequence[Tensor], separate: bool) -> Tensor | Sequence[Tensor]:
        """The outputs of a layer in the form that its forward returns."""
        return outputs if separate else outputs[0] if len(outputs) == 1 else torch.cat(tuple(outputs), dim=-1)

    def _joined_bias(self, layer: Projection, dtype: torch.dtype) -> Tensor | None:
        """Bias of all parts of a layer, in `dtype`, for callers that add it themselves; None without a bias."""
        if not self.use_bias:
            return None
        biases = self.whole_on_rows(*layer.biases) if layer.mode == "row" else self._locals(layer.biases)
        return (biases[0] if len(biases) == 1 else torch.cat(biases, dim=-1)).to(dtype)

    def _check_weight(self, name: str, weight: Tensor, call: LinearContext, device: torch.device) -> None:
        recipe, storage = call.recipe, weight.quantized_storage if isinstance(weight, QuantizedTensor) else None
        if storage is None:
            if recipe.weight is not None and self.training and torch.is_grad_enabled():
                silencer = "warnings.filterwarnings('ignore', '.*requantized')"
                limits.warn("quantized each forward", self.label(name), silencer)
        else:
            if storage.gathered or (storage.version == 0 and not weight.is_meta):
                checks.check_values(self, name, storage)
            if storage.spec != recipe.weight and recipe.table and storage.spec.of_matrix != recipe.weight:
                raise checks.wrong_format(self.label(name), storage.spec, recipe)
            is_outside = not context.in_autocast() and self.training and torch.is_grad_enabled()
            if is_outside and not call.repeated:  # backward recomputes outside of the autocast of the first forward
                limits.warn("dequantized", self.label(name), "autocast(enabled=False)")
        if weight.is_meta and device.type != "meta":
            raise checks.no_values(self.label(name))
        if call.strict:
            checks.refuse_fallbacks(self.label(name), self._fallbacks(storage, recipe, device))

    def _fallbacks(self, storage: QuantizedStorage | None, recipe: Recipe, device: torch.device) -> tuple[str, ...]:
        return predictions.fallbacks(storage, recipe, device)

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState:
        """State of one linear layer of this module. Missing histories that the recipe needs are created."""
        return linear_state.linear_state(self, weights, recipe, prefix)

    def label(self, parameter: str) -> str:
        """A parameter's name in messages: that of the module if it has one, otherwise of its class."""
        return f"{getattr(self, 'name', None) or type(self).__name__}.{parameter}"

    def _formats_repr(self) -> str:
        """Formats of quantized weights for `extra_repr`, such as ", weight=mxfp8_32x32"."""
        weights = (private_torch.registered_parameter(self, name) for name in self._weights)
        tags = {storage.spec.tag for storage in map(components.quantized_storage, weights) if storage is not None}
        return f", weight={'/'.join(sorted(tags))}" if tags else ""
