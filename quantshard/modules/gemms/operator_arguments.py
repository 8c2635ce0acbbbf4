"""Arguments of the custom operators in `operators`, which all have the same schema of tensors, numbers and a key.

A module is passed as a handle, static facts by the key of their `StepStructure`, a quantized weight as its components,
and state that outlives the step as the tensors that `operator_state` reads.

A key is a digest of its value. A graph that another process reads from a compile cache therefore refers to the same
value, or to an unknown key, and never to another value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quantshard import private_torch, sharding
from quantshard.errors import RecipeMismatchError, UnsupportedOperationError
from quantshard.formats import ALL, Orientation
from quantshard.gemm.operands import needs_amax, scales_by_one_amax
from quantshard.modules.activation_storage import HIGH_PRECISION
from quantshard.modules.contexts import settings
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import WgradOperand, keeps_transposed
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.recipe import QuantSpec, Recipe, TensorRole
from quantshard.sharding import Shard
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage
from quantshard.version import __version__

T = TypeVar("T")


class LinearModule(Protocol):
    """Interface of the module of a linear layer: a `QuantizedModule`, or one that holds several of them by name."""

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState: ...

    def weight_operand(self, name: str, call: LinearContext, device: torch.device) -> Tensor: ...

    def label(self, parameter: str) -> str: ...


_modules: WeakValueDictionary[int, LinearModule] = WeakValueDictionary()
"""Address of the handle -> module."""


def handle(module: LinearModule, device: torch.device) -> Tensor:
    """Create a tensor whose address identifies a module.

    A tensor, unlike an int, lets one compiled graph serve all modules, and a CUDA graph can hold it. Reading its
    address does not synchronize. `device`: device of the weights.
    """
    tensor = torch.empty(1, dtype=torch.uint8, device="cpu" if device.type == "meta" else device)
    if not private_torch.is_traced(tensor):
        _modules[private_torch.keep_address(tensor).data_ptr()] = module
    return tensor


def live_module(handle: Tensor, structure: StepStructure) -> LinearModule:
    """The module of a handle."""
    module = _modules.get(handle.data_ptr())
    if module is None:
        raise UnsupportedOperationError(
            f"the module of the compiled layer of {structure.names!r} was deleted before backward ran; keep a "
            "reference to it until then"
        )
    return module


def handle_beside(module: Any, current: Tensor) -> Tensor:
    """Return the handle of a module, or a new one if the module's parameters have moved to another device."""
    device = next((param.device for param in module.parameters()), current.device)
    return current if device == current.device or device.type == "meta" else handle(module, device)


# Static facts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerStructure:
    """One linear layer of a module, with one weight or several that read the same input.

    `weights`: names of the weights in the module. `prefix`: prefix of the names of the amax histories. `biases`: dtype
    of each weight's bias, or None. `keeps`: whether forward keeps wgrad's operand of the input. `remakes`: whether
    backward recomputes wgrad's operand; both are false if no backward follows.
    """

    weights: tuple[str, ...]
    prefix: str
    biases: tuple[torch.dtype | None, ...]
    keeps: bool
    remakes: bool


@dataclass(frozen=True)
class StepStructure:
    """Consecutive linear layers of one module, and the operations fused with them; "" for none.

    `dtype`: dtype of the weights, nominal if they are quantized. `is_stored`: whether they are stored quantized.
    `record`: whether amaxes are recorded (in training). `setting`: name of the autocast setting. `normalization`,
    `zero_centered_gamma`: normalization before the first layer. `activation`: activation between two layers.
    `activation_storage`: storage format of the activation's inputs that are kept for backward. `is_observed`: an
    observer receives the operands, so the layers stay an operator. `stored`: spec and shard of each stored weight.
    """

    layers: tuple[LayerStructure, ...]
    dtype: torch.dtype
    is_stored: bool
    record: bool
    setting: str
    normalization: str = ""
    zero_centered_gamma: bool = False
    activation: str = ""
    activation_storage: str = HIGH_PRECISION
    is_observed: bool = False
    stored: tuple[tuple[QuantSpec, Shard], ...] = ()

    @property
    def recipe(self) -> Recipe:
        """The recipe of the autocast setting."""
        return settings.registered[self.setting].recipe

    @property
    def is_trained(self) -> bool:
        """Whether the module was in training and backward needs the input of a layer."""
        return self.record and any(layer.keeps or layer.remakes for layer in self.layers)

    @property
    def weights(self) -> list[str]:
        """Names of all weights."""
        return [name for layer in self.layers for name in layer.weights]

    @property
    def names(self) -> str:
        """Names of all weights, for messages."""
        return ", ".join(self.weights)

    def by_layer(self, values: Sequence[T]) -> list[list[T]]:
        """Group a list of values, one per weight, by layer."""
        remaining = iter(values)
        return [[next(remaining) for _ in layer.weights] for layer in self.layers]


_structures: dict[str, StepStructure] = {}


def stored_key(key: str, weights: Sequence[QuantizedTensor]) -> str:
    """Return the key of a structure whose weights are stored as these are."""
    structure = structure_of(key)
    for name, weight in zip(structure.weights, weights, strict=True):
        if structure.recipe.table and weight.quantized_storage.spec != structure.recipe.weight:
            raise RecipeMismatchError(
                f"{name} of a compiled layer is stored as {weight.quantized_storage.spec}, but autocast's recipe is "
                f"{structure.recipe.name!r}; enter autocast with the recipe of the weights"
            )
    stored = tuple((weight.quantized_storage.spec, weight.quantized_storage.shard) for weight in weights)
    return _register(replace(structure, stored=stored))


def _register(structure: StepStructure) -> str:
    # with the version, because a traced graph contains what the operators of one version do
    key = hashlib.sha256(f"{__version__} {structure!r}".encode()).hexdigest()
    assert _structures.setdefault(key, structure) == structure
    return key


@private_torch.constant_in_graphs
def structure_key(layers: Sequence[Sequence[Any]], *others: Any, **facts: Any) -> str:
    """Register the structure with these fields in this process and return its key.

    `layers` holds the fields of each layer as a sequence, because Dynamo passes only values of built-in types.
    """
    return _register(StepStructure(tuple(LayerStructure(*layer) for layer in layers), *others, **facts))


def structure_of(key: str) -> StepStructure:
    """The structure that a graph was traced for."""
    if key not in _structures:
        raise UnsupportedOperationError(
            f"a compiled layer of structure {key} was traced by another process and not by this one; call here what "
            "torch.compile returns, which traces it and may then read compiled code from a cache"
        )
    return _structures[key]


# Arguments -----------------------------------------------------------------------------------------------------------


class StepArguments(NamedTuple):
    """Arguments of the operators of a step: of linear layers of a module, and a normalization before them or none.

    Args:
        plain: the weights; empty if they are passed as components.
        components: components of quantized weights, in the order of their format; None for one that is not resident.
        module: handle of the module.
        key: key of the `StepStructure`.
        state: result of `quantshard::read_state` for this pass, or empty.
        out_features: out_features of each weight.
        norm_weight, norm_bias, eps: arguments of the normalization.
        x: the input. In backward: the input of the normalization (x + residual if there is a residual), or the input of
            the first layer if it is kept in high precision.
        residual: in forward, added to x first.
        biases: in forward, the biases that exist, in the order of their weights.
        grads: in backward, gradients of the outputs of the last layer.
        saved: in backward, tensors that forward returned for it.
        of_total: in backward, the gradient of x + residual.
        x_shape: in backward, the shape of the input.
        need_front: in backward, whether x and the normalization's weight and bias need gradients.
        need_weights, need_biases: in backward, whether each weight and its bias need gradients.
    """

    plain: Sequence[Tensor]
    components: Sequence[Tensor | None]
    module: Tensor
    key: str
    state: Sequence[Tensor]
    out_features: Sequence[int]
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float
    x: Any
    residual: Tensor | None = None
    biases: Sequence[Tensor] = ()
    grads: Sequence[Tensor] = ()
    saved: Sequence[Tensor] = ()
    of_total: Tensor | None = None
    x_shape: Sequence[int] = ()
    need_front: Sequence[bool] = ()
    need_weights: Sequence[bool] = ()
    need_biases: Sequence[bool] = ()

    @staticmethod
    def of_backward(arguments: Sequence[Any]) -> StepArguments:
        """Group the arguments of a backward operator."""
        fields = [*arguments[:_BOTH], None, (), *arguments[_BOTH:]]
        return StepArguments(*fields)

    @property
    def structure(self) -> StepStructure:
        """The structure that the graph was traced for."""
        return structure_of(self.key)

    def input_shape(self, layer: int) -> tuple[int, ...]:
        """Shape of the input of a layer. The first layer reads x or normalized x."""
        x_shape = tuple(self.x_shape or self.x.shape)
        return x_shape if layer == 0 else (*x_shape[:-1], self.structure.by_layer(self.out_features)[layer - 1][0])

    def weights(self) -> list[list[Tensor]]:
        """The weights of each layer. A copy that FSDP2 did not gather is fetched when a GEMM reads it."""
        structure, weights = self.structure, list[Any](self.plain)
        remaining = iter(self.components)
        for spec, shard in structure.stored:
            parts = {part.name: next(remaining) for part in spec.format.components}
            resident = {name: part for name, part in parts.items() if part is not None}
            weights.append(QuantizedTensor(QuantizedStorage(spec, shard, resident), structure.dtype))
        if structure.is_stored:
            key = stored_key(self.key, weights)
            for index, weight in enumerate(weights):
                fetch = partial(self._fetched, weight.quantized_storage, key, index)
                weights[index] = QuantizedTensor(replace(weight.quantized_storage, fetch=fetch), structure.dtype)
        return structure.by_layer(weights)

    def _fetched(self, storage: QuantizedStorage, key: str, index: int, _: Orientation) -> dict[str, Tensor]:
        names = [part.name for part in storage.spec.format.components if part.name not in storage.components]
        fetched = torch.ops.quantshard.fetch_copy(self.module, key, index, names, self.grads[0] if self.grads else None)
        return dict(zip(names, fetched, strict=True))

    def amaxes(self, layer: int) -> list[tuple[TensorRole, int]]:
        """(role, weight index) of the tensors whose forward amax backward needs."""
        recipe, layer_structure, keys = self.structure.recipe, self.structure.layers[layer], []
        if not self.structure.is_stored and recipe.weight is not None and recipe.weight.scaling.history:
            keys += [(TensorRole.WEIGHT, part) for part in range(len(layer_structure.weights))]
        input_specs = recipe.activations[TensorRole.INPUT]
        if layer_structure.remakes and needs_amax(*input_specs) and scales_by_one_amax(input_specs):
            keys.append((TensorRole.INPUT, 0))
        return keys


def components_of(weights: Sequence[QuantizedTensor]) -> list[Tensor | None]:
    """Components of quantized weights, as `StepArguments.components`."""
    storages = [weight.quantized_storage for weight in weights]
    return [
        storage.components.get(component.name) for storage in storages for component in storage.spec.format.components
    ]


_BOTH: Final = 10  # arguments that forward and backward have
_SHARED = (
    "Tensor[] plain, Tensor?[] components, Tensor module, str key, Tensor[] state, SymInt[] out_features, "
    "Tensor? norm_weight, Tensor? norm_bias, float eps"
)
FORWARD = f"({_SHARED}, Tensor x, Tensor? residual, Tensor[] biases) -> Tensor[]"
BACKWARD = (
    f"({_SHARED}, Tensor? x, Tensor[] grads, Tensor[] saved, Tensor? of_total, SymInt[] x_shape, bool[] need_front, "
    "bool[] need_weights, bool[] need_biases) -> Tensor[]"
)


class SavedInput(NamedTuple):
    """Layout of wgrad's operand of an input, as forward returns it for backward.

    `spec`: quantization of the operand; None: high precision. `transposed`: whether the operand is the transpose.
    `shape`: rows and columns of the operand.
    """

    spec: QuantSpec | None
    transposed: bool
    shape: tuple[int, int]

    @staticmethod
    def of(step: StepArguments, layer: int, like: Tensor) -> SavedInput | None:
        """The layout for a layer; None if nothing or x itself is kept. `like`: tensor of the dtype and device of x."""
        structure = step.structure
        pair = _, second = structure.recipe.activations[TensorRole.INPUT]
        is_x = layer == 0 and second is None and not structure.normalization
        if not structure.layers[layer].keeps or is_x:
            return None
        *leading, features = step.input_shape(layer)
        tokens = 1
        for size in leading:
            tokens = tokens * size
        if second is None or not keeps_transposed(pair, like):
            return SavedInput(second, False, (tokens, features))
        padding = -tokens % 16 if second.scaling.random_hadamard else 0  # the Hadamard transform pads the summed dim
        return SavedInput(second, True, (features, tokens + padding))

    def tensors(self, operand: WgradOperand) -> list[Tensor]:
        """The tensors of an operand."""
        if isinstance(operand.operand, Tensor):
            return [operand.operand]
        return [operand.operand.components[component.name] for component in operand.operand.spec.format.components]

    def empty(self, like: Tensor) -> list[Tensor]:
        """Uninitialized tensors with the shapes and dtypes of `tensors`."""
        if self.spec is None:
            return [like.new_empty(self.shape)]
        tensors = []
        for component in self.spec.format.components:
            covered = zip(self.shape, component.block_shape, strict=True)
            grid = [1 if cover == ALL else sharding.ceil_div(size, cover) for size, cover in covered]
            tensors.append(like.new_empty(grid, dtype=component.encoding.storage))
        return tensors

    def operand(self, left: Iterator[Tensor]) -> WgradOperand:
        """Build the operand from the next tensors of `left`."""
        if self.spec is None:
            return WgradOperand(next(left), False)
        parts = {component.name: next(left) for component in self.spec.format.components}
        return WgradOperand(QuantizedStorage(self.spec, sharding.whole(self.shape), parts), self.transposed)
