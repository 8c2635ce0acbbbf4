"""`--init-from`: start a run with the weights of a checkpoint or of safetensors instead of random weights.

Names, shapes and formats are compared before anything is allocated. The optimizer is new. Its masters start from the
weights or, if the safetensors are in high precision, from the values of the file.
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
    """Return the settings that the files next to the weights define; may be empty.

    Raises:
        ConfigurationError: there is nothing at `source`, or its configuration is of an unsupported model.
        CheckpointError: the source is damaged.
    """
    source = inputs.existing(source, "a checkpoint, or a folder of safetensors")
    result: dict[str, Any] = {}
    run = run_of(source)
    if run is not None:
        result = {name: getattr(run, name) for name in _OF_RUN}
    elif "://" not in source and (Path(source) / CONFIGURATION).is_file():
        content = read_layout_json(Path(source) / CONFIGURATION)
        described = settings_of(content, source)
        check_angles(content, source)
        result = {name: getattr(described, name) for name in _SIZES}
    return result | _recipe_of(source)


def _recipe_of(source: str) -> dict[str, Any]:
    """Return the recipe that matches a checkpoint's formats or the layout of safetensors, if there is one."""
    if not _is_checkpoint(source):
        name = recipe_of_files(Path(source))
        return {} if name is None else {"recipe": name}
    tags = {weight.tag for weight in CheckpointModel(source).weights.values()} - {None}
    names = [name for name in recipe.NAMES if (cell := recipe.resolve(name).weight) and {cell.tag} == tags]
    return {"recipe": names[0]} if names else {}


def recipe_of_files(folder: Path) -> str | None:
    """Return the recipe that matches the layout of a folder of safetensors; None if none does or the weights are in
    high precision."""
    config = folder / CONFIGURATION
    quantized = read_layout_json(config).get("quantization_config") if config.is_file() else None
    layout = table.detect(quantized, SafetensorsFiles(folder).names(), str(folder))
    return None if layout is None else table.recipe_of(layout)


def check(settings: TrainSettings, model: nn.Module) -> None:
    """Compare names, shapes and formats with the run's model on the meta device. Reads no weights; one process.

    Raises:
        CheckpointError: a difference; the message names the first weight and both versions.
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
    """Return advice about incomplete weights from `--model DIR`; "" for other sources."""
    if settings.is_by_sizes or huggingface.weights_beside(settings.model) != settings.init_from:
        return ""
    return (
        f"the safetensors of --model are not all that its {CONFIGURATION} describes: is the download complete? "
        "(--random-weights begins without them)"
    )


def _ways_out(settings: TrainSettings) -> str:
    """Return advice for weights with the names or sizes of another model."""
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
    weights = CheckpointModel(source).weights
    for name, param in model.named_parameters():
        if name not in weights:
            extra = _first_other(weights, model)
            raise CheckpointError(f"{source} lacks {name}, which this model has; {extra}{_ways_out(settings)}")
        weight, quantized = weights[name], components.quantized_local(param)
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
    if len(weights) > len(dict(model.named_parameters())):
        raise CheckpointError(f"{source}: {_first_other(weights, model)}{_ways_out(settings)}")


def _first_other(held: dict[str, Any], model: nn.Module) -> str:
    params = dict(model.named_parameters())
    extra = [name for name in held if name not in params]
    return f"it has {extra[0]}, which this model lacks; " if extra else ""


def load(source: str, model: nn.Module) -> str:
    """Load the weights of `source`, before the optimizer is built; return a line about them. Collective.

    Raises:
        CheckpointError: the weights do not fit or are damaged; raised on every rank.
    """
    if _is_checkpoint(source):
        checkpoints.load(source, model)
        return f"began with the weights of {source}"
    return f"began with the weights of {'; '.join(layouts.load(source, model).lines())}"
