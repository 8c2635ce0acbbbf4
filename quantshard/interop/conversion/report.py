"""What a conversion did to each linear layer, and how it is printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape

from quantshard.readable import by_pattern, human_bytes, united_groups


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer that was converted: its format, and the bytes of its weight, whole, before and after."""

    name: str
    shape: tuple[int, ...]
    recipe: str
    format: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class LeftLayer:
    """A linear layer that stays as it was, and why."""

    name: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class ExpertParameter:
    """The weights of several experts in one parameter of three dims, which is no linear layer and stays as it was."""

    name: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class FusedLayers:
    """Layers that are computed as one step: the name of the module that holds them, and what the step is."""

    name: str
    step: str


@dataclass(frozen=True)
class UnfusedLayers:
    """Layers that `modules="fused"` did not make one step, by the name of the module that holds them, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did; printed, a line for each pattern of names."""

    converted: tuple[ConvertedLayer, ...]
    left: tuple[LeftLayer, ...]
    experts: tuple[ExpertParameter, ...] = ()
    fused: tuple[FusedLayers, ...] = ()
    unfused: tuple[UnfusedLayers, ...] = ()

    @property
    def bytes_before(self) -> int:
        """Bytes of the converted weights, as they were."""
        return sum(layer.bytes_before for layer in self.converted)

    @property
    def bytes_after(self) -> int:
        """Their bytes now, scales included."""
        return sum(layer.bytes_after for layer in self.converted)

    def to_dict(self) -> dict[str, object]:
        """As JSON can write it."""
        return asdict(self)

    def high_precision(self) -> list[str]:
        """The lines of what stays in high precision, with reasons; none where nothing does."""
        lines = []
        if self.left:
            lines.append(f"left {len(self.left)} as they were:")
            for pattern, layers in united_groups((layer.name, layer.reason, layer) for layer in self.left):
                shape = f" {list(layers[0].shape)}" if len({layer.shape for layer in layers}) == 1 else ""
                lines.append(f"  {pattern}{shape}{_times(len(layers))}: {layers[0].reason}")
        if self.experts:
            held = human_bytes(sum(expert.bytes for expert in self.experts))
            lines.append(f"left {len(self.experts)} stacked parameters of experts, {held}, which are no linear layers:")
            sizes_of = [
                (each.name, (each.shape, f"{human_bytes(each.bytes)}, in high precision")) for each in self.experts
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
            steps = [(each.name, each.step) for each in self.fused]
            lines += [f"  {pattern}{_times(count)}: {step}" for pattern, count, step in by_pattern(steps)]
        if self.unfused:
            lines.append(f"not fused {len(self.unfused)}, whose layers are computed one by one:")
            kept = [(each.name, each.reason) for each in self.unfused]
            lines += [f"  {pattern}{_times(count)}: {reason}" for pattern, count, reason in by_pattern(kept)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the printed report, for notebooks."""
        return f"<pre>{escape(str(self))}</pre>"


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


def _line(pattern: str, count: int, shape: tuple[int, ...], said: str) -> str:
    return f"  {pattern} {list(shape)}{_times(count)}: {said}"
