"""`quantshard export`, `import` and `convert-te`: convert weights to and from the layouts of other programs."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer import Argument, Option

from quantshard import checkpoints, recipe
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.manifest import FileEntry
from quantshard.checkpoints.disk.store import LocalStore, is_taken, local, locate, why
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.interop import layouts, transformer_engine
from quantshard.interop.layouts import Names, names
from quantshard.interop.layouts.files import SafetensorsFiles, companions, copied_lines, read_layout_json
from quantshard.interop.layouts.table import LAYOUTS
from quantshard.interop.layouts.writing import CONFIGURATION
from quantshard.modules.base.module import QuantizedModule
from quantshard.tensor import components
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import say, transfer_bar
from quantshard.tools.trainer.models.decoder import LanguageModel, recipes_of
from quantshard.tools.trainer.models.initialization import config_of_run, recipe_of_files, settings_of, tokenizer_of_run
from quantshard.tools.trainer.run_dir import run_of_checkpoint
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import LayerRecipes

_LONGEST = 1 << 30
"""Maximum size in bytes of a file that is copied next to the weights."""
_FAMILIES = tuple(dict.fromkeys(row.family for row in LAYOUTS.values()))
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

CHECKPOINT = Argument(..., metavar="CKPT", help="a checkpoint, e.g. DIR/checkpoints/step-000100, or its URL")
MAP = Option(
    None,
    "--names",
    metavar="MAP",
    help="TOML file: quantshard's names -> the files'. Default: Llama's names or the model's own",
    show_default=False,
)
RECIPE = Option(
    None,
    "--recipe",
    help=f"one of {', '.join(recipe.CHOICES)} ({recipe.AUTO_HELP}); by GEMM or by layer as in train. Default: as in "
    f"the files, or {recipe.AUTO}",
    show_default=False,
)
LOSSY = Option(False, "--lossy", help="requantize or round what cannot be converted exactly")


def export(
    checkpoint: str = CHECKPOINT,
    layout: str = Option(..., help=f"one of {', '.join(_FAMILIES)}, or a row"),
    out: Path = Option(..., help="a new folder"),
    names_file: Path | None = MAP,
    config: Path | None = Option(None, metavar="DIR", help="folder with config.json and tokenizer. Default: the run's"),
    max_shard_size: str = Option("5GB", help="maximum file size, such as 5GB"),
    values: str = Option("masters", help="masters or weights (plain layouts), or ema: averages (any layout)"),
    lossy: bool = LOSSY,
    zero_centered_gamma: bool | None = Option(
        None,
        "--zero-centered/--no-zero-centered",
        help="norm weights are stored as gamma - 1, if the checkpoint does not record it",
        show_default=False,
    ),
) -> None:
    """Write a checkpoint's model as safetensors for other programs, one file at a time."""
    outputs.existing(checkpoint, "a checkpoint")
    tokenizer: dict[str, bytes] = {}
    config_path: Any = None if config is None else outputs.existing(config, "a config.json or its folder")
    if config is None:
        tokenizer, config_path = tokenizer_of_run(checkpoint), config_of_run(checkpoint)
    with transfer_bar("exporting"):
        result = layouts.export(
            checkpoint,
            layout,
            out,
            names=_names(names_file),
            config=config_path,
            max_shard_bytes=size(max_shard_size),
            values=values,
            lossy=lossy,
            zero_centered_gamma=zero_centered_gamma,
        )
    for name, content in tokenizer.items():
        outputs.write_file(out / name, content)
    say(*result.lines(), *copied_lines([out / name for name in tokenizer]))
    if config is None and not tokenizer and run_of_checkpoint(checkpoint) is not None:
        say("no tokenizer was written: the run names none, so its tokens are bytes, or those of its token files")


def import_(
    folder: Path = Argument(..., metavar="DIR", help="folder with safetensors and config.json"),
    out: str = Option(..., help="checkpoint to write: a new folder or a URL"),
    recipe_name: str | None = RECIPE,
    names_file: Path | None = MAP,
    lossy: bool = LOSSY,
) -> None:
    """Write a checkpoint of quantized weights from safetensors of any layout.

    The checkpoint holds only the model, under the names of quantshard's decoder (train without --model).
    `quantshard.layouts.load` loads into any model, also a sharded one.
    """
    if is_taken(out):
        raise CheckpointError(f"{out} exists and is not overwritten; import to another folder")
    folder = local(outputs.existing(folder, "a folder of safetensors with config.json"), "safetensors files")
    config = read_layout_json(folder / CONFIGURATION)
    recipe_name = LayerRecipes.parse(recipe_name or recipe_of_files(folder) or recipe.AUTO).text
    settings = replace(settings_of(config, str(folder)), recipe=recipe_name)
    # Frozen weights do not keep high-precision values for the masters of an optimizer.
    model = _described(folder, settings, config["vocab_size"]).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.reset_parameters()
            for param in module.parameters(recurse=False):
                quantized = components.quantized_local(param)
                if quantized is not None:
                    quantized.clear_high_precision_init_val()  # takes four times the memory of the weight
    with transfer_bar("importing"):
        result = layouts.load(folder, model, names=_names(names_file), lossy=lossy)
        checkpoints.save(out, model, None, {"recipe": recipe_name})
    say(*result.lines(), *_copy_beside(folder, out))
    say(f"wrote {out}, weights of quantshard's decoder by recipe {recipe_name!r}")


def convert_te(
    source: Path = Argument(..., metavar="CKPT", help="DCP checkpoint written with TransformerEngine 2.17 or later"),
    like: Path = Option(..., metavar="CKPT", help="checkpoint of the new quantshard model"),
    out: Path = Option(..., help="the checkpoint to write, a new folder"),
    model: str = Option("model", help="key of the model's state dict; '': top level"),
    optimizer: str = Option("optimizer", help="key of the optimizer's state dict"),
    lossy: bool = LOSSY,
) -> None:
    """Convert a TransformerEngine checkpoint (model, FusedAdam), and list what is not exact."""
    for checkpoint in (source, like):
        outputs.existing(checkpoint, "a checkpoint")
    result = transformer_engine.convert(source, like, out, model=model, optimizer=optimizer, lossy=lossy)
    say(*result.lines())
    say(f"wrote {out}")


def _copy_beside(folder: Path, out: str) -> list[str]:
    """Copy configuration and tokenizer next to the weights, and add them to the manifest. Returns a report."""
    (store, place), paths = locate(out), companions(folder, CONFIGURATION)
    contents = {path.name: LocalStore().read(path, _LONGEST) for path in paths}
    current = manifest.read_manifest(out)
    if current is not None:
        entries = {name: FileEntry(*manifest.digest(content)) for name, content in contents.items()}
        contents[manifest.MANIFEST] = replace(current, files={**current.files, **entries}).to_json().encode()
    try:
        for name, content in contents.items():
            store.write(store.join(place, name), content)
    except OSError as error:
        raise CheckpointError(f"cannot write to {out} ({why(error)})") from error
    return copied_lines(paths)


def _described(folder: Path, settings: TrainSettings, vocabulary: int) -> LanguageModel:
    """Build the model on the meta device, if it is not larger than the untrusted files."""
    tensors = SafetensorsFiles(folder).tensors
    # Two 4-bit codes are stored in one byte.
    max_elements = 2 * sum(math.prod(shape) for _, shape in tensors.values())
    if settings.layers <= len(tensors):
        model = LanguageModel(settings, recipes_of(settings), "meta", vocabulary=vocabulary)
        if sum(param.numel() for param in model.parameters()) <= max_elements:
            return model
    size = f"the model of config.json, with {settings.layers} layers,"
    raise CheckpointError(f"{folder}: {size} is larger than the {len(tensors)} tensors of the files")


def size(text: str, option: str = "--max-shard-size") -> int:
    """Parse a size such as "5GB" into bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigurationError(f"{option} {text!r} is not a size; write it as 5GB or 500MB")
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


def _names(path: Path | None) -> Names | None:
    return None if path is None else names.read_names(outputs.existing(path, "a map of names"))
