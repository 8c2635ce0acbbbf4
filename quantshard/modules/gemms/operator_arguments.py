"""Arguments of the custom operators in `operators`, which all have the same schema of tensors, numbers and a key.

A module is passed as a handle, static facts by the key of their `StepStructure`, a quantized weight as its components.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quantshard import private_torch, sharding
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import ALL
from quantshard.gemm.operands import needs_amax, scales_by_one_amax
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import WgradOperand, keeps_transposed
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.modules.gemms.structure import StepStructure, structure_of
from quantshard.recipe import QuantSpec, Recipe, TensorRole
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage


class LinearModule(Protocol):
    """Interface of the module of a linear layer: a `QuantizedModule`, or one that holds several of them by name."""

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState: ...

    def weight_operand(self, name: str, call: LinearContext, device: torch.device) -> Tensor: ...


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


def handle_beside(module: Any, known: Tensor) -> Tensor:
    """Return the handle of a module, or a new one if the module's parameters have moved to another device."""
    device = next((param.device for param in module.parameters()), known.device)
    return known if device == known.device or device.type == "meta" else handle(module, device)


# Arguments -----------------------------------------------------------------------------------------------------------


class LayerArguments(NamedTuple):
    """Arguments that describe linear layers of a module and an optional normalization before them.

    `plain`: the weights; empty if they are passed as components. `components`: components of quantized weights, in the
    order of their format; None for a component that is not resident. `module`: handle of the module. `key`: key of the
    `StepStructure`. `out_features`: out_features of each weight. `norm_weight`, `norm_bias`, `eps`: arguments of the
    normalization.
    """

    plain: Sequence[Tensor]
    components: Sequence[Tensor | None]
    module: Tensor
    key: str
    out_features: Sequence[int]
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float

    @property
    def structure(self) -> StepStructure:
        """The structure that the graph was traced for."""
        return structure_of(self.key)

    def input_shape(self, x_shape: Sequence[int], layer: int) -> tuple[int, ...]:
        """Shape of the input of a layer. The first layer reads x or normalized x."""
        before = self.structure.by_layer(self.out_features)
        return tuple(x_shape) if layer == 0 else (*x_shape[:-1], before[layer - 1][0])

    def states(self) -> tuple[LinearModule, list[LinearState]]:
        """The module, and the state of each layer."""
        module, structure = _modules.get(self.module.data_ptr()), self.structure
        if module is None:
            raise UnsupportedOperationError(
                f"the module of the compiled layer of {structure.names!r} was deleted before backward ran; keep a "
                "reference to it until then"
            )
        states = [module._linear_state(layer.weights, structure.recipe, layer.prefix) for layer in structure.layers]
        return module, [replace(state, record=structure.record) for state in states]

    def weights_of(self, module: LinearModule) -> list[list[Tensor]]:
        """Rebuild the weights of each layer. Components that were not passed are fetched from the live weight."""
        structure = self.structure
        if self.plain:
            return structure.by_layer(self.plain)
        remaining = iter(self.components)
        names = [name for layer in structure.layers for name in layer.weights]
        return structure.by_layer([_rebuilt(attrgetter(name)(module), remaining, structure.dtype) for name in names])

    def amaxes(self, layer: int) -> list[tuple[TensorRole, int]]:
        """(role, weight index) of the tensors whose forward amax backward needs."""
        recipe, layer_structure, keys = self.structure.recipe, self.structure.layers[layer], []
        quantizes = any(not isinstance(weight, QuantizedTensor) for weight in self.plain)
        if quantizes and recipe.weight is not None and recipe.weight.scaling.history:
            keys += [(TensorRole.WEIGHT, part) for part in range(len(layer_structure.weights))]
        input_cells = recipe.activations[TensorRole.INPUT]
        if layer_structure.remakes and needs_amax(*input_cells) and scales_by_one_amax(input_cells):
            keys.append((TensorRole.INPUT, 0))
        return keys


def components_of(weights: Sequence[QuantizedTensor]) -> list[Tensor | None]:
    """Components of quantized weights, as `LayerArguments.components`."""
    storages = [weight.quantized_storage for weight in weights]
    return [
        storage.components.get(component.name) for storage in storages for component in storage.cell.format.components
    ]


def _rebuilt(weight: Tensor, left: Iterator[Tensor | None], dtype: torch.dtype) -> Tensor:
    live: Any = private_torch.local_tensor(weight)
    storage: QuantizedStorage = live.quantized_storage
    all_components = {part.name: next(left) for part in storage.cell.format.components}
    components = {name: component for name, component in all_components.items() if component is not None}
    whole = replace(storage, components=components, fetch=lambda which: storage.with_copy(which).components)
    return QuantizedTensor(whole, dtype)


class ForwardArguments(NamedTuple):
    """Arguments of a step's forward. `biases`: the biases that exist, in the order of their weights."""

    x: Tensor
    layers: LayerArguments
    residual: Tensor | None
    biases: Sequence[Tensor]

    @staticmethod
    def of(arguments: Sequence[Any]) -> ForwardArguments:
        """Group the arguments of a call, or one value for each argument, such as its gradient."""
        return ForwardArguments(*_grouped(arguments))


class BackwardArguments(NamedTuple):
    """Arguments of a step's backward.

    `grads`: gradients of the outputs of the last layer. `x`: input of the normalization (x + residual if there is a
    residual), or the input of the first layer if it is kept in high precision. `saved`: tensors that forward returned
    for backward. `of_total`: gradient of x + residual. `need_front`: whether x and the normalization's weight and bias
    need gradients. `need_weights`, `need_biases`: whether each weight and its bias need gradients.
    """

    grads: Sequence[Tensor]
    layers: LayerArguments
    x: Tensor | None
    saved: Sequence[Tensor]
    of_total: Tensor | None
    x_shape: Sequence[int]
    need_front: Sequence[bool]
    need_weights: Sequence[bool]
    need_biases: Sequence[bool]

    @staticmethod
    def of(arguments: Sequence[Any]) -> BackwardArguments:
        return BackwardArguments(*_grouped(arguments))

    @property
    def reads_gradient_of_x(self) -> bool:
        """Whether any needed gradient depends on the gradient of the first layer's input."""
        return any(self.need_front)


def _grouped(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Replace the arguments after the first that belong to the layers by one `LayerArguments`."""
    end = 1 + len(LayerArguments._fields)
    return (arguments[0], LayerArguments(*arguments[1:end]), *arguments[end:])


_LAYERS = (
    "Tensor[] plain, Tensor?[] components, Tensor module, str key, SymInt[] out_features, "
    "Tensor? norm_weight, Tensor? norm_bias, float eps"
)
FORWARD = f"(Tensor x, {_LAYERS}, Tensor? residual, Tensor[] biases) -> Tensor[]"
BACKWARD = (
    f"(Tensor[] grads, {_LAYERS}, Tensor? x, Tensor[] saved, Tensor? of_total, SymInt[] x_shape, bool[] need_front, "
    "bool[] need_weights, bool[] need_biases) -> Tensor[]"
)


class SavedInput(NamedTuple):
    """Layout of wgrad's operand of an input, as forward returns it for backward.

    `cell`: quantization of the operand; None: high precision. `transposed`: whether the operand is the transpose.
    `shape`: rows and columns of the operand.
    """

    cell: QuantSpec | None
    transposed: bool
    shape: tuple[int, int]

    @staticmethod
    def of(layers: LayerArguments, layer: int, x_shape: Sequence[int], like: Tensor) -> SavedInput | None:
        """The layout for a layer; None if nothing or x itself is kept. `like`: tensor of the dtype and device of x."""
        structure = layers.structure
        pair = _, second = structure.recipe.activations[TensorRole.INPUT]
        is_x = layer == 0 and second is None and not structure.normalization
        if not structure.layers[layer].keeps or is_x:
            return None
        *leading, features = layers.input_shape(x_shape, layer)
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
        return [operand.operand.components[component.name] for component in operand.operand.cell.format.components]

    def empty(self, like: Tensor) -> list[Tensor]:
        """Uninitialized tensors with the shapes and dtypes of `tensors`."""
        if self.cell is None:
            return [like.new_empty(self.shape)]
        tensors = []
        for component in self.cell.format.components:
            covered = zip(self.shape, component.block_shape, strict=True)
            grid = [1 if cover == ALL else sharding.ceil_div(size, cover) for size, cover in covered]
            tensors.append(like.new_empty(grid, dtype=component.encoding.storage))
        return tensors

    def operand(self, left: Iterator[Tensor]) -> WgradOperand:
        """Build the operand from the next tensors of `left`."""
        if self.cell is None:
            return WgradOperand(next(left), False)
        parts = {component.name: next(left) for component in self.cell.format.components}
        return WgradOperand(QuantizedStorage(self.cell, sharding.whole(self.shape), parts), self.transposed)
