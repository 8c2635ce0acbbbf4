"""What the operators of `operators` take: tensors and names, all operators the same.

So a module goes in as a handle, the setting of autocast by its name, a quantized weight as its components.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quantshard import private_torch, sharding
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import ALL
from quantshard.modules.contexts import context
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import LinearState, WgradOperand, cells, keeps_transposed
from quantshard.recipe import Cell, Recipe, TensorRole
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage

T = TypeVar("T")


class LinearModule(Protocol):
    """What is asked of the module of a linear layer: a `QuantizedModule`."""

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState: ...

    def weight_operand(self, name: str, call: LinearContext, device: torch.device) -> Tensor: ...


_modules: WeakValueDictionary[int, LinearModule] = WeakValueDictionary()
_numbers = count()


def handle(module: LinearModule) -> Tensor:
    """A number for a module, as an int64 tensor: one graph serves all values of a tensor, but not of an int."""
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor(number, dtype=torch.int64, device="cpu")


# Arguments -----------------------------------------------------------------------------------------------------------


class WeightArguments(NamedTuple):
    """The weights of some layers as operators take them: `plain`, or none and the `components` of quantized ones.

    `names`: those of the components, with commas, each behind the number of its weight and a colon.
    """

    plain: Sequence[Tensor]
    components: Sequence[Tensor]
    names: str
    dtype: torch.dtype


class LayerArguments(NamedTuple):
    """Which linear layers of a module, one behind the other, and what is wanted of them.

    `weights`: their names, with commas, and semicolons between layers; so are the `prefixes` of histories' names.
    `out_features`, `biased`: of each weight, and whether there is a bias with it. `keeps`, `remakes`: for each layer,
    whether what wgrad reads of its input is kept by forward, or made again by backward; neither if no backward comes.
    """

    module: Tensor
    weights: str
    prefixes: str
    out_features: Sequence[int]
    biased: Sequence[bool]
    keeps: Sequence[bool]
    remakes: Sequence[bool]
    record: bool
    setting: str

    @property
    def names(self) -> list[list[str]]:
        """The names of the weights of each layer."""
        return [names.split(",") for names in self.weights.split(";")]

    def by_layer(self, values: Sequence[T]) -> list[list[T]]:
        """Values, one for each weight, as those of each layer."""
        left = iter(values)
        return [[next(left) for _ in names] for names in self.names]

    def input_shape(self, x_shape: Sequence[int], layer: int) -> tuple[int, ...]:
        """Shape of the input of a layer: the first has that of x, or of x normalized."""
        return tuple(x_shape) if layer == 0 else (*x_shape[:-1], self.by_layer(self.out_features)[layer - 1][0])

    def states(self) -> tuple[LinearModule, list[LinearState]]:
        """The module, and the state of each layer."""
        module, recipe = _modules.get(int(self.module)), context.setting(self.setting).recipe
        if module is None:
            raise UnsupportedOperationError(
                f"the module of the compiled layer of {self.weights!r} was deleted before backward ran; keep a "
                "reference to it until then"
            )
        named = zip(self.names, self.prefixes.split(";"), strict=True)
        states = [module._linear_state(names, recipe, prefix) for names, prefix in named]
        return module, [replace(state, record=self.record) for state in states]

    def weights_of(self, module: LinearModule, given: WeightArguments) -> list[list[Tensor]]:
        """The weights of each layer, put together again; a copy that was not given is that of the live one."""
        if given.plain:
            return self.by_layer(given.plain)
        names = [name for names in self.names for name in names]
        components: list[dict[str, Tensor]] = [{} for _ in names]
        for name, component in zip(given.names.split(","), given.components, strict=True):
            part, _, component_name = name.partition(":")
            components[int(part)][component_name] = component
        pairs = zip(names, components, strict=True)
        return self.by_layer([_rebuilt(getattr(module, name), found, given.dtype) for name, found in pairs])

    def amaxes(self, given: WeightArguments, layer: int) -> list[tuple[TensorRole, int]]:
        """Of which tensors backward needs the amax that forward scaled by: of role and part."""
        recipe, found = context.setting(self.setting).recipe, []
        quantizes = any(not isinstance(weight, QuantizedTensor) for weight in given.plain)
        if quantizes and recipe.weight is not None and recipe.weight.scaling.history:
            found += [(TensorRole.WEIGHT, part) for part in range(len(self.names[layer]))]
        if self.remakes[layer] and any(cell and cell.scaling.history for cell in cells(recipe, TensorRole.INPUT)):
            found.append((TensorRole.INPUT, 0))
        return found


def _rebuilt(weight: Tensor, components: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    live: Any = private_torch.local_tensor(weight)
    storage: QuantizedStorage = live.quantized_storage
    whole = replace(storage, components=components, fetch=lambda which: storage.with_copy(which).components)
    return QuantizedTensor(whole, dtype)


class FusedArguments(NamedTuple):
    """What an operator does besides linear layers: a normalization in front, an activation between two; "" for none.

    `norm_weight`, `norm_bias`, `eps`, `zero_centered_gamma`: of the normalization.
    """

    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    normalization: str = ""
    eps: float = 0.0
    zero_centered_gamma: bool = False
    activation: str = ""


class ForwardArguments(NamedTuple):
    """Arguments of a step's forward, grouped. `biases`: those that there are, in the order of their weights."""

    x: Tensor
    weights: WeightArguments
    layers: LayerArguments
    fused: FusedArguments
    residual: Tensor | None
    biases: Sequence[Tensor]

    @staticmethod
    def of(arguments: Sequence[Any]) -> ForwardArguments:
        return ForwardArguments(*_grouped(arguments))


class BackwardArguments(NamedTuple):
    """Arguments of a step's backward, grouped.

    `grads`: of the outputs of the last layer. `x`: what is normalized, x + residual if there is a residual; or the
    input of the first layer, where that is kept in high precision. `saved`: what forward has returned for backward.
    `of_total`: the gradient of x + residual. Which gradients are needed: `need_front`, of x and of the normalization's
    weight and bias; `need_weights`, `need_biases`, for each weight. `bias_dtypes`: their names, with commas.
    """

    grads: Sequence[Tensor]
    weights: WeightArguments
    layers: LayerArguments
    fused: FusedArguments
    x: Tensor | None
    saved: Sequence[Tensor]
    of_total: Tensor | None
    x_shape: Sequence[int]
    need_front: Sequence[bool]
    need_weights: Sequence[bool]
    need_biases: Sequence[bool]
    bias_dtypes: str

    @staticmethod
    def of(arguments: Sequence[Any]) -> BackwardArguments:
        return BackwardArguments(*_grouped(arguments))

    @property
    def dtypes_of_biases(self) -> list[torch.dtype | None]:
        """For each weight, None where it has no bias."""
        names = iter(self.bias_dtypes.split(","))
        return [getattr(torch, next(names)) if adds else None for adds in self.layers.biased]

    @property
    def reads_gradient_of_x(self) -> bool:
        """True if some gradient is made of that of the first layer's input."""
        return any(self.need_front)


def _grouped(arguments: Sequence[Any]) -> Iterator[Any]:
    """The first argument, the three groups that operators share, and the others."""
    left = iter(arguments)
    yield next(left)
    for group in (WeightArguments, LayerArguments, FusedArguments):
        yield group(*(next(left) for _ in group._fields))
    yield from left


_SHARED = (
    "Tensor[] plain, Tensor[] components, str names, ScalarType dtype, "
    "Tensor module, str weights, str prefixes, SymInt[] out_features, bool[] biased, bool[] keeps, bool[] remakes, "
    "bool record, str setting, "
    "Tensor? norm_weight, Tensor? norm_bias, str normalization, float eps, bool zero_centered_gamma, str activation"
)
FORWARD = f"(Tensor x, {_SHARED}, Tensor? residual, Tensor[] biases) -> Tensor[]"
BACKWARD = (
    f"(Tensor[] grads, {_SHARED}, Tensor? x, Tensor[] saved, Tensor? of_total, SymInt[] x_shape, bool[] need_front, "
    "bool[] need_weights, bool[] need_biases, str bias_dtypes) -> Tensor[]"
)
PLACES = {argument.split()[-1]: place for place, argument in enumerate(FORWARD.partition(")")[0].split(", "))}
"""Name of an argument of forward -> its index."""


class SavedInput(NamedTuple):
    """What is kept of the input of a layer for wgrad: quantized by `cell`, or in high precision; or its transpose.

    `shape`: rows and columns.
    """

    cell: Cell | None
    transposed: bool
    shape: tuple[int, int]

    @staticmethod
    def of(
        layers: LayerArguments, layer: int, fused: FusedArguments, x_shape: Sequence[int], like: Tensor
    ) -> SavedInput | None:
        """None if there is nothing, or if it is x itself. `like`: a tensor of the dtype of x, where that is."""
        first, second = cells(context.setting(layers.setting).recipe, TensorRole.INPUT)
        is_x = layer == 0 and second is None and not fused.normalization
        if not layers.keeps[layer] or is_x:
            return None
        *leading, features = layers.input_shape(x_shape, layer)
        tokens = 1
        for size in leading:
            tokens = tokens * size
        if second is None or not keeps_transposed(first, second, like):
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
            covered = zip(self.shape, component.covers, strict=True)
            grid = [1 if cover == ALL else sharding.ceil_div(size, cover) for size, cover in covered]
            found.append(like.new_empty(grid, dtype=component.encoding.storage))
        return found

    def operand(self, left: Iterator[Tensor]) -> WgradOperand:
        """The operand of the next of some tensors."""
        if self.cell is None:
            return WgradOperand(next(left), False)
        parts = {component.name: next(left) for component in self.cell.format.components}
        return WgradOperand(QuantizedStorage(self.cell, sharding.whole(self.shape), parts), self.transposed)
