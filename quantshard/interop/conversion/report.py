"""Reports of what a conversion did to each linear layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape

from quantshard.readable import by_pattern, human_bytes, united_groups


@dataclass(frozen=True)
class ConvertedLayer:
    """A converted layer: its format, and the bytes of its unsharded weight before and after."""

    name: str
    shape: tuple[int, ...]
    recipe: str
    format: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class LeftLayer:
    """A linear layer that was not converted, and the reason."""

    name: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class ExpertParameter:
    """A three-dimensional parameter with the weights of several experts. Such a parameter is not converted."""

    name: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class FusedLayers:
    """Layers computed as one step: the name of their parent module, and a description of the step."""

    name: str
    step: str


@dataclass(frozen=True)
class UnfusedLayers:
    """Layers that `modules="fused"` did not fuse: the name of their parent module, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """The result of `convert`. Prints as one line per name pattern."""

    converted: tuple[ConvertedLayer, ...]
    left: tuple[LeftLayer, ...]
    experts: tuple[ExpertParameter, ...] = ()
    fused: tuple[FusedLayers, ...] = ()
    unfused: tuple[UnfusedLayers, ...] = ()

    @property
    def bytes_before(self) -> int:
        """Size of the converted weights before conversion, in bytes."""
        return sum(layer.bytes_before for layer in self.converted)

    @property
    def bytes_after(self) -> int:
        """Size of the converted weights now, including scales, in bytes."""
        return sum(layer.bytes_after for layer in self.converted)

    def to_dict(self) -> dict[str, object]:
        """Return the report as a JSON-serializable dict."""
        return asdict(self)

    def high_precision(self) -> list[str]:
        """Return report lines about what stays in high precision, with reasons; empty if everything was converted."""
        lines = []
        if self.left:
            lines.append(f"left {len(self.left)} as they were:")
            for pattern, layers in united_groups((layer.name, layer.reason, layer) for layer in self.left):
                shape = f" {list(layers[0].shape)}" if len({layer.shape for layer in layers}) == 1 else ""
                lines.append(f"  {pattern}{shape}{_times(len(layers))}: {layers[0].reason}")
        if self.experts:
            size = human_bytes(sum(expert.bytes for expert in self.experts))
            lines.append(f"left {len(self.experts)} stacked parameters of experts, {size}, which are no linear layers:")
            sizes_of = [
                (param.name, (param.shape, f"{human_bytes(param.bytes)}, in high precision")) for param in self.experts
            ]
            lines += [_line(pattern, count, *kind) for pattern, count, kind in by_pattern(sizes_of)]
        return lines

    def __str__(self) -> str:
        sizes = f"{human_bytes(self.bytes_before)} of weights are {human_bytes(self.bytes_after)} now"
        lines = [f"converted {len(self.converted)} linear layers: {sizes}"]
        kinds = [(layer.name, (layer.shape, f"{layer.recipe}: {layer.format}")) for layer in self.converted]
        lines += [_line(pattern, count, *kind) for pattern, count, kind in by_pattern(kinds)]
        lines += self.high_precision()
        if self.fused:
            lines.append(f"fused {len(self.fused)}:")
            steps = [(layers.name, layers.step) for layers in self.fused]
            lines += [f"  {pattern}{_times(count)}: {step}" for pattern, count, step in by_pattern(steps)]
        if self.unfused:
            lines.append(f"not fused {len(self.unfused)}, whose layers are computed one by one:")
            reasons = [(layers.name, layers.reason) for layers in self.unfused]
            lines += [f"  {pattern}{_times(count)}: {reason}" for pattern, count, reason in by_pattern(reasons)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the printed report, for notebooks."""
        return f"<pre>{escape(str(self))}</pre>"


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


def _line(pattern: str, count: int, shape: tuple[int, ...], said: str) -> str:
    return f"  {pattern} {list(shape)}{_times(count)}: {said}"
