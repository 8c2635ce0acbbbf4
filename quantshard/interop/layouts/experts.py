"""Names in files of a mixture's weights: transformers splits the stacks of experts when it saves a model.

Its conversion runs on row numbers instead of values, which shows the rows of our weights in each tensor of a file.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quantshard.errors import ConfigurationError
from quantshard.foreign import FieldReader
from quantshard.interop.layouts.conversion import RowRun
from quantshard.interop.layouts.names import HeadCounts, Names

FileRows = Mapping[str, Mapping[str, list[RowRun]]]
"""Our name -> name in files -> rows of our weight. A stack counts the rows of all its matrices, one after the other."""


@dataclass(frozen=True)
class FileNames(Names):
    """The map of a transformers mixture."""

    files: FileRows = field(default_factory=dict)

    def theirs(self, ours: str, rows: int, heads: HeadCounts | None) -> dict[str, list[RowRun]]:
        return dict(self.files.get(ours, {}))


def is_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a weight of a model stacks matrices: weights of convolutions have the last name "weight"."""
    return len(shape) == 3 and not name.endswith(".weight")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a stack [matrices, rows, columns] as one matrix; other shapes are returned as they are."""
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


def empty_model(config: Mapping[str, Any], most_layers: int) -> Any:
    """Build the transformers model of a config.json on the meta device. `most_layers`: largest plausible number."""
    FieldReader(config, "config.json").integer("num_hidden_layers", 1, most_layers)
    try:
        transformers = importlib.import_module("transformers")
        kind: Any = getattr(transformers, config["architectures"][0])
        if not issubclass(kind, transformers.PreTrainedModel):
            raise TypeError(f"{kind.__name__} is no model")
        with torch.device("meta"):
            return kind(kind.config_class.from_dict({**config, "quantization_config": None}))
    except (ImportError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigurationError(f"the model of config.json with split experts cannot be built: {text}") from None


def file_rows(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> FileRows:
    """Return where files of a transformers model have the rows of these weights, which must be whole."""
    owners: list[tuple[str, int]] = []
    numbers, sizes = {}, {}
    for name, shape in shapes.items():
        count = math.prod(matrix_shape(shape)[:1])
        first = len(owners)
        owners += [(name, row) for row in range(count)]
        numbers[name] = torch.arange(first, first + count, device="cpu").reshape(_narrow(shape))
        sizes[name] = torch.empty(shape, device="meta", dtype=torch.float32)
    try:
        revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
        parts, sizes = revert(model, numbers), revert(model, sizes)
    # transformers' operations can raise any exception
    except Exception as error:
        raise ConfigurationError(f"transformers cannot split the experts of this model: {error}") from error
    result: dict[str, dict[str, list[RowRun]]] = {name: {} for name in shapes}
    for name, part in parts.items():
        names, rows = zip(*(owners[number] for number in part.flatten().tolist()), strict=True)
        ours = names[0]
        size = tuple(sizes[name].shape) if name in sizes else ()
        has_all_columns = matrix_shape(size)[1:] == matrix_shape(shapes[ours])[1:] and part.shape == _narrow(size)
        if set(names) != {ours} or not has_all_columns:
            raise ConfigurationError(f"{ours}: its rows are not in files as they are, but {list(size)} in {name}")
        result[ours][name] = _runs(rows)
    if sorted(int(n) for part in parts.values() for n in part.flatten()) != list(range(len(owners))):
        raise ConfigurationError("transformers leaves out rows of this model's experts; choose the native form")
    return result


def _narrow(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of row numbers: one column."""
    return (*shape[:2], 1) if len(shape) == 3 else (*shape[:1], *(1 for _ in shape[1:]))


def _runs(rows: tuple[int, ...]) -> list[RowRun]:
    """Return the runs of consecutive rows."""
    starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
    return [RowRun(rows[i], i, stop - i) for i, stop in zip(starts, [*starts[1:], len(rows)], strict=True)]
