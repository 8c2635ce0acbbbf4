"""The table of layouts that other programs read.

Each row describes how a quantized weight is stored: the encodings of codes and scales, the block size, the names,
dtypes and shapes of its tensors, the direction of a second scale, and the JSON that describes the layout to readers.
`verdict` computes from two rows whether a layout represents one of our formats exactly; nothing is listed by hand.

Sources: DeepSeek-V3's README_WEIGHTS.md and transformers' FineGrainedFP8Config (hf-*), vLLM's and SGLang's
quantization/fp8.py (vllm-fp8, sglang-mxfp8), compressed-tensors' quant_scheme.py and compressors, ModelOpt's unified
Hugging Face export (modelopt-*).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch

from quantshard.errors import CheckpointError, ConfigurationError, meant, shown
from quantshard.formats import ALL, E2M1, E4M3, E8M0, FORMATS, FP32, Encoding, Format, Orientation, Scaling
from quantshard.gemm.predictions import quantized_gemms
from quantshard.recipe import NAMES, QuantSpec, resolve
from quantshard.recipe_table import format_of_tag

Config = Mapping[str, Any]


class ScaleShape(str, Enum):
    GRID = "grid"  # [blocks along rows, blocks along columns]
    SCALAR = "scalar"  # []
    ONE = "one"  # [1]
    ROWS = "rows"  # [rows]


@dataclass(frozen=True, slots=True)
class SecondScale:
    """A weight's second scale (float32): its name, its shape, and whether it divides or multiplies."""

    key: str
    shape: ScaleShape
    divides: bool


@dataclass(frozen=True)
class Layout:
    """How quantized weights are stored in safetensors, and how `config.json` describes them.

    Attributes:
        name: name of the layout.
        family: name shared by several layouts; selects the first layout that represents a checkpoint's format exactly.
        element, scale, block: encodings and block size of a weight. `element` is None for a plain layout, which stores
            weights in `dtype`.
        codes_key, scale_key: names that replace "weight" in the keys of the tensors.
        scale_dtype, scale_shape: dtype and shape of the tensor of scales.
        second: the second scale, or None.
        whole_blocks: whether the number of columns must be a multiple of the block's.
        input_scale: name of the float32 activation scale, if readers need one.
        config: function from the names of modules left in high precision to `quantization_config`.
        producer: function from the same names to the content of `hf_quant_config.json`, if readers expect this file.
        readers: programs that read the layout.
    """

    name: str
    family: str
    element: Encoding | None
    scale: Encoding = FP32
    block: tuple[int, int] = (ALL, ALL)
    codes_key: str = "weight"
    scale_key: str = "weight_scale"
    scale_dtype: torch.dtype = torch.float32
    scale_shape: ScaleShape = ScaleShape.GRID
    second: SecondScale | None = None
    whole_blocks: bool = False
    input_scale: str | None = None
    dtype: torch.dtype | None = None
    config: Callable[[list[str]], dict[str, Any]] = lambda ignore: {}
    producer: Callable[[list[str]], dict[str, Any]] | None = None
    readers: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether weights are in high precision."""
        return self.element is None

    def row(self) -> Format:
        """Return our format with this element, scale and block and a single copy, used for requantization."""
        copies = {fmt: fmt.copies[Orientation.ROWWISE] for fmt in FORMATS.values() if len(fmt.copies) == 1}
        blocks = self.element, self.scale, self.block
        return next(fmt for fmt, c in copies.items() if (c.codes.encoding, c.scale.encoding, c.block) == blocks)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a layout represents one of our formats: `kind` is "exact", "lossy" or "undefined"; `why` is the reason."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return self.kind + (f": {self.why}" if self.why else "")


EXACT, LOSSY, UNDEFINED = "exact", "lossy", "undefined"
COMPRESSED_TENSORS: Final = "compressed-tensors"


def lossy_lines(requantized: Mapping[str, str]) -> list[str]:
    first = [f"the first {name}: {why}" for name, why in requantized.items()][:1]
    return [f"LOSSY: requantized {len(requantized)} weights, {line}" for line in first]


def verdict(spec: QuantSpec | None, layout: Layout, has_input_amax: bool | None = None) -> Verdict:
    """Return how a layout represents a weight. `has_input_amax`: whether inputs have amaxes; None: as `spec` says."""
    if layout.is_plain:
        return _plain_verdict(spec, layout)
    has_amaxes = has_input_amax if has_input_amax is not None else bool(spec and spec.scaling.history)
    if layout.input_scale and not has_amaxes:
        return Verdict(UNDEFINED, "its readers need a scale of the activations, which only delayed scaling has")
    if spec is None:
        return Verdict(LOSSY, "weights in high precision must be quantized")
    copy = spec.format.copies[Orientation.ROWWISE]
    if copy.codes.encoding != layout.element:
        assert layout.element is not None
        return Verdict(LOSSY, f"codes are {copy.codes.encoding.name}, the layout's {layout.element.name}")
    if not all(refines(theirs, ours) for theirs, ours in zip(layout.block, copy.block, strict=True)):
        return Verdict(LOSSY, f"blocks are {said(copy.block)}, the layout's {said(layout.block)}")
    if layout.scale == E8M0 and copy.scale.encoding == FP32 and not spec.scaling.power_of_two:
        return Verdict(LOSSY, "scales are not powers of two")
    if layout.second is not None:
        return Verdict(EXACT, "except that the second scale is rounded once more, to float32")
    return Verdict(EXACT)


def _plain_verdict(spec: QuantSpec | None, layout: Layout) -> Verdict:
    if layout.dtype == torch.float32:
        return Verdict(EXACT, "writes the masters if there are any")
    if spec is None:
        return Verdict(EXACT, "for BF16 weights; float32 masters are not written")
    copy = spec.format.copies[Orientation.ROWWISE]
    if copy.scale.encoding == E8M0 or spec.scaling.power_of_two:
        return Verdict(EXACT, "for the values of the weights; float32 masters are rounded")
    return Verdict(LOSSY, "code times scale has more digits than BF16")


def import_verdict(spec: QuantSpec | None, layout: Layout) -> Verdict:
    """Return whether a weight of a layout can be copied into one stored as `spec` (None: in high precision)."""
    if layout.is_plain:
        return Verdict(EXACT) if spec is None else Verdict(LOSSY, "values are quantized")
    if spec is None:
        return Verdict(LOSSY, "quantized weights are dequantized")
    copy = spec.format.copies[Orientation.ROWWISE]
    assert layout.element is not None
    if copy.codes.encoding != layout.element:
        return Verdict(LOSSY, f"codes are {layout.element.name} there, {copy.codes.encoding.name} here")
    if len(spec.format.copies) > 1:
        return Verdict(LOSSY, "a second copy, quantized along the columns, is in no layout")
    pairs = list(zip(layout.block, copy.block, strict=True))
    if not all(refines(theirs, ours) or refines(ours, theirs) for theirs, ours in pairs):
        return Verdict(LOSSY, f"blocks are {said(layout.block)} there, {said(copy.block)} here")
    conditions = []
    if not all(refines(ours, theirs) for theirs, ours in pairs):
        conditions.append("all blocks inside one block of the model have the same scale, as in quantshard's exports")
    if (layout.scale, copy.scale.encoding) == (FP32, E8M0):
        conditions.append("scales are powers of two")
    return Verdict(EXACT, f"if {' and '.join(conditions)}" if conditions else "")


def recipe_of(layout: Layout, *, as_it_is: bool = False) -> str | None:
    """Return a recipe whose weights can be copied from any file of a layout, or (not `as_it_is`) from our exports."""
    candidates = []
    for name in NAMES:
        recipe = resolve(name)
        spec = recipe.weight
        if layout.is_plain or spec is None or spec.scaling.history:
            # delayed scaling stores the same weights as another recipe
            continue
        verdict = import_verdict(spec, layout)
        if verdict.kind == EXACT:
            block = spec.format.copies[Orientation.ROWWISE].block
            area = math.prod(math.inf if size == ALL else size for size in block)
            is_conditional = bool(verdict.why)
            # the first step would round weights with other scales to powers of two
            is_rounded = spec.scaling.power_of_two and layout.scale == FP32
            order = (is_conditional, is_rounded) if as_it_is else (not quantized_gemms(recipe), is_conditional)
            candidates.append((*order, block != layout.block, area, name))
    return min(candidates)[-1] if candidates else None


def advice(layout: Layout | None) -> str:
    """Return what to do about weights of a layout that cannot be copied into a model."""
    name = None if layout is None else recipe_of(layout, as_it_is=True)
    return "use another recipe" if name is None else f"use recipe {name!r}"


def refines(theirs: int, ours: int) -> bool:
    """Return whether external blocks each lie inside one of our blocks, along one dim."""
    return theirs == ours or (theirs < ours and (ours == ALL or ours % theirs == 0))


def said(block: tuple[int, int]) -> str:
    if block == (ALL, ALL):
        return "the whole tensor"
    return "x".join("row" if size == ALL else str(size) for size in block)


def _hf(ignore: list[str], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": ignore, **more,
    }  # fmt: skip


def _compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> Callable[..., Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**common, **weights},
        "input_activations": None if activations is None else {**common, "dynamic": True, **activations},
        "output_activations": None,
        "format": kind,
    }

    def config(ignore: list[str]) -> dict[str, Any]:
        return {
            "quant_method": COMPRESSED_TENSORS, "format": kind, "quantization_status": "compressed", "ignore": ignore,
            "kv_cache_scheme": None, "global_compression_ratio": None, "config_groups": {"group_0": group},
        }  # fmt: skip

    return config


def _modelopt(algorithm: str, bits: int, group_size: int | None) -> dict[str, Any]:
    by = {"name": "modelopt", "version": "0.0.0+quantshard"}
    weights = {"num_bits": bits, "type": "float", "dynamic": False}
    if group_size is not None:
        weights["group_size"] = group_size

    def config(ignore: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore, "kv_cache_scheme": None,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "producer": by,
        }  # fmt: skip

    def producer(ignore: list[str]) -> dict[str, Any]:
        quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": group_size}
        return {"producer": by, "quantization": {**quantization, "exclude_modules": ignore}}

    return {"config": config, "producer": producer}


def _mxfp8(ignore: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
        "modules_to_not_convert": ignore,
    }  # fmt: skip


_MX: Final[dict[str, Any]] = {"scale": E8M0, "block": (1, 32), "scale_dtype": torch.uint8, "whole_blocks": True}
_NV: Final[dict[str, Any]] = {
    "scale": E4M3, "block": (1, 16), "scale_dtype": torch.float8_e4m3fn, "whole_blocks": True,
}  # fmt: skip
_TOKEN = {"strategy": "token"}
_GROUP_32 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

_LAYOUTS = (
    Layout(
        "hf-fp8-block", "hf-fp8-block", E4M3, block=(128, 128), scale_key="weight_scale_inv",
        config=lambda ignore: _hf(ignore, weight_block_size=[128, 128]), readers="transformers, vLLM, SGLang, PyTorch",
    ),
    Layout(
        "hf-fp8", "hf-fp8", E4M3, scale_key="weight_scale_inv", scale_shape=ScaleShape.SCALAR,
        config=lambda ignore: _hf(ignore, weight_block_size=None), readers="transformers",
    ),
    Layout(
        "vllm-fp8", "vllm-fp8", E4M3, scale_shape=ScaleShape.SCALAR,
        config=lambda ignore: _hf(ignore, ignored_layers=ignore), readers="vLLM, SGLang",
    ),
    Layout(
        "compressed-tensors-fp8", COMPRESSED_TENSORS, E4M3, scale_shape=ScaleShape.ONE,
        config=_compressed("float-quantized", {"strategy": "tensor"}, _TOKEN), readers="compressed-tensors, vLLM",
    ),
    Layout(
        "compressed-tensors-fp8-block", COMPRESSED_TENSORS, E4M3, block=(128, 128),
        config=_compressed(
            "float-quantized", {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128},
        ), readers="compressed-tensors, vLLM",
    ),
    Layout(
        "compressed-tensors-fp8-channel", COMPRESSED_TENSORS, E4M3, block=(1, ALL),
        config=_compressed("float-quantized", {"strategy": "channel"}, _TOKEN), readers="compressed-tensors, vLLM",
    ),
    Layout(
        "compressed-tensors-mxfp8", COMPRESSED_TENSORS, E4M3, **_MX,
        config=_compressed("mxfp8-quantized", _GROUP_32, _GROUP_32), readers="compressed-tensors, vLLM",
    ),
    Layout(
        "compressed-tensors-nvfp4", COMPRESSED_TENSORS, E2M1, **_NV, codes_key="weight_packed",
        second=SecondScale("weight_global_scale", ScaleShape.ONE, divides=True),
        config=_compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}, None,
        ), readers="compressed-tensors, vLLM",
    ),
    Layout(
        "modelopt-fp8", "modelopt", E4M3, scale_shape=ScaleShape.SCALAR, input_scale="input_scale",
        **_modelopt("FP8", 8, None), readers="vLLM, SGLang, TensorRT-LLM",
    ),
    Layout(
        "modelopt-fp8-channel", "modelopt", E4M3, block=(1, ALL), scale_shape=ScaleShape.ROWS,
        **_modelopt("FP8_PER_CHANNEL_PER_TOKEN", 8, None), readers="vLLM, TensorRT-LLM",
    ),
    Layout("modelopt-mxfp8", "modelopt", E4M3, **_MX, **_modelopt("MXFP8", 8, 32), readers="vLLM"),
    Layout(
        "modelopt-nvfp4", "modelopt", E2M1, **_NV,
        second=SecondScale("weight_scale_2", ScaleShape.SCALAR, divides=False), **_modelopt("W4A16_NVFP4", 4, 16),
        readers="vLLM, TensorRT-LLM",
    ),
    Layout(
        "sglang-mxfp8", "sglang-mxfp8", E4M3, **_MX, scale_key="weight_scale_inv", config=_mxfp8, readers="SGLang",
    ),
    Layout("plain-fp32", "plain", None, dtype=torch.float32, readers="all"),
    Layout("plain-bf16", "plain", None, dtype=torch.bfloat16, readers="all"),
)  # fmt: skip

LAYOUTS: Final = {layout.name: layout for layout in _LAYOUTS}
"""All layouts by name; within a family, coarser blocks come first."""


def find(name: str, formats: set[str]) -> Layout:
    """Return a layout by name, or the first of a family that is exact for all these format tags (none: plain)."""
    if name in LAYOUTS:
        return LAYOUTS[name]
    family = [layout for layout in LAYOUTS.values() if layout.family == name]
    if not family:
        choices = sorted({*LAYOUTS, *(layout.family for layout in LAYOUTS.values())})
        raise ConfigurationError(f"unknown layout {name!r}; {meant(name, choices)}choose one of: {', '.join(choices)}")
    specs: list[QuantSpec | None] = [spec_of_tag(tag) for tag in formats] or [None]
    for layout in family:
        if all(verdict(spec, layout).kind == EXACT for spec in specs):
            return layout
    raise ConfigurationError(
        f"no layout of {name!r} is exact for {', '.join(sorted(formats)) or 'high precision'}; choose one of "
        f"{', '.join(layout.name for layout in family)} with lossy=True (--lossy)"
    )


def detect(config: Any, names: Iterable[str], where: str) -> Layout | None:
    """Identify the layout of files from their `quantization_config` and tensor names; None: high precision."""
    if config is None:
        return None
    signature = _signature(config) if isinstance(config, Mapping) else shown(config)
    ends = {name.rpartition(".")[2] for name in names}
    for layout in LAYOUTS.values():
        if not layout.is_plain and signature == _signature(layout.config([])) and layout.scale_key in ends:
            return layout
    raise CheckpointError(
        f"{where}: unknown quantization_config ({shown(signature, 200)}); supported: "
        f"{', '.join(name for name, layout in LAYOUTS.items() if not layout.is_plain)}"
    )


def _signature(config: Config) -> tuple[str, ...]:
    method = str(config.get("quant_method"))
    if "mxfp8" in method:
        return ("mxfp8",)
    if method == "modelopt":
        return (method, str(config.get("quant_algo")).removeprefix("W4A16_"))
    if method == COMPRESSED_TENSORS:
        groups = config.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, Mapping) and len(groups) == 1 else None
        weights = first.get("weights") if isinstance(first, Mapping) else None
        strategy = weights.get("strategy") if isinstance(weights, Mapping) else None
        return (method, str(config.get("format")), str(strategy))
    return (method, str(config.get("weight_block_size")))


def spec_of_tag(tag: str) -> QuantSpec:
    """Return the format and scaling that a tag names; assumes powers of two, which a tag does not record."""
    fmt, keeps_amaxes = format_of_tag(tag)
    if fmt is None:
        raise ConfigurationError(f"unknown format {tag!r}; install the release that wrote the checkpoint")
    return QuantSpec(fmt, Scaling(power_of_two=True, history=int(keeps_amaxes)))
