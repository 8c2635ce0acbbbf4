"""`quantshard export` and `quantshard import`: a model's weights to and from the layouts of other programs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from quantshard import checkpoints, layouts, recipe
from quantshard.checkpoints.disk.store import is_taken, local
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.foreign import FieldReader, shown
from quantshard.layouts import LLAMA, Names, names
from quantshard.layouts.files import SafetensorsFiles, read_layout_json
from quantshard.layouts.table import LAYOUTS
from quantshard.layouts.writing import MOST, MOST_HEADS, is_tied
from quantshard.modules.base.module import QuantizedModule
from quantshard.recipe import Recipe
from quantshard.tensor import components
from quantshard.terminal.screen import say
from quantshard.trainer.config import TrainSettings, from_mapping, read_settings_file
from quantshard.trainer.data import VOCABULARY
from quantshard.trainer.model import LanguageModel

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_EPSILON, _ROTARY_BASE = 1e-5, 10000.0

MAP = typer.Option("--names", metavar="MAP", help="TOML: our names -> theirs. Default: Llama's", show_default=False)
LOSSY = typer.Option("--lossy", help="quantize anew what does not go over exactly")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("export", no_args_is_help=True)(export)
    app.command("import", no_args_is_help=True)(import_)


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="a checkpoint, e.g. DIR/checkpoints/step-000100, or its URL")
    ],
    layout: Annotated[
        str, typer.Option(help=f"one of {', '.join(dict.fromkeys(row.family for row in LAYOUTS.values()))}, or a row")
    ],
    out: Annotated[Path, typer.Option(help="a folder that does not exist")],
    names_file: Annotated[Path | None, MAP] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="with config.json and tokenizer. Default: that of the run, if it is one's"),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="of one file, such as 5GB")] = "5GB",
    values: Annotated[str, typer.Option(help="of plain layouts: of the masters, or of the weights")] = "masters",
    lossy: Annotated[bool, LOSSY] = False,
) -> None:
    """Write a checkpoint's model as safetensors that other programs read, one weight in memory at a time."""
    done = layouts.export(
        checkpoint,
        layout,
        out,
        names=_names(names_file),
        config=config if config is not None else _config_of_run(checkpoint),
        max_shard_bytes=size(max_shard_size),
        values=values,
        lossy=lossy,
    )
    say(*done.lines())


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="safetensors with config.json, of a Llama")],
    out: Annotated[str, typer.Option(help="the checkpoint to write: a folder that does not exist, or a URL")],
    recipe_name: Annotated[str, typer.Option("--recipe", help=f"one of {', '.join(recipe.NAMES)}")] = "mxfp8",
    names_file: Annotated[Path | None, MAP] = None,
    lossy: Annotated[bool, LOSSY] = False,
) -> None:
    """Write a checkpoint of quantized weights from safetensors of any layout, or in high precision.

    The checkpoint holds the model alone; `quantshard.layouts.load` loads into a model of yours, sharded, too.
    """
    if is_taken(out):
        raise CheckpointError(f"{out} exists and is not overwritten; import to another directory")
    folder = local(folder, "safetensors files")
    config = read_layout_json(folder / "config.json")
    settings = settings_of(config, str(folder))
    chosen = recipe.resolve(recipe_name)
    model = _described(folder, settings, chosen, config["vocab_size"])
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.reset_parameters()
            for param in module.parameters(recurse=False):
                quantized = components.quantized_local(param)
                if quantized is not None:
                    quantized.clear_high_precision_init_val()  # four times the weight
    done = layouts.load(folder, model, names=_names(names_file), lossy=lossy)
    checkpoints.save(out, model, None, {"recipe": recipe_name})
    say(*done.lines())
    say(f"wrote {out}, the model's weights by recipe {recipe_name!r}")


def _described(folder: Path, settings: TrainSettings, chosen: Recipe, vocabulary: int) -> LanguageModel:
    """The model on the meta device, which is no larger than what the files hold: else a line could ask for all memory.

    Raises:
        CheckpointError: it is larger.
    """
    tensors = SafetensorsFiles(folder).tensors
    held = 2 * sum(math.prod(shape) for _, shape in tensors.values())  # codes of four bits are two to a byte
    if settings.layers <= len(tensors):
        model = LanguageModel(settings, chosen, "meta", vocabulary=vocabulary)
        if sum(param.numel() for param in model.parameters()) <= held:
            return model
    raise CheckpointError(
        f"{folder}: config.json describes a larger model, of {settings.layers} layers, than the {len(tensors)} tensors "
        "of the files make up"
    )


def size(text: str) -> int:
    """Bytes from a text such as 5GB.

    Raises:
        ConfigurationError: it is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?b?)", text.strip().lower())
    unit = "" if found is None else found[2].removesuffix("b")
    if found is None or float(found[1]) <= 0:
        raise ConfigurationError(f"--max-shard-size {text!r} is no size; write it as 5GB or 500MB")
    return max(1, int(float(found[1]) * _UNITS[unit + "b" if unit else ""]))


def hf_config(settings: TrainSettings) -> dict[str, Any]:
    """The Hugging Face configuration of a run's model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": settings.hidden,
        "intermediate_size": settings.ffn,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": settings.seq_length,
        "rms_norm_eps": _EPSILON,
        "rope_theta": _ROTARY_BASE,
        "tie_word_embeddings": settings.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": settings.params_dtype,
    }


_LIKE = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
         "ffn": "intermediate_size", "seq_length": "max_position_embeddings"}  # fmt: skip


def settings_of(config: Mapping[str, Any], where: str) -> TrainSettings:
    """The sizes of a Llama from its Hugging Face configuration.

    Raises:
        ConfigurationError: it is of another architecture, or lacks a size.
    """
    fields = FieldReader(config, f"{where}: config.json")
    kind, dtype = fields.text("model_type"), fields.text("dtype") or fields.text("torch_dtype")
    instead = "build your model and load into it by quantshard.layouts.load"
    if kind != "llama" or fields.flag("attention_bias") or fields.flag("mlp_bias"):
        raise ConfigurationError(
            f"{where}: config.json is of model_type {shown(kind)}; the command builds Llamas without biases: {instead}"
        )
    found: dict[str, Any] = {}
    for ours, theirs in {**_LIKE, "vocabulary": "vocab_size"}.items():
        most = MOST_HEADS if ours in ("heads", "layers") else MOST
        count = fields.integer(theirs, 2 if ours == "seq_length" else 1, most)
        if count is None:
            raise fields.wrong(theirs, "given")
        found[ours] = count
    del found["vocabulary"]
    width = fields.integer("head_dim", 1, MOST) or found["hidden"] // found["heads"]
    if width * found["heads"] != found["hidden"]:
        raise ConfigurationError(f"{where}: heads of {width} features do not make up {found['hidden']}: {instead}")
    settings = TrainSettings(
        **found,
        kv_heads=fields.integer("num_key_value_heads", 1, MOST_HEADS) or 0,
        tied=is_tied(config),
        params_dtype="float32" if dtype == "float32" else "bfloat16",
    ).resolved()
    settings.check()
    return settings


def _names(path: Path | None) -> Names:
    return LLAMA if path is None else names.read_names(path)


def _config_of_run(checkpoint: str) -> dict[str, Any] | None:
    """The configuration of the model of the run whose checkpoint this is; None if it is not in a run's folder."""
    file = Path(checkpoint).absolute().parent.parent / "config.toml"
    if "://" in checkpoint or not file.is_file():
        return None
    settings = TrainSettings(**from_mapping(read_settings_file(file), str(file)))
    return hf_config(settings) if settings.architecture == "llama" else None
