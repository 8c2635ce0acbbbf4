"""What the operators of `operators` take: tensors, numbers and a key, all operators the same.

So a module goes in as a handle, what is fixed by the key of its `StepStructure`, a quantized weight as its components.
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
from quantshard.modules.gemms.linear_operands import WgradOperand, cells, keeps_transposed
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.modules.gemms.structure import StepStructure, structure_of
from quantshard.recipe import QuantSpec, Recipe, TensorRole
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage


class LinearModule(Protocol):
    """What is asked of the module of a linear layer: a `QuantizedModule`, or one of several that it has under names."""

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState: ...

    def weight_operand(self, name: str, call: LinearContext, device: torch.device) -> Tensor: ...


_modules: WeakValueDictionary[int, LinearModule] = WeakValueDictionary()
"""By the addresses of their handles."""


def handle(module: LinearModule, device: torch.device) -> Tensor:
    """A tensor that stands for a module by its address: one compiled graph serves all of them, as it would not all
    values of an int, and a CUDA graph holds what a GPU has. It is read without waiting for one. `device`: where the
    weights are."""
    found = torch.empty(1, dtype=torch.uint8, device="cpu" if device.type == "meta" else device)
    if not private_torch.is_traced(found):
        _modules[private_torch.keep_address(found).data_ptr()] = module
    return found


def handle_beside(module: Any, known: Tensor) -> Tensor:
    """The handle that a module has, or another, where its parameters have moved."""
    device = next((param.device for param in module.parameters()), known.device)
    return known if device == known.device or device.type == "meta" else handle(module, device)


# Arguments -----------------------------------------------------------------------------------------------------------


class LayerArguments(NamedTuple):
    """Some linear layers of a module, with a normalization in front of them or without.

    `plain`: the weights; or none, and the `components` of quantized ones, those of each weight as in the row of its
    format, None for those of a copy that is not there. `key`: of the `StepStructure`. `out_features`: of each weight.
    `norm_weight`, `norm_bias`, `eps`: of the normalization.
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
        """What the graph was traced for."""
        return structure_of(self.key)

    def input_shape(self, x_shape: Sequence[int], layer: int) -> tuple[int, ...]:
        """Shape of the input of a layer: the first has that of x, or of x normalized."""
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
        states = [module._linear_state(each.weights, structure.recipe, each.prefix) for each in structure.layers]
        return module, [replace(state, record=structure.record) for state in states]

    def weights_of(self, module: LinearModule) -> list[list[Tensor]]:
        """The weights of each layer, put together again; a copy that was not given is that of the live one."""
        structure = self.structure
        if self.plain:
            return structure.by_layer(self.plain)
        left = iter(self.components)
        names = [name for layer in structure.layers for name in layer.weights]
        return structure.by_layer([_rebuilt(attrgetter(name)(module), left, structure.dtype) for name in names])

    def amaxes(self, layer: int) -> list[tuple[TensorRole, int]]:
        """Of which tensors backward needs the amax that forward scaled by: of role and part."""
        recipe, asked, found = self.structure.recipe, self.structure.layers[layer], []
        quantizes = any(not isinstance(weight, QuantizedTensor) for weight in self.plain)
        if quantizes and recipe.weight is not None and recipe.weight.scaling.history:
            found += [(TensorRole.WEIGHT, part) for part in range(len(asked.weights))]
        read = cells(recipe, TensorRole.INPUT)
        if asked.remakes and needs_amax(*read) and scales_by_one_amax(read):
            found.append((TensorRole.INPUT, 0))
        return found


def components_of(weights: Sequence[QuantizedTensor]) -> list[Tensor | None]:
    """What an operator is given of quantized weights."""
    storages = [weight.quantized_storage for weight in weights]
    return [storage.components.get(each.name) for storage in storages for each in storage.cell.format.components]


def _rebuilt(weight: Tensor, left: Iterator[Tensor | None], dtype: torch.dtype) -> Tensor:
    live: Any = private_torch.local_tensor(weight)
    storage: QuantizedStorage = live.quantized_storage
    given = {each.name: next(left) for each in storage.cell.format.components}
    components = {name: component for name, component in given.items() if component is not None}
    whole = replace(storage, components=components, fetch=lambda which: storage.with_copy(which).components)
    return QuantizedTensor(whole, dtype)


class ForwardArguments(NamedTuple):
    """Arguments of a step's forward. `biases`: those that there are, in the order of their weights."""

    x: Tensor
    layers: LayerArguments
    residual: Tensor | None
    biases: Sequence[Tensor]

    @staticmethod
    def of(arguments: Sequence[Any]) -> ForwardArguments:
        """The arguments of a call, or what is known of each of them, such as gradients."""
        return ForwardArguments(*_grouped(arguments))


class BackwardArguments(NamedTuple):
    """Arguments of a step's backward.

    `grads`: of the outputs of the last layer. `x`: what is normalized, x + residual if there is a residual; or the
    input of the first layer, where that is kept in high precision. `saved`: what forward has returned for backward.
    `of_total`: the gradient of x + residual. Which gradients are needed: `need_front`, of x and of the normalization's
    weight and bias; `need_weights`, `need_biases`, for each weight.
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
        """True if some gradient is made of that of the first layer's input."""
        return any(self.need_front)


def _grouped(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The first argument, those of the layers as one, and the others."""
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
    """What is kept of the input of a layer for wgrad: quantized by `cell`, or in high precision; or its transpose.

    `shape`: rows and columns.
    """

    cell: QuantSpec | None
    transposed: bool
    shape: tuple[int, int]

    @staticmethod
    def of(layers: LayerArguments, layer: int, x_shape: Sequence[int], like: Tensor) -> SavedInput | None:
        """None if there is nothing, or if it is x itself. `like`: a tensor of the dtype of x, where that is."""
        structure = layers.structure
        pair = _, second = cells(structure.recipe, TensorRole.INPUT)
        is_x = layer == 0 and second is None and not structure.normalization
        if not structure.layers[layer].keeps or is_x:
            return None
        *leading, features = layers.input_shape(x_shape, layer)
        tokens = 1
        for size in leading:
            tokens = tokens * size
        if second is None or not keeps_transposed(pair, like):
            return SavedInput(second, False, (tokens, features))
        padding = -tokens % 16 if second.scaling.random_hadamard else 0  # the transform pads the summed dim
        return SavedInput(second, True, (features, tokens + padding))

    def tensors(self, operand: WgradOperand) -> list[Tensor]:
        """Those of an operand."""
        if isinstance(operand.operand, Tensor):
            return [operand.operand]
        return [operand.operand.components[component.name] for component in operand.operand.cell.format.components]

    def empty(self, like: Tensor) -> list[Tensor]:
        """Tensors of their shapes and dtypes."""
        if self.cell is None:
            return [like.new_empty(self.shape)]
        found = []
        for component in self.cell.format.components:
            covered = zip(self.shape, component.block_shape, strict=True)
            grid = [1 if cover == ALL else sharding.ceil_div(size, cover) for size, cover in covered]
            found.append(like.new_empty(grid, dtype=component.encoding.storage))
        return found

    def operand(self, left: Iterator[Tensor]) -> WgradOperand:
        """The operand of the next of some tensors."""
        if self.cell is None:
            return WgradOperand(next(left), False)
        parts = {component.name: next(left) for component in self.cell.format.components}
        return WgradOperand(QuantizedStorage(self.cell, sharding.whole(self.shape), parts), self.transposed)
