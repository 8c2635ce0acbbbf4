"""Names of the parameters of one linear layer of a module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from quantshard.errors import ConfigurationError


@dataclass(frozen=True)
class Projection:
    """One linear layer of a module: one weight, or several that read the same input.

    `parts`: prefix of each weight's parameter names, before "weight" and "bias". `suffix`: suffix of all parameter
    names. `prefix`: prefix of the names of the amax histories, which all parts share. `mode`: tensor-parallel split,
    "column", "row" or None.
    """

    parts: tuple[str, ...] = ("",)
    prefix: str = ""
    mode: str | None = None
    suffix: str = ""

    @cached_property
    def weights(self) -> tuple[str, ...]:
        return tuple(f"{part}weight{self.suffix}" for part in self.parts)

    @cached_property
    def biases(self) -> tuple[str, ...]:
        return tuple(f"{part}bias{self.suffix}" for part in self.parts)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        return (*self.weights, *self.biases)


def split_sizes(owner: str, out_features: int, split: Sequence[str] | Mapping[str, int] | None) -> dict[str, int]:
    """Resolve TransformerEngine's `parameters_split` to {prefix of parameter names: out_features of the part}."""
    if split is None:
        return {"": out_features}
    sizes = dict(split) if isinstance(split, Mapping) else dict.fromkeys(split, out_features // max(len(split), 1))
    if not sizes or sum(sizes.values()) != out_features or min(sizes.values()) < 1:
        raise ConfigurationError(f"{owner}(parameters_split={split!r}): its parts must add up to {out_features}")
    return {name.rstrip("_") + "_": size for name, size in sizes.items()}
