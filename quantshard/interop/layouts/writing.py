"""Export a checkpoint's model as safetensors for other programs, holding one file in memory at a time.

Codes and scales are copied as bytes if the layout's blocks and encodings match. Otherwise the export fails and reports
the mismatch, or, with `lossy`, requantizes the weight (from its master if the checkpoint has one).
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor

from quantshard import numerics
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.store import local, open_regular, why
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.formats import ALL, Orientation
from quantshard.interop.layouts import conversion, files, table
from quantshard.interop.layouts.conversion import InexactConversionError, RowRun
from quantshard.interop.layouts.files import CONFIGURATION, TensorBatch
from quantshard.interop.layouts.names import IDENTITY, Names, default_names, empty_model, is_stack, names_in_files
from quantshard.interop.layouts.source import CheckpointModel, ModelWeight, WeightReader
from quantshard.interop.layouts.table import EXACT, UNDEFINED, Layout

LINEAR: Final = re.compile(r"_proj\.weight$")
"""Matches the weights that are quantized from a checkpoint in high precision: not embeddings, norms and the head."""

MASTERS, WEIGHTS, AVERAGES = "masters", "weights", "ema"

NOTED_AMAX: Final = "quantshard.amax."
"""Prefix of the header entries that record weights' amaxes in hexadecimal, hence exactly. The second scale is rounded;
with the recorded amax, importing our own export restores every bit (`conversion.amax_of`)."""

HEAD: Final = "lm_head"
EMBEDDING: Final = "model.embed_tokens.weight"

_GAMMA: Final = re.compile(r"norm\d*[._]weight$")


@dataclass
class Export:
    """The result of an export: the external names of the weights by how they were written, sizes and notes.

    `exact`: names of the weights copied as codes and scales. `requantized`: name -> reason. `high_precision`: name ->
    shape of the tensors written in their own dtype or a plain layout's dtype. `rounded`: names of the tensors for which
    1 + weight does not fit their dtype. `masters`, `averages`: number of tensors with values from masters or from
    averages of the weights. `errors`: for an engine, the relative error of the requantized weights (norm of the
    difference / norm).
    """

    path: str | os.PathLike[str]
    layout: Layout
    exact: list[str] = field(default_factory=list)
    requantized: dict[str, str] = field(default_factory=dict)
    high_precision: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)
    masters: int = 0
    averages: int = 0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)

    def ignored(self) -> list[str]:
        """Return the modules with weights in high precision, including the output head even if it is tied."""
        unquantized = self.high_precision.items()
        matrices = [name.removesuffix(".weight") for name, shape in unquantized if len(shape) == 2]
        stacks = [name.rpartition(".")[0] for name, shape in unquantized if is_stack(name, shape)]
        return sorted({HEAD, *matrices, *stacks})

    def configuration(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json for readers of these weights: `config` with the layout's description."""
        # the given quantization_config may describe other weights
        result = {key: value for key, value in config.items() if key != "quantization_config"}
        if not self.layout.is_plain:
            result["quantization_config"] = self.layout.config(self.ignored())
        return result

    def lines(self) -> list[str]:
        """Format the report, one string per line."""
        lines = [
            f"{self.path}: {self.layout.name}, {self.bytes} bytes; {len(self.exact)} weights exact, "
            f"{len(self.requantized)} requantized, {len(self.high_precision)} tensors in high precision"
        ]
        lines += table.lossy_lines(self.requantized)
        if self.errors:
            worst = max(self.errors, key=lambda name: self.errors[name])
            lines.append(f"relative error of requantized weights: at most {self.errors[worst]:.2g} ({worst})")
        if self.rounded:
            lines.append(f"not exact: 1 + weight was rounded for {len(self.rounded)} norms (first: {self.rounded[0]})")
        if self.masters:
            lines.append(f"{self.masters} tensors have the values of the optimizer's masters")
        if self.averages:
            lines.append(f"{self.averages} tensors have the values of averages of the weights (EMA)")
        return lines + self.notes


def export(
    checkpoint: str | os.PathLike[str],
    layout: str,
    out: str | os.PathLike[str],
    *,
    names: Names | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    values: str = "masters",
    lossy: bool = False,
    zero_centered_gamma: bool | None = None,
) -> Export:
    """Write the model of a checkpoint as safetensors in a layout, using one process and holding one file at a time.

    Args:
        checkpoint: path written by any number of processes with `quantshard.checkpoints.save` or `dcp.save`.
        layout: a name in `LAYOUTS`, or a family ("compressed-tensors", "modelopt", "plain"), which selects its first
            exact layout.
        out: a directory that does not exist yet; created when the export is complete.
        names: map from our names to the external names. Default: `LLAMA` for models of `TransformerLayer`, otherwise
            the model's own names.
        config: the model's Hugging Face configuration, or a directory with config.json and a tokenizer, which is also
            copied. Default: the checkpoint's own directory. Plain layouts with the model's own names need none.
        max_shard_bytes: largest size of a file that holds more than one weight.
        values: source of values that are written in high precision or requantized: "masters" (if there are any),
            "weights", or "ema". With "ema", all tensors that have an average use it, rounded to nearest, in any layout
            and without `lossy`.
        lossy: requantize weights that the layout cannot represent exactly.
        zero_centered_gamma: whether norm weights are stored as gamma - 1, for checkpoints that do not record this.
    """
    if values not in (MASTERS, WEIGHTS, AVERAGES):
        raise ConfigurationError(f"export(values={values!r}): use {MASTERS!r}, {WEIGHTS!r} or {AVERAGES!r}")
    target = local(out, "an export")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists and is not overwritten; export to another directory")
    source = CheckpointModel(checkpoint)
    if config is None and "://" not in str(checkpoint) and os.path.lexists(Path(checkpoint) / CONFIGURATION):
        config = checkpoint
    model_config = files.read_config(config)
    name_map = names or _names(source, model_config)
    tags = {weight.tag for weight in source.weights.values() if weight.tag is not None}
    row = table.find(layout, tags)
    plan = ExportPlan(
        source, row, name_map, model_config, values, lossy, Export(target, row),
        set() if files.files_center_gamma(model_config) else _zero_centered(source, zero_centered_gamma),
    )  # fmt: skip
    groups = plan.groups()
    if config is None and not (name_map is IDENTITY and plan.layout.is_plain):
        raise ConfigurationError(f"{checkpoint} has no model configuration; pass a folder with config.json (--config)")
    folder = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        folder.mkdir(parents=True)
        plan.report.bytes = files.write_safetensors(folder, groups, max_shard_bytes, plan.noted)
        _write_configuration(folder, plan, None if isinstance(config, Mapping) else config)
        os.rename(folder, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written: {why(error)}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # no longer exists after the rename
    return plan.report


def _names(source: CheckpointModel, config: Mapping[str, Any]) -> Names:
    """Choose the map of names: the default one; for a mixture of transformers, the names that transformers saves."""
    names, weights = default_names(source.weights), source.weights.values()
    if not any(weight.tag is not None and weight.is_stack for weight in weights):
        return names
    if not config:
        raise ConfigurationError(f"{source.path} has no model configuration; pass a folder with config.json (--config)")
    model = empty_model(config, most_layers=len(weights))
    return names_in_files(model, {weight.name: weight.shape for weight in weights})


def _zero_centered(source: CheckpointModel, is_centered: bool | None) -> set[str]:
    """The norm weights stored as gamma - 1. `is_centered`: the caller's answer; None: what the checkpoint records."""
    recorded = manifest.read_manifest(source.path)
    if is_centered is None and recorded is not None and recorded.zero_centered is not None:
        return set(recorded.zero_centered)
    gammas = [w for name, w in source.weights.items() if len(w.shape) == 1 and _GAMMA.search(name)]
    if is_centered is None and gammas:
        mean = torch.cat([source.values(weight).float() for weight in gammas]).mean()
        if mean.abs() < 0.5:
            problem = f"does not record zero_centered_gamma (norm weights average {float(mean):.2g})"
            remedy = "pass zero_centered_gamma= (--zero-centered, --no-zero-centered)"
            raise ConfigurationError(f"{source.path} {problem}; {remedy}")
    return {weight.name for weight in gammas} if is_centered else set()


def _write_configuration(folder: Path, plan: ExportPlan, beside: str | os.PathLike[str] | None) -> None:
    layout = plan.report.layout
    if not plan.config.keys() - {"quantization_config"}:
        plan.report.notes.append("config.json does not describe the architecture; pass the model's configuration")
    files.write_json(folder / CONFIGURATION, plan.report.configuration(plan.config))
    if layout.producer is not None:
        files.write_json(folder / "hf_quant_config.json", layout.producer(plan.report.ignored()))
    companion_paths = [] if beside is None or not Path(beside).is_dir() else files.companions(Path(beside))
    for path in companion_paths:
        # the folder is untrusted: do not follow links or block on pipes
        with open_regular(path) as file, open(folder / path.name, "wb") as copy:
            shutil.copyfileobj(file, copy)
    plan.report.notes += files.copied_lines(companion_paths)


_FUSED: Final = re.compile(r"(?<=\.)([qkv]_proj|(gate|up)_proj|w[13])(?=\.weight$)")
"""The name of a weight that engines compute in one product with others."""


@dataclass
class _FusedPart:
    """A weight that an engine fuses with others. `scale`: its amax or only scale; None: it is requantized."""

    key: str
    name: str
    scale: float | None
    read: Callable[[], Tensor] = field(init=False)


@dataclass
class ExportPlan:
    """What to write of a model, or to send to an inference engine (`for_engine`), and how to compute it.

    An engine computes q, k, v and gate, up in one product, with one scale per tensor, or one second scale, for all of
    them. Layouts with such scales are then exact only if the scales are equal.
    """

    source: WeightReader
    layout: Layout
    names: Names
    config: dict[str, Any]
    values: str
    lossy: bool
    report: Export
    zero_centered: set[str]
    for_engine: bool = False
    noted: dict[str, str] = field(default_factory=dict)
    is_quantized: bool = False
    _fused: dict[str, list[_FusedPart]] = field(default_factory=dict)

    def groups(self) -> list[TensorBatch]:
        """Check that the layout is exact for all weights, and return the tensors to compute. Can be a collective call,
        which all ranks then complete before one of them raises."""
        if self.values == AVERAGES and not self.source.averages:
            raise ConfigurationError(f"{self.source.path} holds no averages of its weights; train with --ema")
        self.is_quantized = any(weight.tag is not None for weight in self.source.weights.values())
        heads, batches = files.heads_of(self.config), []
        weights = self._untied()
        if missing := [weight.name for weight in weights if not self.names.theirs(weight.name, weight.rows, heads)]:
            raise ConfigurationError(f"{self.source.path}: {missing[0]} has no external name; pass a map (--names)")
        problem: ConfigurationError | None = None
        for weight in weights:
            for name, runs in self.names.theirs(weight.name, weight.rows, heads).items():
                try:
                    batches.append(self._group(weight, name, runs))
                except ConfigurationError as error:
                    problem = problem or error
        if problem is not None:
            raise problem
        self._check_fused()
        uses = Counter(name for group in batches for name in group.tensors)
        if repeated := [name for name, count in uses.items() if count > 1]:
            raise ConfigurationError(f"two weights would be named {repeated[0]}; fix the map of names")
        self._add_notes({name: shape for group in batches for name, (_, shape) in group.tensors.items()})
        return batches

    def _untied(self) -> list[ModelWeight]:
        """Return the weights, without an output head that the configuration ties to the embedding."""
        weights = list(self.source.weights.values())
        if not files.is_tied(self.config):
            return weights
        ends = {name: w for w in weights for name in self.names.theirs(w.name, w.rows, None)
              if name in (EMBEDDING, f"{HEAD}.weight")}  # fmt: skip
        if len(ends) < 2:
            return weights
        head, table_ = ends[f"{HEAD}.weight"], ends[EMBEDDING]
        if not self.source.is_same(head, table_):
            raise ConfigurationError(f"{head.name} and {table_.name} differ; set tie_word_embeddings to false")
        return [weight for weight in weights if weight is not head]

    def _group(self, weight: ModelWeight, name: str, runs: list[RowRun]) -> TensorBatch:
        rows = sum(run.length for run in runs)
        # a matrix of a stack is named "weight", and can be the only one
        is_split = weight.is_stack and name.endswith(".weight")
        is_whole = not weight.shape or (runs == [RowRun(0, 0, weight.rows)] and not is_split)
        row_index = None if is_whole else conversion.our_rows(runs)
        quantizes = weight.tag is not None or (not self.is_quantized and LINEAR.search(name) is not None)
        if self.layout.is_plain or not quantizes or not (weight.is_stack or len(weight.shape) == 2):
            shape = weight.shape if is_whole else (rows, *weight.matrix[1:])
            return self._plain_group(weight, name, shape, row_index)
        stem = name.removesuffix("weight")
        if stem == name:
            why = f"{name} does not end in 'weight'"
            if weight.is_stack:
                why = "files have its experts in one tensor; choose plain-bf16"
            raise ConfigurationError(f"{weight.name} is quantized, but {why}")
        shape = (rows, weight.matrix[1])
        make = self._quantized(weight, name, runs, row_index)
        tensors = {stem + key: spec for key, spec in conversion.shapes(self.layout, *shape).items()}
        input_scale: dict[str, Tensor] = {}
        if self.layout.input_scale is not None:
            amax = self.source.input_amax(weight.name)
            assert amax is not None and self.layout.element is not None
            scale = torch.tensor(amax / self.layout.element.max, dtype=torch.float32, device="cpu")
            input_scale[stem + self.layout.input_scale] = scale
        tensors |= {key: (scale.dtype, ()) for key, scale in input_scale.items()}
        return TensorBatch(
            weight.name, tensors, lambda: {**{stem + key: part for key, part in make().items()}, **input_scale}
        )

    def _plain_group(self, weight: ModelWeight, name: str, shape: tuple[int, ...], rows: Tensor | None) -> TensorBatch:
        plain = self.layout.is_plain and weight.dtype != torch.int64  # not cast: the check below raises
        dtype = (self.layout.dtype if plain else weight.dtype) or torch.float32
        if dtype not in files.DTYPES.values():
            raise ConfigurationError(f"{weight.name} is {weight.dtype}, which no layout has")
        read_values = self._reading(weight, self.layout.is_plain)
        self.report.high_precision[name] = shape

        def make() -> dict[str, Tensor]:
            values = read_values(weight)
            if weight.name in self.zero_centered:
                values = values.double() + 1
                if not torch.equal(values.to(dtype).double(), values):
                    self.report.rounded.append(name)
            values = values if rows is None else values.reshape(weight.matrix)[rows]
            return {name: values.to(dtype).reshape(shape)}

        return TensorBatch(weight.name, {name: (dtype, shape)}, make)

    def _quantized(
        self, weight: ModelWeight, name: str, runs: list[RowRun], rows: Tensor | None
    ) -> Callable[[], Mapping[str, Tensor]]:
        shape = (weight.rows, weight.matrix[1])
        why = self._why_not(weight, runs, rows)
        part = self._fused_part(weight, name, rows, is_exact=why is None)
        if self._is_averaged(weight):
            why = "quantized from its average"
        elif why is None:
            fmt = weight.format
            self.report.exact.append(name)
            amax = fmt.copies[Orientation.ROWWISE].amax
            if amax is not None and not self.for_engine:
                first = 0 if rows is None else int(rows[0]) // amax.block_shape[0]
                self.noted[NOTED_AMAX + name] = float(self.source.scales(weight)[amax.name].flatten()[first]).hex()
            exact = conversion.converter(self.layout, fmt, shape, runs, rows)
            if part is None:
                return lambda: exact(self.source.parts(weight))
            requantized = self._requantized(weight, name, rows, part)
            return lambda: requantized() if name in self.report.requantized else exact(self.source.parts(weight))
        elif not self.lossy:
            what = f"{weight.name} {list(shape)}, {weight.tag or 'in high precision'}"
            remedy = "choose another layout, or pass lossy=True to layouts.export (--lossy) or LiveWeights"
            raise ConfigurationError(f"{what}, is not exact in {self.layout.name}: {why}; {remedy}")
        self.report.requantized[name] = why
        return self._requantized(weight, name, rows, part)

    def _requantized(
        self, weight: ModelWeight, name: str, rows: Tensor | None, part: _FusedPart | None
    ) -> Callable[[], Mapping[str, Tensor]]:
        read_values, fmt = self._reading(weight, True), self.layout.row()

        def read() -> Tensor:
            values = read_values(weight).reshape(weight.matrix)
            return values.float() if rows is None else values[rows].float()

        def make() -> Mapping[str, Tensor]:
            values = read()
            shape = (len(values), values.shape[1])
            if part is not None and len(self._fused[part.key]) > 1:
                # a row with the amax of all parts gives them one scale
                amax = max(float(fused.read().abs().max()) for fused in self._fused[part.key])
                values = torch.cat([values, values.new_full((1, shape[1]), amax)])
            parts = numerics.quantize(values, fmt)
            parts = {key: grid[: len(grid) - len(values) + shape[0]] if len(grid) > 1 else grid
                     for key, grid in parts.items()}  # fmt: skip
            if self.for_engine:
                rounded = numerics.dequantize(fmt.copies[Orientation.ROWWISE], parts, shape)
                norm = values[: shape[0]].norm()
                self.report.errors[name] = float((rounded - values[: shape[0]]).norm() / norm) if norm else 0.0
            return conversion.to_layout(self.layout, fmt, parts, shape)

        if part is not None:
            part.read = read
        return make

    def _fused_part(self, weight: ModelWeight, name: str, rows: Tensor | None, is_exact: bool) -> _FusedPart | None:
        """Record a weight that an engine fuses with others under one scale. Returns None for any other weight."""
        key = _FUSED.sub("fused", name)
        if not self.for_engine or key == name or not (self.layout.second or self.layout.block == (ALL, ALL)):
            return None
        scale = None
        if is_exact:
            copy = weight.format.copies[Orientation.ROWWISE]
            component = copy.amax or copy.scale
            first = 0 if rows is None else int(rows[0]) // component.block_shape[0]
            scale = float(self.source.scales(weight)[component.name].flatten()[first])
        part = _FusedPart(key, name, scale)
        self._fused.setdefault(key, []).append(part)
        return part

    def _check_fused(self) -> None:
        for parts in self._fused.values():
            if all(part.scale == parts[0].scale is not None for part in parts):
                continue
            why = f"an engine fuses {parts[0].name} with {len(parts) - 1} more under one scale"
            if not self.lossy:
                remedy = "choose a layout with finer scales, or pass lossy=True"
                raise ConfigurationError(f"{why}, and theirs differ ({self.layout.name}); {remedy}")
            for part in parts:
                if part.name in self.report.exact:
                    self.report.exact.remove(part.name)
                self.report.requantized.setdefault(part.name, why)

    def _is_averaged(self, weight: ModelWeight) -> bool:
        return self.values == AVERAGES and weight.name in self.source.averages

    def _reading(self, weight: ModelWeight, is_converted: bool) -> Callable[[ModelWeight], Tensor]:
        """Choose the function that reads a weight's values. `is_converted`: to another dtype or format."""
        if self._is_averaged(weight):
            self.report.averages += 1
            return self.source.average
        if is_converted and self.values == MASTERS and weight.name in self.source.masters:
            self.report.masters += 1
            return self.source.master
        return self.source.values

    def _why_not(self, weight: ModelWeight, runs: list[RowRun], rows: Tensor | None) -> str | None:
        """Return why a weight cannot be written exactly, or None. Reads only scales, because codes are large."""
        spec = weight.spec
        verdict = table.verdict(spec, self.layout, self.source.input_amax(weight.name) is not None)
        if verdict.kind == UNDEFINED:
            raise ConfigurationError(
                f"{weight.name}: {self.layout.name} is not defined: {verdict.why}; choose another layout"
            )
        if verdict.kind != EXACT:
            return verdict.why
        assert spec is not None
        if self.for_engine and conversion.is_always_exact(self.layout, weight.format, runs):
            return None
        try:
            shape = (weight.rows, weight.matrix[1])
            conversion.layout_scales(self.layout, weight.format, self.source.scales(weight), shape, rows)
        except InexactConversionError as error:
            return str(error)
        return None

    def _add_notes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        notes, layout = self.report.notes, self.layout
        if self.names is IDENTITY:
            notes.append("names are the model's own")
        if self.zero_centered:
            notes.append(f"{len(self.zero_centered)} norm weights, stored as gamma - 1, are written as gamma")
        ragged = [
            f"{name} {list(shape)}"
            for name, shape in shapes.items()
            if name.endswith(layout.codes_key) and len(shape) == 2 and name not in self.report.high_precision
            and any(size % block for size, block in zip(shape, layout.block, strict=True) if block != ALL)
        ]  # fmt: skip
        if ragged and not layout.whole_blocks:  # otherwise `conversion.shapes` has raised
            notes.append(
                f"{len(ragged)} weights end inside a block of {table.said(layout.block)} (first: {ragged[0]}): vLLM "
                "rejects some tensor-parallel sizes, and transformers dequantizes them wrongly"
            )
        if layout.is_plain and not self.report.masters and not self.report.averages:
            notes.append("values are dequantized weights: the checkpoint names no masters, or values='weights'")
        if layout.second is not None:
            notes.append("weight-only: readers compute in BF16; the second scale is rounded to float32")
