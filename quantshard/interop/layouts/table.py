"""The layouts that other programs read: a layout is a row of data.

A row says how a quantized weight is stored: the encodings of codes and scales, the block under one scale, the names,
dtypes and shapes of its tensors, the direction of a second scale, and the JSON that tells a reader so. Whether one of
our formats goes over exactly is arithmetic over the two rows (`verdict`), never a list.

Sources: DeepSeek-V3's README_WEIGHTS.md and transformers' FineGrainedFP8Config (hf-*), vLLM's and SGLang's
quantization/fp8.py (vllm-fp8, sglang-mxfp8), compressed-tensors' quant_scheme.py and compressors, ModelOpt's unified
Hugging Face export (modelopt-*).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch

from quantshard.argument_kinds import TEXT, check_arguments, meant
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.foreign import shown
from quantshard.formats import ALL, E2M1, E4M3, E8M0, FORMATS, FP32, Encoding, Format, Orientation, Scaling
from quantshard.recipe import NAMES, QuantSpec, format_of_tag, resolve

Config = Mapping[str, Any]


class ScaleShape(str, Enum):
    """The shape of a tensor of scales."""

    GRID = "grid"  # [blocks along rows, blocks along columns]
    SCALAR = "scalar"  # []
    ONE = "one"  # [1]
    ROWS = "rows"  # [rows]


@dataclass(frozen=True, slots=True)
class SecondScale:
    """The second scale of a weight, a float32: its name, its shape, and whether it divides or multiplies."""

    key: str
    shape: ScaleShape
    divides: bool


@dataclass(frozen=True)
class Layout:
    """How quantized weights are stored in safetensors, and how `config.json` says so.

    Attributes:
        name: what it is asked for by; `family` finds the row of several that takes a checkpoint's format exactly.
        element, scale, block: of one weight; `element` is None for a plain layout, whose weights are of `dtype`.
        codes_key, scale_key: what stands in place of "weight" in the names of the tensors.
        scale_dtype, scale_shape: of the tensor of scales.
        second: the second scale, if there is one.
        whole_blocks: whether the columns must be a multiple of a block's.
        input_scale: the name of the activations' scale, float32, where readers need one.
        config: names of the modules left in high precision -> `quantization_config`.
        producer: the same -> the content of `hf_quant_config.json`, where readers look for one.
        readers: which programs read it.
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
        """The format of ours with this element, scale and block in one copy: what is requantized into."""
        for fmt in FORMATS.values():
            copy = fmt.copies[Orientation.ROWWISE]
            same = (copy.codes.encoding, copy.scale.encoding, copy.block) == (self.element, self.scale, self.block)
            if same and len(fmt.copies) == 1:
                return fmt
        raise AssertionError(f"no format has the blocks of {self.name}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one of our formats goes into a layout: "exact", "lossy" or "undefined", and what there is to say of it."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return self.kind + (f": {self.why}" if self.why else "")


EXACT, LOSSY, UNDEFINED = "exact", "lossy", "undefined"
COMPRESSED_TENSORS: Final = "compressed-tensors"


def lossy_lines(requantized: Mapping[str, str]) -> list[str]:
    """What a report says of weights (name -> why) that did not go over exactly."""
    first = [f"the first {name}: {why}" for name, why in requantized.items()][:1]
    return [f"LOSSY: requantized {len(requantized)} weights, {line}" for line in first]


def verdict(cell: QuantSpec | None, layout: Layout, has_input_amax: bool | None = None) -> Verdict:
    """How a weight stored as `cell` (None: in high precision) goes into a layout.

    `has_input_amax`: whether amaxes of activations are known; None: as the recipe's scaling keeps a history of them.
    """
    if layout.is_plain:
        return _plain_verdict(cell, layout)
    known = has_input_amax if has_input_amax is not None else bool(cell and cell.scaling.history)
    if layout.input_scale and not known:
        return Verdict(UNDEFINED, "its readers need a scale of the activations, which only delayed scaling knows")
    if cell is None:
        return Verdict(LOSSY, "weights in high precision must be quantized")
    copy = cell.format.copies[Orientation.ROWWISE]
    if copy.codes.encoding != layout.element:
        assert layout.element is not None
        return Verdict(LOSSY, f"codes are {copy.codes.encoding.name}, the layout's {layout.element.name}")
    if not all(refines(theirs, ours) for theirs, ours in zip(layout.block, copy.block, strict=True)):
        return Verdict(LOSSY, f"blocks are {said(copy.block)}, the layout's {said(layout.block)}")
    if layout.scale == E8M0 and copy.scale.encoding == FP32 and not cell.scaling.power_of_two:
        return Verdict(LOSSY, "scales are not powers of two")
    if layout.second is not None:
        return Verdict(EXACT, "codes and scales of blocks; the second scale is rounded once more, to float32")
    return Verdict(EXACT)


def _plain_verdict(cell: QuantSpec | None, layout: Layout) -> Verdict:
    if layout.dtype == torch.float32:
        return Verdict(EXACT, "the masters where there are any")
    if cell is None:
        return Verdict(EXACT, "of BF16 weights; float32 masters are not in it")
    copy = cell.format.copies[Orientation.ROWWISE]
    if copy.scale.encoding == E8M0 or cell.scaling.power_of_two:
        return Verdict(EXACT, "of the weights' values; float32 masters are rounded")
    return Verdict(LOSSY, "code times scale has more digits than BF16")


def import_verdict(cell: QuantSpec | None, layout: Layout) -> Verdict:
    """How a weight of a layout goes into one stored as `cell` (None: in high precision)."""
    if layout.is_plain:
        return Verdict(EXACT) if cell is None else Verdict(LOSSY, "values are quantized, which they are loaded for")
    if cell is None:
        return Verdict(LOSSY, "it is quantized there, and in high precision here: dequantized")
    copy = cell.format.copies[Orientation.ROWWISE]
    assert layout.element is not None
    if copy.codes.encoding != layout.element:
        return Verdict(LOSSY, f"codes are {layout.element.name} there, {copy.codes.encoding.name} here")
    if len(cell.format.copies) > 1:
        return Verdict(LOSSY, "a second copy, quantized along the columns, is in no layout")
    pairs = list(zip(layout.block, copy.block, strict=True))
    if not all(refines(theirs, ours) or refines(ours, theirs) for theirs, ours in pairs):
        return Verdict(LOSSY, f"blocks are {said(layout.block)} there, {said(copy.block)} here")
    checked = []
    if not all(refines(ours, theirs) for theirs, ours in pairs):
        checked.append("blocks of theirs in one of ours have one scale, as in our exports")
    if (layout.scale, copy.scale.encoding) == (FP32, E8M0):
        checked.append("scales are powers of two")
    return Verdict(EXACT, " and ".join(["where " + checked[0], *checked[1:]]) if checked else "")


def recipe_of(layout: Layout) -> str | None:
    """The recipe whose weights take those of a layout as they are: without conditions before under some, by blocks of
    the same size before others, and of these the smallest. None if there is none, and for high precision."""
    found = []
    for name in NAMES:
        cell = resolve(name).weight
        if layout.is_plain or cell is None or cell.scaling.history:  # delayed: another recipe has its weights
            continue
        verdict = import_verdict(cell, layout)
        if verdict.kind == EXACT:
            block = cell.format.copies[Orientation.ROWWISE].block
            area = math.prod(math.inf if size == ALL else size for size in block)
            found.append((bool(verdict.why), block != layout.block, area, name))
    return min(found)[-1] if found else None


def refines(theirs: int, ours: int) -> bool:
    """Whether each of their blocks lies in one of ours, along one dim."""
    return theirs == ours or (theirs < ours and (ours == ALL or ours % theirs == 0))


def said(block: tuple[int, int]) -> str:
    """A block in words."""
    if block == (ALL, ALL):
        return "the whole tensor"
    return "x".join("row" if size == ALL else str(size) for size in block)


# quantization_config


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


def _producer(algorithm: str, group_size: int | None) -> Callable[[list[str]], dict[str, Any]]:
    def content(ignore: list[str]) -> dict[str, Any]:
        return {
            "producer": {"name": "modelopt", "version": "0.0.0+quantshard"},
            "quantization": {
                "quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": group_size,
                "exclude_modules": ignore,
            },
        }  # fmt: skip

    return content


def _modelopt(algorithm: str, bits: int, group_size: int | None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "dynamic": False}
    if group_size is not None:
        weights["group_size"] = group_size

    def config(ignore: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore, "kv_cache_scheme": None,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "producer": {"name": "modelopt", "version": "0.0.0+quantshard"},
        }  # fmt: skip

    return {"config": config, "producer": _producer(algorithm, group_size)}


def _mxfp8(ignore: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
        "modules_to_not_convert": ignore,
    }  # fmt: skip


# The table

LAYOUTS: Final[dict[str, Layout]] = {}
"""Every layout by its name; of one family the coarser blocks come first."""


def _row(name: str, family: str, element: Encoding | None, **entries: Any) -> None:
    LAYOUTS[name] = Layout(name, family, element, **entries)


_MX: Final[dict[str, Any]] = {"scale": E8M0, "block": (1, 32), "scale_dtype": torch.uint8, "whole_blocks": True}
_NV: Final[dict[str, Any]] = {
    "scale": E4M3, "block": (1, 16), "scale_dtype": torch.float8_e4m3fn, "whole_blocks": True,
}  # fmt: skip
_TOKEN = {"strategy": "token"}
_GROUP_32 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

_row(
    "hf-fp8-block", "hf-fp8-block", E4M3, block=(128, 128), scale_key="weight_scale_inv",
    config=lambda ignore: _hf(ignore, weight_block_size=[128, 128]), readers="transformers, vLLM, SGLang, PyTorch",
)  # fmt: skip
_row(
    "hf-fp8", "hf-fp8", E4M3, scale_key="weight_scale_inv", scale_shape=ScaleShape.SCALAR,
    config=lambda ignore: _hf(ignore, weight_block_size=None), readers="transformers",
)  # fmt: skip
_row(
    "vllm-fp8", "vllm-fp8", E4M3, scale_shape=ScaleShape.SCALAR,
    config=lambda ignore: _hf(ignore, ignored_layers=ignore), readers="vLLM, SGLang",
)  # fmt: skip
_row(
    "compressed-tensors-fp8", COMPRESSED_TENSORS, E4M3, scale_shape=ScaleShape.ONE,
    config=_compressed("float-quantized", {"strategy": "tensor"}, _TOKEN), readers="compressed-tensors, vLLM",
)  # fmt: skip
_row(
    "compressed-tensors-fp8-block", COMPRESSED_TENSORS, E4M3, block=(128, 128),
    config=_compressed(
        "float-quantized", {"strategy": "block", "block_structure": [128, 128]},
        {"strategy": "group", "group_size": 128},
    ), readers="compressed-tensors, vLLM",
)  # fmt: skip
_row(
    "compressed-tensors-fp8-channel", COMPRESSED_TENSORS, E4M3, block=(1, ALL),
    config=_compressed("float-quantized", {"strategy": "channel"}, _TOKEN), readers="compressed-tensors, vLLM",
)  # fmt: skip
_row(
    "compressed-tensors-mxfp8", COMPRESSED_TENSORS, E4M3, **_MX,
    config=_compressed("mxfp8-quantized", _GROUP_32, _GROUP_32), readers="compressed-tensors, vLLM",
)  # fmt: skip
_row(
    "compressed-tensors-nvfp4", COMPRESSED_TENSORS, E2M1, **_NV, codes_key="weight_packed",
    second=SecondScale("weight_global_scale", ScaleShape.ONE, divides=True),
    config=_compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}, None,
    ), readers="compressed-tensors, vLLM",
)  # fmt: skip
_row(
    "modelopt-fp8", "modelopt", E4M3, scale_shape=ScaleShape.SCALAR, input_scale="input_scale",
    **_modelopt("FP8", 8, None), readers="vLLM, SGLang, TensorRT-LLM",
)  # fmt: skip
_row(
    "modelopt-fp8-channel", "modelopt", E4M3, block=(1, ALL), scale_shape=ScaleShape.ROWS,
    **_modelopt("FP8_PER_CHANNEL_PER_TOKEN", 8, None), readers="vLLM, TensorRT-LLM",
)  # fmt: skip
_row("modelopt-mxfp8", "modelopt", E4M3, **_MX, **_modelopt("MXFP8", 8, 32), readers="vLLM")
_row(
    "modelopt-nvfp4", "modelopt", E2M1, **_NV, second=SecondScale("weight_scale_2", ScaleShape.SCALAR, divides=False),
    **_modelopt("W4A16_NVFP4", 4, 16), readers="vLLM, TensorRT-LLM",
)  # fmt: skip
_row(
    "sglang-mxfp8", "sglang-mxfp8", E4M3, **_MX, scale_key="weight_scale_inv", config=_mxfp8, readers="SGLang",
)  # fmt: skip
_row("plain-fp32", "plain", None, dtype=torch.float32, readers="all")
_row("plain-bf16", "plain", None, dtype=torch.bfloat16, readers="all")


def find(name: str, formats: set[str]) -> Layout:
    """A layout from its name, or the first of a family that takes all of these formats (names, see `formats`) exactly.

    Raises:
        ConfigurationError: there is no such layout, or none of the family takes them.
    """
    check_arguments("export", TEXT, layout=name)
    if name in LAYOUTS:
        return LAYOUTS[name]
    family = [layout for layout in LAYOUTS.values() if layout.family == name]
    if not family:
        known = sorted({*LAYOUTS, *(layout.family for layout in LAYOUTS.values())})
        raise ConfigurationError(f"unknown layout {name!r}; {meant(name, known)}choose one of: {', '.join(known)}")
    cells: list[QuantSpec | None] = [cell_of_tag(tag) for tag in formats] or [None]
    for layout in family:
        if all(verdict(cell, layout).kind == EXACT for cell in cells):
            return layout
    raise ConfigurationError(
        f"no layout of {name!r} takes weights in {', '.join(sorted(formats)) or 'high precision'} exactly; name one of "
        f"{', '.join(layout.name for layout in family)} and allow requantization (lossy=True, or --lossy)"
    )


def detect(config: Any, names: Iterable[str], where: str) -> Layout | None:
    """The layout of files from their `quantization_config` and the names of their tensors; None: high precision.

    Raises:
        CheckpointError: it is none of `LAYOUTS`.
    """
    if config is None:
        return None
    wanted = _signature(config) if isinstance(config, Mapping) else shown(config)
    ends = {name.rpartition(".")[2] for name in names}
    for layout in LAYOUTS.values():
        if not layout.is_plain and wanted == _signature(layout.config([])) and layout.scale_key in ends:
            return layout
    raise CheckpointError(
        f"{where}: its quantization_config ({shown(wanted, 200)}) is none of the layouts that are read: "
        f"{', '.join(name for name, layout in LAYOUTS.items() if not layout.is_plain)}"
    )


def _signature(config: Config) -> tuple[str, ...]:
    """The entries of a `quantization_config` by which layouts differ."""
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


def cell_of_tag(tag: str) -> QuantSpec:
    """What a checkpoint's format tag names. It does not say whether scales are powers of two: taken for granted here,
    which whoever writes other scales than float32 checks by their values.

    Raises:
        ConfigurationError: no format has this name.
    """
    fmt, keeps_amaxes = format_of_tag(tag)
    if fmt is None:
        raise ConfigurationError(f"{tag!r} is no format of this release; install the release that wrote the checkpoint")
    return QuantSpec(fmt, Scaling(power_of_two=True, history=int(keeps_amaxes)))
