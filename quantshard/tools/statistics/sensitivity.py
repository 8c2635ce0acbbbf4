"""Finds the GEMMs and operands that lose most by quantization.

A float32 model runs one forward and backward pass. Each linear layer reports its input x, its weight w and the gradient
of its output dy. Then each operand of each GEMM is quantized alone, as a recipe specifies, and

    error = |Q(a) b^T - a b^T| / |a b^T|        Frobenius norms; a: the operand, b: the other one, in float32

Compare with `gaussian_error`, the error of independent normal values.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from quantshard import numerics
from quantshard.errors import ConfigurationError
from quantshard.formats import Orientation
from quantshard.gemm import operands
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts.layer_recipes import HIGH_PRECISION
from quantshard.numerics import RandomBits
from quantshard.recipe import Gemm, QuantSpec, Recipe, TensorRole
from quantshard.tensor import observation
from quantshard.tensor.observation import Observer
from quantshard.tensor.parameter_state import GRADIENT_STREAM, RNG_KEY
from quantshard.tensor.storage import QuantizedStorage


@dataclass(frozen=True)
class GemmError:
    """Error of one GEMM, relative to its result, if only one operand is quantized.

    `layer`, `weight`: names of the module and the parameter. `gemm`: "fprop", "dgrad" or "wgrad". `operand`: "input",
    "weight" or "grad_output". `gaussian`: `gaussian_error` of the operand's format.
    """

    layer: str
    weight: str
    gemm: str
    operand: str
    error: float
    gaussian: float


class _GemmErrors(Observer):
    """Quantizes operands of a float32 pass one at a time. `names`: (module, parameter) names by a weight's key."""

    def __init__(self, recipes: Mapping[str, Recipe], names: Mapping[int, tuple[str, str]]) -> None:
        self._recipes, self._names, self.errors = recipes, names, list[GemmError]()

    def see_operand(
        self, key: Tensor, role: TensorRole, for_wgrad: bool, values: Tensor, operand: Tensor | QuantizedStorage
    ) -> None:
        """Ignore layers that are quantized in this pass."""

    def see_plain(
        self, keys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """See `Observer`. An expert without tokens has no errors."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        for key, weight, output in zip(keys, weights, outputs, strict=True) if len(rows) else ():
            if int(key) in self._names and output.requires_grad:
                output.register_hook(partial(self._measure, int(key), rows, weight.detach().float()))

    @torch.no_grad()
    def _measure(self, key: int, x: Tensor, w: Tensor, grad: Tensor) -> None:
        dy = grad.reshape(-1, grad.shape[-1]).float()
        recipe = self._recipes[self._names[key][0]]
        x_first, x_wgrad = recipe.activations[TensorRole.INPUT]
        dy_first, dy_wgrad = recipe.activations[TensorRole.GRAD_OUTPUT]
        weight = recipe.weight
        errors = [
            (Gemm.FPROP, TensorRole.INPUT, x_first, _alone(x, w, x_first, key)),
            (Gemm.FPROP, TensorRole.WEIGHT, weight, _of_weight(w, x, weight, transposed=False)),
            (Gemm.DGRAD, TensorRole.GRAD_OUTPUT, dy_first, _alone(dy, w.t(), dy_first, key)),
            (Gemm.DGRAD, TensorRole.WEIGHT, weight, _of_weight(w, dy, weight, transposed=True)),
            (Gemm.WGRAD, TensorRole.GRAD_OUTPUT, dy_wgrad, _alone(dy.t(), x.t(), dy_wgrad, key, transposed=True)),
            (Gemm.WGRAD, TensorRole.INPUT, x_wgrad, _alone(x.t(), dy.t(), x_wgrad, key, transposed=True)),
        ]
        for gemm, role, spec, error in errors:
            self.errors.append(GemmError(*self._names[key], gemm.value, role.value, error, gaussian_error(spec)))


def _alone(a: Tensor, b: Tensor, spec: QuantSpec | None, key: int, transposed: bool = False) -> float:
    """Error of a GEMM if only the input or gradient a is quantized. `transposed`: as wgrad reads it."""
    if spec is None:
        return 0.0
    a = a.contiguous()
    shape = operands.operand_shard((a.shape[0], a.shape[1]), spec).global_shape
    words = RandomBits(key, 0, GRADIENT_STREAM, shape, transposed=transposed)
    q = operands.quantize_operand(a, spec, words=lambda _: words).dequantize()
    if spec.scaling.random_hadamard:
        # q is transformed
        a, b = numerics.hadamard16(a), numerics.hadamard16(b)
    return _product_error(q, a, b)


def _of_weight(w: Tensor, other: Tensor, spec: QuantSpec | None, transposed: bool) -> float:
    """Error of a GEMM if only the weight is quantized. `transposed`: as dgrad reads it."""
    if spec is None:
        return 0.0
    storage = operands.quantize_operand(w, spec)
    copy = Orientation.COLUMNWISE if transposed and storage.has(Orientation.COLUMNWISE) else Orientation.ROWWISE
    q = storage.dequantize(copy)
    return _product_error(q.t(), w.t(), other) if transposed else _product_error(q, w, other)


def _product_error(q: Tensor, a: Tensor, b: Tensor) -> float:
    exact = torch.linalg.matrix_norm(a @ b.t())
    return float(torch.linalg.matrix_norm((q - a) @ b.t()) / exact) if exact else 0.0


@lru_cache
def gaussian_error(spec: QuantSpec | None) -> float:
    """|Q(a) - a| / |a| of independent normal values a, quantized by `spec`; 0 for None, which does not quantize."""
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    return _alone(a, torch.eye(256, dtype=torch.float32, device="cpu"), spec, key=0)


def gemm_errors(model: nn.Module, recipes: Mapping[str, Recipe], run: Callable[[], object]) -> list[GemmError]:
    """Measure the errors of all operands in one pass (`run`) of a float32 model under `recipes`, largest first."""
    names: dict[int, tuple[str, str]] = {}
    for name in recipes:
        module = model.get_submodule(name)
        assert isinstance(module, QuantizedModule), name
        for weight in module._weights:
            names[int(module.weight_state(weight)[RNG_KEY])] = (name, f"{name}.{weight}")
    observer = observation.active = _GemmErrors(recipes, names)
    try:
        run()
    finally:
        observation.active = None
    if not observer.errors:
        raise ConfigurationError("the pass called no layer that the recipe quantizes; check the recipe")
    return sorted(observer.errors, key=lambda gemm: -gemm.error)


@dataclass(frozen=True)
class RecipeSuggestion:
    """Layers to keep in high precision (`kept`), and `removed`, their share of the summed squared errors.

    `layers`: number of quantized layers. `recipes`: argument of `quantshard train --recipe`: `layers.1=bf16,*=mxfp8`.
    `ratio`: the largest error of a layer, relative to the median.
    """

    kept: tuple[str, ...]
    removed: float
    layers: int
    recipes: str
    ratio: float


def suggest(errors: Mapping[str, Sequence[float]], patterns: Mapping[str, str]) -> RecipeSuggestion:
    """Choose the layers with an error that is not finite, or else those whose root mean square e of errors has

        e > 2 median  and  e > median + 6 MAD        MAD: the median of |e - median|; both over all quantized layers

    An error of 0 means that nothing was quantized, and does not count. `patterns`: the model's recipes by name pattern;
    the first match applies, so layers are put before them.
    """
    nonfinite = {name: [float(not math.isfinite(error)) for error in values] for name, values in errors.items()}
    has_nonfinite = any(map(any, nonfinite.values()))
    if has_nonfinite:
        errors = nonfinite
    squares = {name: sum(error * error for error in values) for name, values in errors.items()}
    means = {name: math.sqrt(squares[name] / sum(map(bool, errors[name]))) for name in errors if any(errors[name])}
    median = statistics.median(means.values() or [0.0])
    deviation = statistics.median([abs(error - median) for error in means.values()] or [0.0])
    limit = 0.0 if has_nonfinite else max(2 * median, median + 6 * deviation)
    layers = tuple(name for name in errors if means.get(name, 0.0) > limit)
    removed = sum(squares[name] for name in layers) / (sum(squares.values()) or 1.0)
    others = {pattern: recipe for pattern, recipe in patterns.items() if pattern not in layers}
    by_pattern = dict.fromkeys(layers, HIGH_PRECISION) | others
    recipes = ",".join(f"{pattern}={recipe}" for pattern, recipe in by_pattern.items())
    ratio = max(means.values()) / median if median else 1.0
    return RecipeSuggestion(layers, removed, len(errors), recipes, ratio)
