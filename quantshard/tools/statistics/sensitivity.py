"""Which GEMM and which operand of a model loses most by being quantized, and which layers to keep in high precision.

A model in float32 makes one pass forward and backward. Each linear layer in it shows its input x, its weight w and the
gradient of its output dy; then each operand of each of its GEMMs is quantized alone, as a recipe has it, and

    error = |Q(a) b^T - a b^T| / |a b^T|        Frobenius norms; a: the operand, b: the other one, in float32

Independent normal values have `gaussian_error` there, the yardstick for each error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from quantshard import numerics
from quantshard.errors import ConfigurationError
from quantshard.formats import Orientation
from quantshard.gemm import operands
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts.context import autocast
from quantshard.modules.contexts.layer_recipes import HIGH_PRECISION, matches
from quantshard.numerics import RandomBits
from quantshard.recipe import Gemm, QuantSpec, Recipe, TensorRole
from quantshard.tensor import observation
from quantshard.tensor.observation import Observer
from quantshard.tensor.storage import GRADIENT_STREAM, KEY, QuantizedStorage


@dataclass(frozen=True)
class GemmError:
    """What quantizing one operand alone adds to one GEMM.

    Args:
        layer: name of the module.
        weight: name of the parameter.
        gemm: "fprop", "dgrad" or "wgrad".
        operand: "input", "weight" or "grad_output".
        error: relative to the GEMM's result.
        gaussian: `gaussian_error` of the operand's format.
    """

    layer: str
    weight: str
    gemm: str
    operand: str
    error: float
    gaussian: float = 0.0


@dataclass(frozen=True)
class LayerError:
    """What quantizing one layer alone adds to the whole: to the loss, and to the gradient of all parameters, relative
    to it."""

    layer: str
    loss: float
    gradient: float


def product_error(a: Tensor, b: Tensor, quantized: Callable[[Tensor], Tensor], hadamard: bool = False) -> float:
    """|Q(a) b^T - a b^T| / |a b^T| of a [M, S] and b [P, S]; `hadamard`: `quantized` gives what the transformed a is
    quantized to, which is multiplied with a transformed b."""
    q = quantized(a)
    if hadamard:
        a, b = numerics.hadamard16(a), numerics.hadamard16(b)
    exact = torch.linalg.matrix_norm(a @ b.t())
    error = torch.linalg.matrix_norm((q - a) @ b.t())
    return float(error / exact) if exact else 0.0


class GemmErrors(Observer):
    """Is shown the layers of a model in float32 in a pass, and quantizes their operands by their recipes, one by one.

    Args:
        recipes: by the name of a module.
        names: of the module and the parameter, by a weight's key.
    """

    def __init__(self, recipes: Mapping[str, Recipe], names: Mapping[int, tuple[str, str]]) -> None:
        self._recipes, self._names, self.found = recipes, names, list[GemmError]()

    def see_operand(
        self, key: Tensor, role: TensorRole, for_wgrad: bool, values: Tensor, operand: Tensor | QuantizedStorage
    ) -> None:
        """Of a layer that is quantized in this pass there is nothing to find out."""

    def see_plain(
        self, keys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """As of all observers. An expert without tokens has no errors."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if not len(rows):
            return
        for key, weight, output in zip(keys, weights, outputs, strict=True):
            if int(key) in self._names and output.requires_grad:
                output.register_hook(partial(self._measure, int(key), rows, weight.detach().float()))

    @torch.no_grad()
    def _measure(self, key: int, x: Tensor, w: Tensor, grad: Tensor) -> None:
        dy = grad.reshape(-1, grad.shape[-1]).float()
        recipe = self._recipes[self._names[key][0]]
        (x_first, x_wgrad), (dy_first, dy_wgrad) = (
            recipe.activations[role] for role in (TensorRole.INPUT, TensorRole.GRAD_OUTPUT)
        )
        weight = recipe.weight
        errors = [
            (Gemm.FPROP, TensorRole.INPUT, x_first, _alone(x, w, x_first, key)),
            (Gemm.FPROP, TensorRole.WEIGHT, weight, _of_weight(w, x, weight, transposed=False)),
            (Gemm.DGRAD, TensorRole.GRAD_OUTPUT, dy_first, _alone(dy, w.t(), dy_first, key)),
            (Gemm.DGRAD, TensorRole.WEIGHT, weight, _of_weight(w, dy, weight, transposed=True)),
            (Gemm.WGRAD, TensorRole.GRAD_OUTPUT, dy_wgrad, _alone(dy.t(), x.t(), dy_wgrad, key, transposed=True)),
            (Gemm.WGRAD, TensorRole.INPUT, x_wgrad, _alone(x.t(), dy.t(), x_wgrad, key, transposed=True)),
        ]
        self.found += [
            GemmError(*self._names[key], gemm.value, role.value, error, gaussian_error(cell))
            for gemm, role, cell, error in errors
        ]


def _alone(a: Tensor, b: Tensor, cell: QuantSpec | None, key: int, transposed: bool = False) -> float:
    """Of an input or a gradient, or, `transposed`, as wgrad reads it; under delayed scaling it is scaled by its own
    amax, as if that were the past one."""
    if cell is None:
        return 0.0

    def quantized(values: Tensor) -> Tensor:
        values = values.contiguous()
        shard = operands.operand_shard((values.shape[0], values.shape[1]), cell)
        words = RandomBits(key, 0, GRADIENT_STREAM, shard.global_shape, transposed=transposed)
        drawn = words if cell.scaling.stochastic_rounding else None
        return operands.quantize_operand(values, cell, words=drawn).dequantize()

    return product_error(a, b, quantized, cell.scaling.random_hadamard)


@lru_cache
def gaussian_error(cell: QuantSpec | None) -> float:
    """|Q(a) - a| / |a| of independent normal values a, quantized by `cell`; 0 if None, which does not quantize.

    An operand whose values do not depend on those of the other operand adds this error to a GEMM.
    """
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    return _alone(a, torch.eye(256, dtype=torch.float32, device="cpu"), cell, key=0)


def _of_weight(w: Tensor, other: Tensor, cell: QuantSpec | None, transposed: bool) -> float:
    """`transposed`: as dgrad reads it."""
    if cell is None:
        return 0.0
    storage = operands.quantize_operand(w, cell)
    copy = Orientation.COLUMNWISE if transposed and storage.has(Orientation.COLUMNWISE) else Orientation.ROWWISE
    q = storage.dequantize(copy)
    return product_error(w.t() if transposed else w, other, lambda _: q.t() if transposed else q)


def gemm_errors(model: nn.Module, recipes: Mapping[str, Recipe], run: Callable[[], object]) -> list[GemmError]:
    """The error that each operand of each GEMM adds, largest first.

    Args:
        model: in float32, in train mode.
        recipes: the names of the modules to look at, each with the recipe by which its operands are quantized.
        run: makes one pass, forward and backward, in high precision.

    Raises:
        ConfigurationError: another observer is there, or the pass called none of the layers.
    """
    names: dict[int, tuple[str, str]] = {}
    for name in recipes:
        module = model.get_submodule(name)
        assert isinstance(module, QuantizedModule), name
        names |= {int(module.weight_state(leaf)[KEY]): (name, f"{name}.{leaf}") for leaf in module._weights}
    if observation.active is not None:
        raise ConfigurationError("a Statistics samples this step; close() it before errors of GEMMs are measured")
    observer = observation.active = GemmErrors(recipes, names)
    try:
        run()
    finally:
        observation.active = None
    if not observer.found:
        raise ConfigurationError("the pass called no layer that the recipe quantizes, so there is nothing to compare")
    return sorted(observer.found, key=lambda each: -each.error)


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss of a pass that `run` makes, and the gradients that it leaves, float32 by name; which are cleared."""
    loss = float(run().detach())
    found = {name: param.grad.detach().float() for name, param in model.named_parameters() if param.grad is not None}
    for param in model.parameters():
        param.grad = None
    return loss, found


def gradient_error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """|g - exact| / |exact| of the gradients of all parameters as one vector; of those that both have."""
    names = [name for name in exact if name in found]
    error = sum(float(_square(found[name] - exact[name])) for name in names)
    return (error / max(sum(float(_square(exact[name])) for name in names), 1e-300)) ** 0.5


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def layer_errors(model: nn.Module, recipes: Mapping[str, Recipe], run: Callable[[], Tensor]) -> list[LayerError]:
    """What each layer adds to the whole if it alone is quantized, largest gradient error first: a pass for each.

    Arguments as of `gemm_errors`; `run` returns the loss. Under delayed scaling there are two passes for each, of which
    the first fills the histories.
    """
    exact_loss, exact = gradients(model, run)
    found = []
    for name, recipe in recipes.items():
        with _quantized_alone(model.get_submodule(name), recipe):
            for _ in range(2 if recipe.is_delayed else 1):
                loss, grads = gradients(model, run)
        found.append(LayerError(name, loss - exact_loss, gradient_error(grads, exact)))
    return sorted(found, key=lambda each: -each.gradient)


@contextmanager
def _quantized_alone(module: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Calls of a module enter an autocast of their own."""
    entered: list[autocast] = []

    def enter(*_: object) -> None:
        entered.append(autocast(recipe=recipe))
        entered[-1].__enter__()

    def leave(*_: object) -> None:
        entered.pop().__exit__(None, None, None)

    hooks = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class RecipeSuggestion:
    """Which layers to keep in high precision.

    Args:
        kept: their names, in the model's order.
        removed: their share of the summed squared errors.
        layers: number of quantized layers.
        recipes: as `quantshard train --recipe` takes them: `layers.1=bf16,*=mxfp8`.
        ratio: the largest error of a layer, relative to the median.
    """

    kept: tuple[str, ...]
    removed: float
    layers: int
    recipes: str
    ratio: float


def suggest(
    errors: Mapping[str, Sequence[float]], share: float | None, patterns: Mapping[str, str], names: Sequence[str]
) -> RecipeSuggestion:
    """Choose the layers that stand out, or the fewest layers that have `share` of all squared errors.

    A layer stands out if the root mean square e of its errors satisfies

        e > 2 median  and  e > median + 6 MAD        MAD: the median of |e - median|; both over all quantized layers

    or if one of its errors is not finite. An error of 0 means that nothing was quantized, and does not count.

    Args:
        errors: the errors of each quantized layer, in the model's order.
        share: None for the layers that stand out.
        patterns: the model's recipes by patterns of names, of which the first that matches holds.
        names: of all layers that may have a recipe of their own, whether quantized or not.

    Raises:
        ConfigurationError: `share` is not between 0 and 1.
    """
    if share is not None and not 0 < share < 1:
        raise ConfigurationError(f"{share}: the share of the error to remove is above 0 and below 1")
    squares = _squares(errors)
    means = {name: math.sqrt(squares[name] / sum(map(bool, errors[name]))) for name in errors if any(errors[name])}
    median = statistics.median(means.values()) if means else 0.0
    deviation = statistics.median(abs(each - median) for each in means.values()) if means else 0.0
    total, removed, chosen = sum(squares.values()), 0.0, list[str]()
    if share is None:
        limit = max(2 * median, median + 6 * deviation)
        chosen = [name for name, each in means.items() if each > limit or not all(map(math.isfinite, errors[name]))]
        removed = sum(squares[name] for name in chosen)
    else:
        for name in sorted(squares, key=lambda each: (-squares[each], each)):
            if not total or removed >= share * total:
                break
            chosen.append(name)
            removed += squares[name]
    kept = tuple(name for name in errors if name in set(chosen))
    recipes = HIGH_PRECISION if len(kept) == len(errors) else _sparing(kept, patterns, names)
    ratio = max(means.values()) / median if median else 1.0
    return RecipeSuggestion(kept, removed / total if total else 0.0, len(errors), recipes, ratio)


def _squares(errors: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The summed squared errors of each layer, relative to the largest error, so that no square overflows. If errors
    are not finite, those are 1 and all others 0."""
    everything = [each for of_layer in errors.values() for each in of_layer]
    if not all(map(math.isfinite, everything)):
        return {name: float(sum(not math.isfinite(each) for each in of_layer)) for name, of_layer in errors.items()}
    largest = max(everything, default=0.0) or 1.0
    return {name: sum((each / largest) ** 2 for each in of_layer) for name, of_layer in errors.items()}


def _sparing(kept: Sequence[str], patterns: Mapping[str, str], names: Sequence[str]) -> str:
    """The patterns, with each kept layer just before the one that held for it, and without those that then would do
    nothing, which `train` refuses."""
    found, left = dict[str, str](), list(names)
    for pattern, recipe in patterns.items():
        own = [name for name in kept if matches(pattern, name)]
        found |= dict.fromkeys(own, HIGH_PRECISION)
        left = [name for name in left if not any(matches(each, name) for each in own)]
        rest = [name for name in left if not matches(pattern, name)]
        if pattern == "*" or len(rest) < len(left):
            found[pattern] = recipe
        left = rest
    return ",".join(f"{pattern}={recipe}" for pattern, recipe in found.items())
