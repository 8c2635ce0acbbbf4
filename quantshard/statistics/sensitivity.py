"""Which GEMM and which operand of a model loses most by being quantized, and which layers to keep in high precision.

A model in float32 makes one pass forward and backward. Each linear layer in it shows its input x, its weight w and the
gradient of its output dy; then each operand of each of its GEMMs is quantized alone, as a recipe has it, and

    error = |Q(a) b^T - a b^T| / |a b^T|        Frobenius norms; a: the operand, b: the other one, in float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quantshard import numerics
from quantshard.errors import ConfigurationError
from quantshard.formats import Copy
from quantshard.gemm import operands
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts.context import autocast
from quantshard.modules.contexts.layer_recipes import HIGH_PRECISION, matches
from quantshard.numerics import RandomBits
from quantshard.recipe import Cell, Gemm, Recipe, TensorRole
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
    """

    layer: str
    weight: str
    gemm: str
    operand: str
    error: float


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
        found = [
            (Gemm.FPROP, TensorRole.INPUT, _alone(x, w, x_first, key)),
            (Gemm.FPROP, TensorRole.WEIGHT, _of_weight(w, x, weight, transposed=False)),
            (Gemm.DGRAD, TensorRole.GRAD_OUTPUT, _alone(dy, w.t(), dy_first, key)),
            (Gemm.DGRAD, TensorRole.WEIGHT, _of_weight(w, dy, weight, transposed=True)),
            (Gemm.WGRAD, TensorRole.GRAD_OUTPUT, _alone(dy.t(), x.t(), dy_wgrad, key, transposed=True)),
            (Gemm.WGRAD, TensorRole.INPUT, _alone(x.t(), dy.t(), x_wgrad, key, transposed=True)),
        ]
        self.found += [GemmError(*self._names[key], gemm.value, role.value, error) for gemm, role, error in found]


def _alone(a: Tensor, b: Tensor, cell: Cell | None, key: int, transposed: bool = False) -> float:
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


def _of_weight(w: Tensor, other: Tensor, cell: Cell | None, transposed: bool) -> float:
    """`transposed`: as dgrad reads it."""
    if cell is None:
        return 0.0
    storage = operands.quantize_operand(w, cell)
    copy = Copy.COLUMNWISE if transposed and storage.has(Copy.COLUMNWISE) else Copy.ROWWISE
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
    """Which layers to keep in high precision, in the model's order: their names, the share of the summed squared errors
    that goes with them, of how many layers they are some, and the recipes that do so, as `quantshard train --recipe`
    takes them: `layers.1=bf16,*=mxfp8`."""

    kept: tuple[str, ...]
    removed: float
    layers: int
    recipes: str


def suggest(
    scores: Mapping[str, float], share: float, patterns: Mapping[str, str], names: Sequence[str]
) -> RecipeSuggestion:
    """The fewest layers whose squared errors are `share` of all: those with the largest.

    Args:
        scores: of each layer that is quantized, in the model's order, a sum of squared errors.
        patterns: the model's recipes by patterns of names, of which the first that matches holds.
        names: of all that may have a recipe of its own, whether quantized or not.

    Raises:
        ConfigurationError: `share` is none.
    """
    if not 0 < share < 1:
        raise ConfigurationError(f"{share}: the share of the error to remove is above 0 and below 1")
    total, removed, chosen = sum(scores.values()), 0.0, list[str]()
    for name in sorted(scores, key=lambda each: (-scores[each], each)):
        if not total or removed >= share * total:
            break
        chosen.append(name)
        removed += scores[name]
    kept = tuple(name for name in scores if name in set(chosen))
    recipes = HIGH_PRECISION if len(kept) == len(scores) else _sparing(kept, patterns, names)
    return RecipeSuggestion(kept, removed / total if total else 0.0, len(scores), recipes)


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


def scores_of(found: Iterable[GemmError]) -> dict[str, float]:
    """Of each layer the sum of the squares of its errors."""
    scores: dict[str, float] = {}
    for each in found:
        scores[each.layer] = scores.get(each.layer, 0.0) + each.error**2
    return scores
