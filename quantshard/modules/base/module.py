"""Base class of modules with weights: initialization, checkpointing and the linear layers that run on the weights.

A weight's initial values (`WeightSpec`) come from a counter-based generator, seeded by the parameter's key and indexed
by position in the global tensor. They do not depend on sharding, or on whether the module was built on the meta device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from quantshard import limits, numerics, private_torch
from quantshard.argument_kinds import CALLABLE, FLAG, check_kinds
from quantshard.collectives import flat_max
from quantshard.distributed import distribute, tensor_parallel
from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.errors import ConfigurationError, RecipeMismatchError, UnsupportedOperationError
from quantshard.gemm import hardware
from quantshard.modules.base import devices, inputs
from quantshard.modules.base.own_recipe import HISTORIES, RecipeModule
from quantshard.modules.base.projections import Projection, joined
from quantshard.modules.contexts import context, recompute
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms import compiled, functional, operator_arguments
from quantshard.modules.gemms.compiled import TracedLinear
from quantshard.modules.gemms.functional import PreparedLinear
from quantshard.modules.gemms.linear_state import LayerPlans, LinearState
from quantshard.modules.gemms.shared_input import InputReader
from quantshard.numerics import distributions
from quantshard.recipe import Recipe, TensorRole
from quantshard.tensor import components, observation, requantize
from quantshard.tensor import storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, INIT_STREAM, KEY

InitMethod = Callable[[Tensor], Any]
DEFAULT_STD = 0.023
"""Standard deviation of the default initialization, as in TransformerEngine."""

_PARAMS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MATERIALIZED = "quantshard_materialized"  # attribute of a meta parameter: the parameter that replaced it


@dataclass(frozen=True)
class WeightSpec:
    """Shape [out_features, in_features] and initialization of a weight.

    `init_method`: function that fills the whole tensor in place, with torch's generator seeded by the parameter's key.
    If None, values are drawn from N(0, `std`**2) by the counter-based generator, which never builds the whole tensor.
    """

    shape: tuple[int, int]
    init_method: InitMethod | None = None
    std: float = DEFAULT_STD

    def values(self, key: int, origin: tuple[int, int], shape: tuple[int, int], device: torch.device) -> Tensor:
        """Initial values of the rectangle at `origin` with `shape`, float32."""
        if self.init_method is None:
            words = numerics.random_words(key, 0, INIT_STREAM, self.shape, origin, shape, device=device)
            return distributions.normal(words) * self.std
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(key)  # torch.manual_seed would also seed the accelerators, unforked
            whole = torch.empty(self.shape, dtype=torch.float32, device="cpu")
            self.init_method(whole)
        return whole[origin[0] : origin[0] + shape[0], origin[1] : origin[1] + shape[1]].to(device)


class QuantizedModule(RecipeModule):
    """Base of modules with quantized or high-precision weights. Subclasses call `_add_projection` and `add_vector`.

    `shared_input`: reader of an input that the layers of other modules read too, or None.
    `zero_centered_gammas`: names of the parameters that are stored as gamma - 1.
    """

    shared_input: InputReader | None = None
    zero_centered_gammas: tuple[str, ...] = ()

    def __init__(
        self,
        device: torch.device | str | None,
        params_dtype: torch.dtype | None,
        parallelism: TensorParallelConfig = TensorParallelConfig(),  # noqa: B008 (frozen)
    ) -> None:
        self_device = torch.device(device) if device is not None else devices.default_device()
        super().__init__(parallelism, self_device)
        self.use_bias = False
        self._plan = context.init_plan()
        self._device = self_device
        self._dtype = params_dtype or torch.get_default_dtype()
        if self._dtype not in _PARAMS_DTYPES:
            raise ConfigurationError(
                f"{type(self).__name__}(params_dtype={params_dtype}): it is the dtype that weights stand for; choose "
                f"one of {', '.join(map(str, _PARAMS_DTYPES))}, and a recipe for what they are stored in"
            )
        self._weights: dict[str, WeightSpec] = {}
        self._vectors: dict[str, float] = {}
        self._born_states: dict[str, dict[str, Tensor]] = {}
        self._history_prefixes: list[str] = []
        self._awaits_values = self_device.type == "meta"
        self._handle, self._gemm_plans = operator_arguments.handle(self, self_device), LayerPlans()

    # Initialization --------------------------------------------------------------------------------------------------

    def _add_projection(
        self,
        sizes: Mapping[str, int],
        in_features: int,
        init_method: InitMethod | None,
        bias: bool,
        *,
        prefix: str = "",
        suffix: str = "",
        mode: str | None = None,
    ) -> Projection:
        """Register the parameters of a linear layer; `sizes` maps the name of each part to its out_features."""
        check_kinds(type(self).__name__, init_method=(CALLABLE.or_none, init_method), bias=(FLAG, bias))
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
        self._make_histories(prefix)
        return projection

    def _add_weight(self, name: str, spec: WeightSpec, cut: int | None = None) -> None:
        """Register a weight, quantized under `quantized_model_init`, and initialize it unless the device is meta.

        `cut`: dim that tensor parallelism splits, or None.
        """
        self._check_shape(name, spec.shape, cut)
        self._weights[name], self._cuts[name] = spec, cut
        cell = self._plan.recipe.weight
        state = storages.weight_state(cell, self._device)
        stored_cell = cell if self._plan.quantize else None
        self._born_states[name] = state if stored_cell is None else {key: value.clone() for key, value in state.items()}
        self.register_parameter(name, self._empty_weight(name, stored_cell, state, self._dtype, self._device))
        if not self.get_parameter(name).is_meta:
            self._fill([name])

    def add_vector(self, name: str, size: int, fill: float, cut: int | None = None) -> None:
        """Register a 1-D high-precision parameter that is initialized to the constant `fill`."""
        self._check_shape(name, (size,), cut)
        self._vectors[name], self._cuts[name] = fill, cut
        param = nn.Parameter(torch.full((size,), fill, dtype=self._dtype, device=self._device))
        if self.tp_mesh is not None:
            param = distribute.shard_parameter(param, self.tp_mesh, cut)
        self.register_parameter(name, param)

    def _check_shape(self, name: str, shape: tuple[int, ...], cut: int | None) -> None:
        if not all(hasattr(size, "__index__") and size >= 0 for size in shape):
            raise ConfigurationError(f"{type(self).__name__}.{name}: its sizes are {shape}; give whole numbers")
        if cut is not None and shape[cut] % self.tp_size:
            raise ConfigurationError(
                f"{type(self).__name__}.{name} {list(shape)}: tensor parallelism over {self.tp_size} ranks cuts dim "
                f"{cut}, and {shape[cut]} is not a multiple of {self.tp_size}; choose sizes that tp_size divides"
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all parameters with their initial values, also after `fully_shard` and from the meta device.

        Parameters on the meta device are materialized on the device of their mesh (or the current accelerator).
        A second call gives the same bits. This is a collective call if parameters are sharded.

        Raises:
            RankMismatchError: the RNG keys differ between ranks, so their shards would belong to different weights.
        """
        if private_torch.has_gathered_parameters(self):
            raise ConfigurationError(
                f"{type(self).__name__}.reset_parameters: FSDP holds this module's parameters gathered, and what is "
                "written to them is lost; call reshard() on the FSDP-wrapped module first"
            )
        self._materialize()
        self._fill(self._weights)
        for name, fill in self._vectors.items():
            private_torch.local_tensor(self.get_parameter(name)).fill_(fill)
        for buffer in self.buffers(recurse=False):
            buffer.zero_()
        self._awaits_values = False

    @torch.no_grad()
    def _fill(self, names: Iterable[str]) -> None:
        """Fill weights with their initial values. A collective call if they are sharded."""
        self._check_keys(names)
        quantized: list[tuple[Tensor, Tensor]] = []
        for name in names:
            param, state, spec = self.get_parameter(name), self.weight_state(name), self._weights[name]
            state[DRAWS].zero_()
            if AMAX_HISTORY in state:
                state[AMAX_HISTORY].zero_()
            local = private_torch.local_tensor(param)
            offset = private_torch.global_offset(param)
            origin = (
                local.quantized_storage.shard.origin if isinstance(local, QuantizedTensor) else (offset[0], offset[1])
            )
            shape = (local.shape[0], local.shape[1])
            values = spec.values(int(state[KEY]), origin, shape, local.device).to(self._dtype)
            if isinstance(local, QuantizedTensor):
                quantized.append((param, values))
            else:
                local.copy_(values)
        weights = [name for name in names if components.quantized_local(self.get_parameter(name)) is not None]
        requantize.requantize_(quantized, names=[f"{type(self).__name__}.{name}" for name in weights])
        if self._plan.preserve_high_precision:
            for weight, values in quantized:
                components.storage_of(weight).keep_initial_values(values.cpu().clone())

    def _materialize(self) -> None:
        for name, param in list(self.named_parameters(recurse=False)):
            if param.is_meta:
                mesh_type = param.device_mesh.device_type if isinstance(param, DTensor) else None
                device = devices.default_device() if mesh_type is None else devices.current_device(mesh_type)
                new = getattr(param, _MATERIALIZED, None)  # set if a tied module was materialized first
                if new is None:
                    new = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
                    setattr(param, _MATERIALIZED, new)
                setattr(self, name, new)
        for name, buffer in list(self.named_buffers(recurse=False)):
            if buffer.is_meta:
                device = next(
                    (private_torch.local_tensor(p).device for p in self.parameters()), devices.default_device()
                )
                self.register_buffer(name, torch.zeros_like(buffer, device=device))
        for name, state in self._born_states.items():
            if AMAX_HISTORY in state and state[AMAX_HISTORY].is_meta:
                device = private_torch.local_tensor(self.get_parameter(name)).device
                state[AMAX_HISTORY] = torch.zeros_like(state[AMAX_HISTORY], device=device)

    def _check_keys(self, names: Iterable[str]) -> None:
        for name in names:
            param = self.get_parameter(name)
            group = private_torch.mesh_group(param)
            flat_max.check_equal_on_ranks({name: self.weight_state(name)[KEY]}, group, "the random key")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        """Move or cast, as `.to()` and `.half()` do. Amax histories stay float32; RNG counters move along."""
        before = dict(self.named_buffers(recurse=False))
        sharded = [param for param in self.parameters(recurse=False) if isinstance(param, DTensor)]
        with private_torch.set_aside(self, QuantizedTensor) as quantized, components.attributes_kept(sharded):
            super()._apply(fn, recurse)
        for param in quantized:
            components.move_parameter(param, fn)
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            if buffer.is_meta and not moved.is_meta:
                moved.zero_()  # to_empty leaves memory uninitialized, and a checkpoint need not have this buffer
            elif name.endswith(tuple(HISTORIES.values())) and moved.dtype != buffer.dtype:
                self.register_buffer(name, buffer.to(moved.device))
        for name, state in self.plain_states.items():
            storages.move_draws(state, private_torch.local_tensor(getattr(self, name)).device)
        self._handle = operator_arguments.handle_beside(self, self._handle)
        self._check_dtypes()
        return self

    def _check_dtypes(self) -> None:
        for name, param in self.named_parameters(recurse=False):
            if param.dtype not in _PARAMS_DTYPES:
                raise ConfigurationError(
                    f"{type(self).__name__}.{name} was cast to {param.dtype}: parameters stand for values of one of "
                    f"{', '.join(map(str, _PARAMS_DTYPES))}; build the module under quantized_model_init with a recipe "
                    "to store weights in fewer bits"
                )

    # Use -------------------------------------------------------------------------------------------------------------

    def _project(
        self,
        x: Tensor,
        layer: Projection,
        *,
        with_bias: bool = True,
        ready: PreparedLinear | TracedLinear | None = None,
        again: functional.RecomputedInput | None = None,
    ) -> Sequence[Tensor]:
        """Apply a linear layer under the current recipe: x [..., in_features] @ w^T + b for each weight.

        `ready`: result of `_ready` for this call, if there is one. `again`: recomputes x in backward, so that eager
        code does not save x; in compiled code the compiler decides.
        """
        x = self._input(x)
        prepared = ready or self._ready(layer, x.shape, x.device, with_bias=with_bias)
        return (
            compiled.traced_linear(x, prepared)
            if isinstance(prepared, TracedLinear)
            else functional.linear(x, prepared, again, self.shared_input)
        )

    def _input(self, x: Tensor) -> Tensor:
        """Check the input and cast it to the dtype that this module computes in."""
        checked = inputs.checked_input(type(self).__name__, x, self._dtype)
        if checked.dtype.itemsize > 2 and self._weights:
            weight = private_torch.registered_parameter(self, next(iter(self._weights)))
            # not _dtype: casts of the module do not update it
            if weight is not None and weight.dtype.itemsize < checked.dtype.itemsize:
                inputs.warn_of_wide_input(type(self).__name__, checked.dtype, weight.dtype)
        return checked

    def _ready(
        self, layer: Projection, x_shape: Sequence[int], device: torch.device, *, with_bias: bool = True
    ) -> PreparedLinear | TracedLinear:
        """Prepare a layer for an input of this shape under the current recipe. Each call counts as a forward.

        While torch.compile traces, the result has the weights' names, and they are checked when the operator runs.
        """
        if torch.compiler.is_compiling():
            return self._traced(layer, with_bias)
        computed = vars(type(self))  # parametrize creates a class per module, with a property for the weight
        if computed.keys().isdisjoint(layer.weights):
            return self._ready_now(layer, x_shape, device, with_bias)
        with parametrize.cached():  # the weight is read more than once; each read of spectral_norm is a power iteration
            return self._ready_now(layer, x_shape, device, with_bias)

    def _ready_now(
        self, layer: Projection, x_shape: Sequence[int], device: torch.device, with_bias: bool
    ) -> PreparedLinear:
        tensors = self._locals(layer.tensors if with_bias else layer.weights)
        weights, biases = tensors[: len(layer.weights)], tensors[len(layer.weights) :]
        quantized = any([isinstance(weight, QuantizedTensor) for weight in weights])
        call = recompute.linear_context((id(self), ",".join(layer.weights)), quantized, self.training)
        if quantized and not context.in_autocast() and self.training and torch.is_grad_enabled():
            if not call.repeated:  # backward recomputes outside of the autocast of the first forward
                limits.warn("dequantized", self.label(layer.weights[0]), "autocast(enabled=False)")
        for name, weight in zip(layer.weights, weights, strict=True):
            self._check_weight(name, weight, call, device)
        if x_shape[-1] != weights[0].shape[1]:
            part = f", its part of them over {self.tp_size} ranks" if layer.mode == "row" and self.tp_size > 1 else ""
            raise ConfigurationError(
                f"{type(self).__name__}.{layer.weights[0]} got an input {list(x_shape)}, but its last dim must have "
                f"the {weights[0].shape[1]} features that the weight takes here{part}"
            )
        state = self._linear_state(layer.weights, call.recipe, layer.prefix)
        # a recomputed forward follows the first one, even if train() or eval() was called in between
        state.record = call.record and not (state.stage is not None and state.stage.infers)
        state.tp = self.tensor_parallel_of(layer.mode)
        return PreparedLinear(weights, biases or [None] * len(weights), call, state)

    def _traced(self, layer: Projection, with_bias: bool) -> TracedLinear:
        weights = [getattr(self, name) for name in layer.weights]
        biases = self._locals(layer.biases) if with_bias else [None] * len(weights)
        if self.tp_size > 1:
            raise UnsupportedOperationError(limits.refusal("compiled tensor parallelism", type(self).__name__))
        setting = context.current_setting()
        return TracedLinear(weights, biases, self._handle, layer.weights, layer.prefix, self.training, setting)

    def _normalized(self, normalize: Callable[..., Any], x: Tensor, prefix: str = "") -> Any:
        """Apply `normalize` to x with this module's parameters `{prefix}weight` and `{prefix}bias`."""
        weight, bias = self.whole_on_rows(prefix + "weight", prefix + "bias")
        self._check_place(prefix + "weight", weight, x.device)
        return normalize(x, weight, bias)

    def _check_place(self, name: str, param: Tensor | None, device: torch.device) -> None:
        if param is not None and param.is_meta and device.type != "meta":
            raise ConfigurationError(
                f"{self.label(name)} is on the meta device and holds no values; call "
                "to_empty(device=...) on the model and load them (checkpoints.load_high_precision, checkpoints.load), "
                "or reset_parameters()"
            )

    def _joined_bias(self, layer: Projection, dtype: torch.dtype) -> Tensor | None:
        """Bias of all parts of a layer, in `dtype`, for callers that add it themselves; None without a bias."""
        if not self.use_bias:
            return None
        biases = self.whole_on_rows(*layer.biases) if layer.mode == "row" else self._locals(layer.biases)
        return joined(biases).to(dtype)

    def weight_operand(self, name: str, call: LinearContext, device: torch.device) -> Tensor:
        """Check a weight for the GEMMs of `call` and return its local part; see `_check_weight`."""
        weight: Tensor = self._local(name)
        self._check_weight(name, weight, call, device)
        return weight

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState:
        """State of one linear layer of this module. Missing histories that the recipe needs are created."""
        histories = {}
        for role, length in recipe.histories.items():
            histories[role] = self._history(prefix + HISTORIES[role], length, weights[0], recipe)
        states, cell = self._states(weights), recipe.weight
        if cell is not None and cell.scaling.history:
            for weight, state in zip(weights, states, strict=True):
                self._check_history(weight, state, recipe)
        input_history, grad_output_history = histories.get(TensorRole.INPUT), histories.get(TensorRole.GRAD_OUTPUT)
        is_delayed = bool(histories) or (cell is not None and cell.scaling.history > 0)
        is_recorded = self.training and (is_delayed or observation.active is not None)
        stage = private_torch.running_stage() if is_recorded else None
        record = self.training and not (stage is not None and stage.infers)
        return LinearState(states, input_history, grad_output_history, record, stage=stage, plans=self._gemm_plans)

    def _history(self, name: str, length: int, weight: str, recipe: Recipe) -> Tensor:
        """Return an amax history of the length that `recipe` needs; create a missing one."""
        history = private_torch.registered_buffer(self, name)
        if history is None:
            if self.training and context.is_strict():
                self._refuse_fallbacks(name, ("late history",))
            self._warn_of_late_history(name)
            device = private_torch.local_tensor(self.get_parameter(weight)).device
            self.register_buffer(name, history := _empty_history(length, device))
        if history.numel() != length:
            raise RecipeMismatchError(
                f"{self.label(name)} holds {history.numel()} past amaxes, but autocast's recipe "
                f"{recipe.name!r} asks for {length}; use one recipe object for training and evaluation"
            )
        return history

    def _check_history(self, weight: str, state: dict[str, Tensor], recipe: Recipe) -> None:
        """Ensure that a weight's state has the amax history that the recipe needs, on the weight's device."""
        length, history = recipe.weight.scaling.history if recipe.weight else 0, state.get(AMAX_HISTORY)
        if history is not None and history.numel() != length:
            raise RecipeMismatchError(
                f"{self.label(weight)} holds {history.numel()} past amaxes, but autocast's recipe "
                f"{recipe.name!r} asks for {length}; use one recipe object for both"
            )
        if history is None or state is self._born_states.get(weight):
            device = private_torch.local_tensor(getattr(self, weight)).device
            if history is None:
                state[AMAX_HISTORY] = _empty_history(length, device)
            elif history.device != device:  # Module.to moves only parameters and buffers
                state[AMAX_HISTORY] = history.to(device)

    def _refuse_fallbacks(self, name: str, taken: tuple[str, ...]) -> None:
        if taken:
            raise limits.fallback_error(taken, self.label(name))

    def _warn_of_late_history(self, name: str) -> None:
        if self.training:
            warnings.warn(f"{self.label(name)}: {limits.FALLBACKS['late history']}", stacklevel=2)

    def _check_weight(self, name: str, weight: Tensor, call: LinearContext, device: torch.device) -> None:
        """Check that a weight can be used in this call with an input on `device`.

        Raises:
            RecipeMismatchError: the weight's format is not the recipe's.
            ConfigurationError: the weight is stale, has no values, or was gathered before this CUDA graph's capture.
            FallbackError: under strict, the weight's GEMMs would fall back.
        """
        recipe, storage = call.recipe, weight.quantized_storage if isinstance(weight, QuantizedTensor) else None
        if storage is not None and storage.is_stale:
            raise ConfigurationError(
                f"{self.label(name)} was gathered by FSDP before its last update, so this forward "
                "would use old values; let FSDP free it after the last backward of a step (set_reshard_after_backward"
                "(True)), or call reshard() on the FSDP-wrapped module after optimizer.step()"
            )
        if storage is not None and storage.gathered:
            storage.check_captured(f"{type(self).__name__}.{name}")
        if storage is not None and storage.version == 0 and storage.is_unwritten and not weight.is_meta:
            raise ConfigurationError(
                f"{self.label(name)} was never given values: to_empty took memory as it was, and "
                "nothing was loaded since; call checkpoints.load_high_precision(model, state_dict) or "
                "checkpoints.load before the first forward, or reset_parameters() for new values"
            )
        cell = None if storage is None else storage.cell
        if cell not in (recipe.weight, None) and recipe.table:
            expected = "high precision" if recipe.weight is None else str(recipe.weight)
            raise RecipeMismatchError(
                f"{self.label(name)} is stored as {cell}, but autocast's recipe "
                f"{recipe.name!r} wants {expected}; give it the one by which the weights were made"
            )
        if storage is None and recipe.weight is not None and self.training and torch.is_grad_enabled():
            silencer = "warnings.filterwarnings('ignore', '.*quantized anew')"
            limits.warn("quantized each forward", self.label(name), silencer)
        if weight.is_meta:
            self._check_place(name, weight, device)
        if call.strict:
            self._refuse_fallbacks(name, hardware.fallbacks(storage, recipe, device))

    def label(self, parameter: str) -> str:
        """A parameter's name in messages: that of the module if it has one, otherwise of its class."""
        return f"{getattr(self, 'name', None) or type(self).__name__}.{parameter}"

    def _formats_repr(self) -> str:
        """Formats of quantized weights for `extra_repr`, such as ", weight=mxfp8_32x32"."""
        params = private_torch.registered_parameters(self, self._weights)
        tags = {
            local.quantized_storage.cell.tag for local in map(components.quantized_local, params) if local is not None
        }
        return f", weight={'/'.join(sorted(tags))}" if tags else ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = operator_arguments.handle(self, self._handle.device)  # a copied module needs a new handle


def _empty_history(length: int, device: torch.device) -> Tensor:
    """A zeroed float32 history, created outside of inference mode so that training can update it later."""
    with torch.inference_mode(False):
        return torch.zeros(length, dtype=torch.float32, device=device)
