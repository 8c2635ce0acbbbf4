"""Recipes: the format of each operand in a linear layer's three GEMMs.

A recipe is a table, (role, GEMM) -> `QuantSpec` (a format row and how to scale). An operand without an entry stays in
high precision.

    fprop   y  = x  @ w^T      input       weight
    dgrad   dx = dy @ w        grad_output weight
    wgrad   dw = dy^T @ x      grad_output input

Every operand is quantized along the dim that its GEMM sums over, which is the last one in the table above, so the
operands of wgrad are quantized from the transposed tensors. A weight is stored once, so its two entries are the same
row: with square blocks (its own transpose), with two copies, or with blocks along its rows only (the fallback "dgrad
dequantizes").

The named recipes have the numerics and argument names of TransformerEngine (its `common/recipe`). `MixedRecipe` takes
the operands of some GEMMs from another recipe, and `TableRecipe` accepts any table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property, partial

import torch

from quantshard import formats
from quantshard.errors import ConfigurationError, meant
from quantshard.formats import Scaling
from quantshard.recipe_table import (
    OPERANDS,
    Gemm as Gemm,
    QuantSpec as QuantSpec,
    Recipe as Recipe,
    Table,
    TableRecipe as TableRecipe,
    TensorRole as TensorRole,
    check_scalings,
)


class ElementFormats(str, Enum):
    """Element encodings. HYBRID is E4M3 in forward and E5M2 for gradients. Per-tensor recipes take E4M3 or HYBRID."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    E2M1 = "E2M1"
    HYBRID = "HYBRID"


Format = ElementFormats
"""TransformerEngine's name for `ElementFormats`."""


@dataclass(frozen=True)
class MMParams:
    """How one GEMM accumulates.

    use_split_accumulator: accumulate in float32. If False, FP8 GEMMs with one scale per tensor accumulate in the
        tensor cores of a Hopper GPU, which is faster and loses bits: at K = 4096 the error is 1.3e-3 of the norm
        instead of 1.3e-4. GEMMs with float32 results and emulated GEMMs are not affected.
    """

    use_split_accumulator: bool = True


def _table(weight: QuantSpec, *activations: QuantSpec) -> Table:
    """A table of all operands, or of weights only. `activations`: the input for fprop and wgrad, then the gradient."""
    operands = [(role, gemm) for role in TensorRole for gemm in Gemm if role in OPERANDS[gemm]]
    return dict(zip(operands, (weight, weight, *activations), strict=False))


_GEMM_NAMES = tuple(gemm.value for gemm in Gemm)


@dataclass(frozen=True)
class MixedRecipe(Recipe):
    """A recipe that takes inputs and gradients of some GEMMs from others: `MixedRecipe("nvfp4", wgrad="current")`.

    The name of this example is "nvfp4/wgrad:current". "bf16" keeps the operands of a GEMM in high precision: torchao's
    "rowwise_with_gw_hp" is "rowwise/wgrad:bf16".

    Args:
        recipe: the recipe of the weights, and of GEMMs that have no recipe of their own.
        fprop, dgrad, wgrad: the recipe of the inputs and gradients in this GEMM.
    """

    recipe: str | Recipe
    fprop: str | Recipe | None = None
    dgrad: str | Recipe | None = None
    wgrad: str | Recipe | None = None

    def __post_init__(self) -> None:
        for name in ("recipe", *_GEMM_NAMES):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None and name != "recipe" else resolve(value))
        if any(isinstance(recipe, MixedRecipe) for recipe in (self._first, *self._others.values())):
            raise ConfigurationError(f"recipe {self.name!r} is a mixture of mixtures; name the recipe of each GEMM")
        if self._first.weight is None:
            raise ConfigurationError(f"recipe {self.name!r}: begin with a recipe that quantizes weights")
        check_scalings(self.name, self.table)

    @property
    def _first(self) -> Recipe:
        return resolve(self.recipe)

    @property
    def _others(self) -> dict[Gemm, Recipe]:
        return {gemm: resolve(recipe) for gemm in Gemm if (recipe := getattr(self, gemm.value)) is not None}

    @property
    def name(self) -> str:
        return "/".join([self._first.name, *(f"{gemm.value}:{recipe.name}" for gemm, recipe in self._others.items())])

    @cached_property
    def table(self) -> Table:
        recipes, table = self._others, self._first.table
        from_first = {key: spec for key, spec in table.items() if key[0] is TensorRole.WEIGHT or key[1] not in recipes}
        from_others = {
            key: spec for gemm, recipe in recipes.items() for key, spec in recipe.table.items()
            if key[1] is gemm and key[0] is not TensorRole.WEIGHT
        }  # fmt: skip
        return {**from_first, **from_others}

    @cached_property
    def fast_gemms(self) -> frozenset[Gemm]:
        return frozenset(gemm for gemm in Gemm if gemm in self._others.get(gemm, self._first).fast_gemms)


@dataclass(frozen=True)
class HighPrecision(Recipe):
    """No quantization: the "bf16" recipe."""

    name = "bf16"

    @cached_property
    def table(self) -> Table:
        return {}


def _check_element_formats(name: str, fp8_format: str) -> None:
    if fp8_format not in (ElementFormats.E4M3, ElementFormats.HYBRID):
        raise ConfigurationError(f"{name}(fp8_format={fp8_format!r}): use one of: E4M3, HYBRID")


def _per_tensor_table(fp8_format: str, scaling: Scaling) -> Table:
    is_hybrid = ElementFormats(fp8_format) is ElementFormats.HYBRID
    forward = QuantSpec(formats.FP8_E4M3, scaling)
    gradient = QuantSpec(formats.FP8_E5M2 if is_hybrid else formats.FP8_E4M3, scaling)
    return _table(forward, forward, forward, gradient, gradient)


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, computed from the last `amax_history_len` amaxes of that tensor.

    `amax_compute_algo` is "max" or "most_recent". For TransformerEngine's accumulation in forward, pass
    `fp8_gemm_fprop=MMParams(use_split_accumulator=False)`.
    """

    margin: int = 0
    fp8_format: str = ElementFormats.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    def __post_init__(self) -> None:
        _check_element_formats("DelayedScaling", self.fp8_format)
        algo = self.amax_compute_algo
        if algo not in ("max", "most_recent"):
            raise ConfigurationError(f"DelayedScaling(amax_compute_algo={algo!r}): use 'max' or 'most_recent'")
        if self.amax_history_len < 1:
            raise ConfigurationError(f"DelayedScaling(amax_history_len={self.amax_history_len}): use 1 or more")

    name = "delayed"

    @cached_property
    def table(self) -> Table:
        most_recent = self.amax_compute_algo == "most_recent"
        scaling = Scaling(margin=self.margin, history=self.amax_history_len, most_recent=most_recent)
        return _per_tensor_table(self.fp8_format, scaling)


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, computed from the amax of the tensor itself. Also called "tensorwise"."""

    use_power_2_scales: bool = False
    fp8_format: str = ElementFormats.HYBRID
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    def __post_init__(self) -> None:
        _check_element_formats("Float8CurrentScaling", self.fp8_format)

    name = "current"

    @cached_property
    def table(self) -> Table:
        return _per_tensor_table(self.fp8_format, Scaling(power_of_two=self.use_power_2_scales))


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 E4M3 with one scale per 128x128 elements of a weight, and per 1x128 of an activation or gradient."""

    use_f32_scales: bool = False

    name = "block"

    @cached_property
    def table(self) -> Table:
        scaling = Scaling(power_of_two=not self.use_f32_scales)
        vector = QuantSpec(formats.FP8_1X128, scaling)
        return _table(QuantSpec(formats.FP8_128X128, scaling), vector, vector, vector, vector)


@dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """FP8 E4M3 with one scale per row: per output feature of a weight, per token, or per row of wgrad's operands.

    This is the "rowwise" recipe of torchao and torchtitan, with power-of-two scales by default. A weight is stored
    once, quantized by rows. dgrad sums over these rows, so it reads dequantized values.
    """

    use_power_2_scales: bool = True

    name = "rowwise"

    @cached_property
    def table(self) -> Table:
        row = QuantSpec(formats.FP8_1XROW, Scaling(power_of_two=self.use_power_2_scales))
        return _table(row, row, row, row, row)


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: E4M3 with one power-of-two scale (E8M0) per 32 elements.

    Weights are stored in 32x32 blocks: one copy serves both directions and takes half the memory of BF16. With
    `enable_2d_quantization=False`, TransformerEngine's default, weights are stored twice, in 1x32 and 32x1 blocks,
    which takes as much memory as BF16.
    """

    enable_2d_quantization: bool = True

    name = "mxfp8"

    @cached_property
    def table(self) -> Table:
        weight = formats.MXFP8_32X32 if self.enable_2d_quantization else formats.MXFP8_BOTH
        vector = QuantSpec(formats.MXFP8_1X32)
        return _table(QuantSpec(weight), vector, vector, vector, vector)


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: E2M1 with an E4M3 scale per 16 elements (16x16 of a weight) and a second scale per tensor.

    The operands of wgrad pass through a random Hadamard transform. Gradients are rounded stochastically.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    name = "nvfp4"

    @cached_property
    def table(self) -> Table:
        rht, stochastic = not self.disable_rht, not self.disable_stochastic_rounding
        weight = formats.NVFP4_BOTH if self.disable_2d_quantization else formats.NVFP4_16X16
        row = formats.NVFP4_1X16
        return _table(
            QuantSpec(weight),
            QuantSpec(row),
            QuantSpec(row, Scaling(random_hadamard=rht)),
            QuantSpec(row, Scaling(stochastic_rounding=stochastic)),
            QuantSpec(row, Scaling(stochastic_rounding=stochastic, random_hadamard=rht)),
        )


NAMES: dict[str, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "tensorwise": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "blockwise": Float8BlockScaling,
    "rowwise": Float8RowwiseScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    # for quantization-aware training: weights as engines store them
    "fp8-weights": partial(TableRecipe, "fp8-weights", _table(QuantSpec(formats.FP8_128X128))),
    "mxfp8-weights": partial(TableRecipe, "mxfp8-weights", _table(QuantSpec(formats.MXFP8_1X32))),
    "nvfp4-weights": partial(TableRecipe, "nvfp4-weights", _table(QuantSpec(formats.NVFP4_1X16))),
    "bf16": HighPrecision,
}
"""Recipes by name; most are classes."""

AUTO = "auto"
CHOICES = (AUTO, *NAMES)
AUTO_HELP = "auto: current, on Blackwell mxfp8"


@cache
def auto_name() -> str:
    """Return the name of the recipe that "auto" stands for on this machine."""
    # This initializes CUDA without creating a context, so a launcher takes no GPU memory from its workers.
    has_nvidia_gpu = torch.cuda.is_available() and torch.version.hip is None
    return "mxfp8" if has_nvidia_gpu and torch.cuda.get_device_capability()[0] == 10 else "current"


def concrete_name(name: str) -> str:
    """Replace "auto" at the start of a recipe name, also before GEMMs: "auto/wgrad:bf16"."""
    first, slash, gemms = name.partition("/")
    return auto_name() + slash + gemms if first.lower() == AUTO else name


def resolve(recipe: str | Recipe | None) -> Recipe:
    """Return the recipe with this name: one of `CHOICES`, or a `MixedRecipe` of these. None means "auto"."""
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | None):
        raise ConfigurationError(f"unknown recipe {recipe!r}; choose one of: {', '.join(CHOICES)}")
    return _stock(concrete_name(AUTO if recipe is None else recipe))


@cache
def _stock(text: str) -> Recipe:
    """Return the recipe of this name, always the same object, so that caches can compare by identity."""
    name = text.lower()
    first, *gemm_parts = name.split("/")
    if first not in NAMES:
        choices = f"{meant(first or text, CHOICES)}choose one of: {', '.join(CHOICES)}"
        raise ConfigurationError(f"unknown recipe {text!r}; {choices}")
    if text != name:
        return _stock(name)
    recipe_names: dict[str, str] = {}
    for part in gemm_parts:
        gemm, _, recipe_name = part.partition(":")
        if gemm in recipe_names or gemm not in _GEMM_NAMES or recipe_name not in NAMES:
            hint = meant(recipe_name, NAMES) if gemm in _GEMM_NAMES else meant(gemm, _GEMM_NAMES)
            rule = f"{hint}write each GEMM once, as in current/wgrad:bf16; names: {', '.join(NAMES)}"
            raise ConfigurationError(f"unknown recipe {text!r}: {part!r}; {rule}")
        recipe_names[gemm] = recipe_name
    return MixedRecipe(first, **recipe_names) if recipe_names else NAMES[first]()


def stock_name(recipe: Recipe) -> str | None:
    """Return the name that `resolve` maps to this recipe, or None if the recipe has non-default arguments."""
    if isinstance(recipe, MixedRecipe):
        parts = [recipe._first, *recipe._others.values()]
        return recipe.name if all(stock_name(part) == part.name for part in parts) else None
    return next((name for name, kind in NAMES.items() if kind() == recipe), None)
