"""`--init-from`: a run begins with the weights of a checkpoint, or of a folder of safetensors, instead of random ones.

Names, shapes and formats are compared before anything is made; the optimizer is new, and its masters begin with the
weights, or, where safetensors are in high precision, with the values of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from quantshard import checkpoints, recipe
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.interop import layouts
from quantshard.interop.layouts import table
from quantshard.interop.layouts.files import SUFFIX, SafetensorsFiles, read_layout_json
from quantshard.interop.layouts.loading import check as check_safetensors
from quantshard.interop.layouts.source import CheckpointModel
from quantshard.interop.layouts.writing import CONFIGURATION
from quantshard.tensor import components
from quantshard.tools.terminal import inputs
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.models.configuration import check_angles, run_of, settings_of
from quantshard.tools.trainer.settings.config import TrainSettings

_SIZES = (
    "hidden", "layers", "heads", "kv_heads", "ffn", "tied", "params_dtype", "head_dim", "rope_theta", "norm_eps",
    "qk_norm", "experts", "experts_per_token", "vocabulary",
)  # fmt: skip
_OF_RUN = ("architecture", *_SIZES, "seq_length", "recipe")


def sizes(source: str) -> dict[str, Any]:
    """The settings of the model that weights are of, as far as the files beside them say; none of them is needed.

    Raises:
        ConfigurationError: there is nothing at `source`, or its configuration is not of a model that is trained here.
        CheckpointError: it is damaged.
    """
    source = inputs.existing(source, "a checkpoint, or a folder of safetensors")
    found: dict[str, Any] = {}
    run = run_of(source)
    if run is not None:
        found = {name: getattr(run, name) for name in _OF_RUN}
    elif "://" not in source and (Path(source) / CONFIGURATION).is_file():
        content = read_layout_json(Path(source) / CONFIGURATION)
        described = settings_of(content, source)
        check_angles(content, source)
        found = {name: getattr(described, name) for name in _SIZES}
    return found | _recipe_of(source)


def _recipe_of(source: str) -> dict[str, Any]:
    """The recipe of a checkpoint's formats, or of the layout of safetensors, if one has these."""
    if not _is_checkpoint(source):
        name = recipe_of_files(Path(source))
        return {} if name is None else {"recipe": name}
    tags = {weight.tag for weight in CheckpointModel(source).weights.values()} - {None}
    names = [name for name in recipe.NAMES if (cell := recipe.resolve(name).weight) and {cell.tag} == tags]
    return {"recipe": names[0]} if names else {}


def recipe_of_files(folder: Path) -> str | None:
    """Return the recipe whose weights are those of a folder of safetensors; None if none is, or in high precision."""
    config = folder / CONFIGURATION
    quantized = read_layout_json(config).get("quantization_config") if config.is_file() else None
    layout = table.detect(quantized, SafetensorsFiles(folder).names(), str(folder))
    return None if layout is None else table.recipe_of(layout)


def check(settings: TrainSettings, model: nn.Module) -> None:
    """Compare names, shapes and formats with those of the run's model, on the meta device. One process; no weight is
    read.

    Raises:
        CheckpointError: they differ; naming the first weight, with what it is here and there.
    """
    source = inputs.existing(settings.init_from, "a checkpoint, or a folder of safetensors")
    if _is_checkpoint(source):
        _check_checkpoint(source, model, settings)
    else:
        try:
            check_safetensors(source, model)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_of_its_own(settings) or _ways_out(settings)}") from None


def _of_its_own(settings: TrainSettings) -> str:
    """What to do about weights that `--model DIR` brought along, or ""."""
    if settings.is_by_sizes or huggingface.weights_beside(settings.model) != settings.init_from:
        return ""
    return (
        f"the safetensors of --model are not all that its {CONFIGURATION} describes: is the download complete? "
        "(--random-weights begins without them)"
    )


def _ways_out(settings: TrainSettings) -> str:
    """What to do where names or sizes are those of another model."""
    if settings.is_by_sizes:
        return (
            "--init-from takes the sizes of the model here (--hidden, --layers, --vocabulary, ...); for another model, "
            "load into it by quantshard.layouts.load"
        )
    return (
        "--init-from takes the names and sizes of the --model here; what quantshard import has written, or train "
        "without --model, is of quantshard's own decoder: then leave --model out, or name the safetensors themselves"
    )


def _is_checkpoint(source: str) -> bool:
    if "://" in source or is_complete(source):
        return True
    if Path(source).is_dir() and any(path.name.endswith(SUFFIX) for path in Path(source).iterdir()):
        return False
    raise ConfigurationError(
        f"--init-from {source} is no complete checkpoint, and holds no safetensors; of a run, name a checkpoint in it, "
        "as RUN/checkpoints/step-000100"
    )


def _check_checkpoint(source: str, model: nn.Module, settings: TrainSettings) -> None:
    held = CheckpointModel(source).weights
    for name, param in model.named_parameters():
        if name not in held:
            other = _first_other(held, model)
            raise CheckpointError(f"{source} lacks {name}, which this model has; {other}{_ways_out(settings)}")
        weight, quantized = held[name], components.quantized_local(param)
        if weight.shape != tuple(param.shape):
            raise CheckpointError(
                f"{source}: {name} is {list(weight.shape)} there, and {list(param.shape)} here; {_ways_out(settings)}"
            )
        tag = None if quantized is None else quantized.quantized_storage.cell.tag
        if weight.tag != tag:
            raise CheckpointError(
                f"{source}: {name} is stored as {weight.tag or 'high precision'} there, and recipe = "
                f"{settings.recipe!r} has {tag or 'high precision'}; take the recipe of the checkpoint, or start with "
                "it and change it by quantshard resume --recipe"
            )
    if len(held) > len(dict(model.named_parameters())):
        raise CheckpointError(f"{source}: {_first_other(held, model)}{_ways_out(settings)}")


def _first_other(held: dict[str, Any], model: nn.Module) -> str:
    own = dict(model.named_parameters())
    others = [name for name in held if name not in own]
    return f"it has {others[0]}, which this model lacks; " if others else ""


def load(source: str, model: nn.Module) -> str:
    """Load the weights of `source`, before the optimizer is made, and say what was loaded. A collective call.

    Raises:
        CheckpointError: they do not fit, or are damaged; the same on every rank.
    """
    if _is_checkpoint(source):
        checkpoints.load(source, model)
        return f"began with the weights of {source}"
    return f"began with the weights of {'; '.join(layouts.load(source, model).lines())}"
