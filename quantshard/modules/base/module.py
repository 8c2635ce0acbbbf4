"""What all modules with weights share: how a weight is born, written, checkpointed and found.

A weight is described by a `WeightSpec`. Its values come from a counter generator under the parameter's own key, by
index in the global tensor, so a module is born the same whole, in shards, or on the meta device and filled later.
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
from quantshard.gemm import backend
from quantshard.modules.base import devices, inputs, weight_watch
from quantshard.modules.base.own_recipe import HISTORIES, RecipeModule
from quantshard.modules.base.projections import Projection, joined
from quantshard.modules.contexts import context, context_warnings, recompute
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms import compiled, functional, operator_arguments
from quantshard.modules.gemms.compiled import TracedLinear
from quantshard.modules.gemms.functional import PreparedLinear
from quantshard.modules.gemms.linear_state import LinearState
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
_MATERIALIZED = "quantshard_materialized"  # attribute of a parameter on the meta device: what took its place


@dataclass(frozen=True)
class WeightSpec:
    """How one weight [out_features, in_features] is initialized.

    `init_method` fills a whole tensor in place, with torch's generator seeded by the parameter's key; None draws from
    N(0, `std`**2) by the counter generator, which never builds the whole tensor.
    """

    shape: tuple[int, int]
    init_method: InitMethod | None = None
    std: float = DEFAULT_STD

    def values(self, key: int, origin: tuple[int, int], shape: tuple[int, int], device: torch.device) -> Tensor:
        """The rectangle's initial values, float32."""
        if self.init_method is None:
            words = numerics.random_words(key, 0, INIT_STREAM, self.shape, origin, shape, device=device)
            return distributions.normal(words) * self.std
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(key)  # torch.manual_seed would also seed the accelerators, unforked
            whole = torch.empty(self.shape, dtype=torch.float32, device="cpu")
            self.init_method(whole)
        return whole[origin[0] : origin[0] + shape[0], origin[1] : origin[1] + shape[1]].to(device)


class QuantizedModule(RecipeModule):
    """Base of modules with weights that may be quantized. Subclasses call `_add_projection` and `add_vector`.

    `shared_input`: what its layer has in common with those of other modules that read the same tensors.
    `zero_centered_gammas`: names of its parameters that are stored as gamma - 1.
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
        weight_watch.watch(self)
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
        self._handle = operator_arguments.handle(self, self_device)

    # Birth -----------------------------------------------------------------------------------------------------------

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
        """Register the parameters of a linear layer: `sizes` gives the out_features of each of its parts."""
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
        """Register a weight, initialized unless the device is meta; quantized if `quantized_model_init` says so.

        `cut`: the dim that tensor parallelism cuts.
        """
        self._check_shape(name, spec.shape, cut)
        self._weights[name], self._cuts[name] = spec, cut
        cell = self._plan.recipe.weight
        state = storages.weight_state(cell, self._device)
        stored = cell if self._plan.quantize else None
        self._born_states[name] = state if stored is None else {key: value.clone() for key, value in state.items()}
        self.register_parameter(name, self._empty_weight(name, stored, state, self._dtype, self._device))
        if not self.get_parameter(name).is_meta:
            self._fill([name])

    def add_vector(self, name: str, size: int, fill: float, cut: int | None = None) -> None:
        """Register a 1-D parameter that starts as a constant and stays in high precision."""
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
        Called twice, it gives the same bits. A collective call if parameters are sharded: every rank must make it.

        Raises:
            RankMismatchError: ranks have different keys, so they would fill in parts of different weights.
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
        """Give weights their initial values. A collective call if they are sharded."""
        self._check_keys(names)
        quantized: list[tuple[Tensor, Tensor]] = []
        for name in names:
            param, state, spec = self.get_parameter(name), self.weight_state(name), self._weights[name]
            state[DRAWS].zero_()
            if AMAX_HISTORY in state:
                state[AMAX_HISTORY].zero_()
            local = private_torch.local_tensor(param)
            at = private_torch.global_offset(param)
            origin = local.quantized_storage.shard.origin if isinstance(local, QuantizedTensor) else (at[0], at[1])
            shape = (local.shape[0], local.shape[1])
            values = spec.values(int(state[KEY]), origin, shape, local.device).to(self._dtype)
            if isinstance(local, QuantizedTensor):
                quantized.append((param, values))
            else:
                local.copy_(values)
        weights = [name for name in names if components.quantized_local(self.get_parameter(name)) is not None]
        requantize.requantize_(quantized, names=[f"{type(self).__name__}.{name}" for name in weights])
        if self._plan.preserve_high_precision:
            for written, values in quantized:
                components.storage_of(written).keep_initial_values(values.cpu().clone())

    def _materialize(self) -> None:
        for name, param in list(self.named_parameters(recurse=False)):
            if param.is_meta:
                mesh_type = param.device_mesh.device_type if isinstance(param, DTensor) else None
                device = devices.default_device() if mesh_type is None else devices.current_device(mesh_type)
                new = getattr(param, _MATERIALIZED, None)  # by a module that is tied to this one
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
        """Move or cast as any module, `.half()` and the like; but amax histories stay float32, and counts move too."""
        before = dict(self.named_buffers(recurse=False))
        sharded = [param for param in self.parameters(recurse=False) if isinstance(param, DTensor)]
        with private_torch.set_aside(self, QuantizedTensor) as quantized, components.attributes_kept(sharded):
            super()._apply(fn, recurse)
        for param in quantized:
            components.move_parameter(param, fn)
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            if buffer.is_meta and not moved.is_meta:
                moved.zero_()  # to_empty gives memory as it is, and no load need have an entry
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
        """x [..., in_features] times each weight of a layer, transposed, plus its bias; by the recipe in force.

        `ready`: what `_ready` has given for this call already. `again`: gives x in backward, which then is not kept;
        what compiled code keeps is the compiler's to decide.
        """
        x = self._input(x)
        found = ready or self._ready(layer, x.shape, x.device, with_bias=with_bias)
        return (
            compiled.traced_linear(x, found)
            if isinstance(found, TracedLinear)
            else functional.linear(x, found, again, self.shared_input)
        )

    def _input(self, x: Tensor) -> Tensor:
        """The input as this module computes with it, checked."""
        found = inputs.checked_input(type(self).__name__, x, self._dtype)
        if found.dtype.itemsize > 2 and self._weights:
            own = private_torch.registered_parameter(self, next(iter(self._weights)))
            if own is not None and own.dtype.itemsize < found.dtype.itemsize:  # not _dtype: it may have been cast since
                self._warn_of_wide_input(found.dtype, own.dtype)
        return found

    def _warn_of_wide_input(self, given: torch.dtype, own: torch.dtype) -> None:
        if torch.compiler.is_compiling():
            context_warnings.warn_of_wide_input_in_graph(type(self).__name__, given, own)
        else:
            context_warnings.warn_of_wide_input(self, given, own)

    def _ready(
        self, layer: Projection, x_shape: Sequence[int], device: torch.device, *, with_bias: bool = True
    ) -> PreparedLinear | TracedLinear:
        """A layer for an input of this shape, by the recipe in force; each call of it counts as a forward.

        In a graph that is being traced it is told by names, and checked when its operator runs.
        """
        if torch.compiler.is_compiling():
            return self._traced(layer, with_bias)
        computed = vars(type(self))  # parametrize gives a module a class of its own, with a property for its weight
        if computed.keys().isdisjoint(layer.weights):
            return self._ready_now(layer, x_shape, device, with_bias)
        with parametrize.cached():  # read more than once here; of spectral_norm each look is another step
            return self._ready_now(layer, x_shape, device, with_bias)

    def _ready_now(
        self, layer: Projection, x_shape: Sequence[int], device: torch.device, with_bias: bool
    ) -> PreparedLinear:
        tensors = self._locals(layer.tensors if with_bias else layer.weights)
        weights, biases = tensors[: len(layer.weights)], tensors[len(layer.weights) :]
        quantized = any([isinstance(weight, QuantizedTensor) for weight in weights])
        call = recompute.linear_context((id(self), ",".join(layer.weights)), quantized, self.training)
        if quantized and not context.in_autocast() and self.training and torch.is_grad_enabled():
            if not call.repeated:  # in backward, what ran in an autocast runs again outside of it
                context_warnings.warn_of_training_outside(self, layer.weights[0])
        for name, weight in zip(layer.weights, weights, strict=True):
            self._check_weight(name, weight, call, device)
        if x_shape[-1] != weights[0].shape[1]:
            part = f", its part of them over {self.tp_size} ranks" if layer.mode == "row" and self.tp_size > 1 else ""
            raise ConfigurationError(
                f"{type(self).__name__}.{layer.weights[0]} got an input {list(x_shape)}, but its last dim must have "
                f"the {weights[0].shape[1]} features that the weight takes here{part}"
            )
        state = self._linear_state(layer.weights, call.recipe, layer.prefix)
        # in a second forward, train() or eval() may have been called since the first
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
        """x through a normalization whose parameters, named behind `prefix`, are this module's."""
        weight, bias = self.whole_on_rows(prefix + "weight", prefix + "bias")
        self._check_place(prefix + "weight", weight, x.device)
        return normalize(x, weight, bias)

    def _check_place(self, name: str, param: Tensor | None, device: torch.device) -> None:
        if param is not None and param.is_meta and device.type != "meta":
            raise ConfigurationError(
                f"{context_warnings.name_of(self)}.{name} is on the meta device and holds no values; call "
                "to_empty(device=...) on the model and load them (checkpoints.load_high_precision, checkpoints.load), "
                "or reset_parameters()"
            )

    def _joined_bias(self, layer: Projection, dtype: torch.dtype) -> Tensor | None:
        """The bias of a whole layer in the dtype of its output, for callers that add it themselves; None without."""
        if not self.use_bias:
            return None
        biases = self.whole_on_rows(*layer.biases) if layer.mode == "row" else self._locals(layer.biases)
        return joined(biases).to(dtype)

    def weight_operand(self, name: str, call: LinearContext, device: torch.device) -> Tensor:
        """A weight for the GEMMs of `call`; raises FallbackError where these would fall back and may not."""
        weight: Tensor = self._local(name)
        self._check_weight(name, weight, call, device)
        return weight

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState:
        """The state for one linear layer of this module; histories that the recipe needs are made here if missing."""
        histories = {}
        for role, length in recipe.histories.items():
            histories[role] = self._history(prefix + HISTORIES[role], length, weights[0], recipe)
        states, cell = self._states(weights), recipe.weight
        if cell is not None and cell.scaling.history:
            for weight, state in zip(weights, states, strict=True):
                self._check_history(weight, state, recipe)
        seen, seen_backward = histories.get(TensorRole.INPUT), histories.get(TensorRole.GRAD_OUTPUT)
        is_delayed = bool(histories) or (cell is not None and cell.scaling.history > 0)
        is_recorded = self.training and (is_delayed or observation.active is not None)
        stage = private_torch.running_stage() if is_recorded else None
        record = self.training and not (stage is not None and stage.infers)
        return LinearState(states, seen, seen_backward, record, stage=stage)

    def _history(self, name: str, length: int, weight: str, recipe: Recipe) -> Tensor:
        """A history of the length that `recipe` needs, made here if it is missing."""
        found = private_torch.registered_buffer(self, name)
        if found is None:
            if self.training and context.is_strict():
                self._refuse_fallbacks(name, ("late history",))
            self._warn_of_late_history(name)
            device = private_torch.local_tensor(self.get_parameter(weight)).device
            self.register_buffer(name, found := _empty_history(length, device))
        if found.numel() != length:
            raise RecipeMismatchError(
                f"{context_warnings.name_of(self)}.{name} holds {found.numel()} past amaxes, but autocast's recipe "
                f"{recipe.name!r} asks for {length}; use one recipe object for training and evaluation"
            )
        return found

    def _check_history(self, weight: str, state: dict[str, Tensor], recipe: Recipe) -> None:
        """Let the state of a weight have the amax history that the recipe needs, where the weight is."""
        length, history = recipe.weight.scaling.history if recipe.weight else 0, state.get(AMAX_HISTORY)
        if history is not None and history.numel() != length:
            raise RecipeMismatchError(
                f"{context_warnings.name_of(self)}.{weight} holds {history.numel()} past amaxes, but autocast's recipe "
                f"{recipe.name!r} asks for {length}; use one recipe object for both"
            )
        if history is None or state is self._born_states.get(weight):
            device = private_torch.local_tensor(getattr(self, weight)).device
            if history is None:
                state[AMAX_HISTORY] = _empty_history(length, device)
            elif history.device != device:  # the module was moved; what is no parameter or buffer was not
                state[AMAX_HISTORY] = history.to(device)

    def _refuse_fallbacks(self, name: str, taken: tuple[str, ...]) -> None:
        if taken:
            raise limits.fallback_error(taken, f"{context_warnings.name_of(self)}.{name}")

    def _warn_of_late_history(self, name: str) -> None:
        if self.training:
            warnings.warn(f"{context_warnings.name_of(self)}.{name}: {limits.FALLBACKS['late history']}", stacklevel=2)

    def _check_weight(self, name: str, weight: Tensor, call: LinearContext, device: torch.device) -> None:
        """Raise unless a weight can be multiplied with in this call, by an input on `device`.

        Raises:
            RecipeMismatchError: it is stored in another format than the recipe's.
            ConfigurationError: it was gathered before it was last written to, or before this CUDA graph's capture, or
                was never given values.
            FallbackError: under strict, its GEMMs would fall back.
        """
        recipe, stored = call.recipe, weight.quantized_storage if isinstance(weight, QuantizedTensor) else None
        if stored is not None and stored.is_stale:
            raise ConfigurationError(
                f"{context_warnings.name_of(self)}.{name} was gathered by FSDP before its last update, so this forward "
                "would use old values; let FSDP free it after the last backward of a step (set_reshard_after_backward"
                "(True)), or call reshard() on the FSDP-wrapped module after optimizer.step()"
            )
        if stored is not None and stored.gathered:
            stored.check_captured(f"{type(self).__name__}.{name}")
        if stored is not None and stored.version == 0 and stored.is_unwritten and not weight.is_meta:
            raise ConfigurationError(
                f"{context_warnings.name_of(self)}.{name} was never given values: to_empty took memory as it was, and "
                "nothing was loaded since; call checkpoints.load_high_precision(model, state_dict) or "
                "checkpoints.load before the first forward, or reset_parameters() for new values"
            )
        cell = None if stored is None else stored.cell
        if cell not in (recipe.weight, None) and recipe.table:
            wanted = "high precision" if recipe.weight is None else str(recipe.weight)
            raise RecipeMismatchError(
                f"{context_warnings.name_of(self)}.{name} is stored as {cell}, but autocast's recipe "
                f"{recipe.name!r} wants {wanted}; give it the one by which the weights were made"
            )
        if stored is None and recipe.weight is not None and self.training and torch.is_grad_enabled():
            context_warnings.warn_of_plain_weight(self, name)
        if weight.is_meta:
            self._check_place(name, weight, device)
        if call.strict:
            self._refuse_fallbacks(name, backend.fallbacks(stored, recipe, device))

    def _formats_repr(self) -> str:
        """Return the formats of quantized weights for `extra_repr`, such as ", weight=mxfp8_32x32"."""
        params = private_torch.registered_parameters(self, self._weights)
        tags = {
            local.quantized_storage.cell.tag for local in map(components.quantized_local, params) if local is not None
        }
        return f", weight={'/'.join(sorted(tags))}" if tags else ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = operator_arguments.handle(self, self._handle.device)  # a copy is another module
        weight_watch.watch(self)


def _empty_history(length: int, device: torch.device) -> Tensor:
    """Of float32; usable in training even if it is first needed where nothing else made is."""
    with torch.inference_mode(False):
        return torch.zeros(length, dtype=torch.float32, device=device)
