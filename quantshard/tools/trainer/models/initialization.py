"""The model of a new run, from `--model` and `--init-from`: settings that follow from them, and the initial weights.

Names, shapes and formats are compared before anything is allocated. The optimizer is new. Its masters start from the
weights or, if the safetensors are in high precision, from the values of the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from quantshard import checkpoints, recipe
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.errors import ConfigurationError, meant, shown
from quantshard.foreign import FieldReader
from quantshard.interop import layouts
from quantshard.interop.layouts import files, table
from quantshard.interop.layouts.source import CheckpointModel
from quantshard.tools.terminal import outputs
from quantshard.tools.trainer.data.tokenizer import FAST, SPECIAL, VOCABULARY, tokenizer_contents, tokenizer_digest
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.run_dir import run_of_checkpoint
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import SIZES

_SIZES: Final = (
    "architecture", "hidden", "layers", "heads", "kv_heads", "ffn", "experts", "head_dim", "rope_theta", "norm_eps",
    "qk_norm", "tied", "params_dtype",
)  # fmt: skip
"""Settings of the built-in decoder that the configuration of a transformers model determines."""


_FINE_TUNING: Final = {"lr": 1e-5, "weight_decay": 0.01}
_FINE_TUNING_CONTEXT = 2048


def fine_tuning_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what fine-tuning sets differently from training from scratch, without the settings in `given`."""
    if not given.get("init_from"):
        return {}
    defaults: dict[str, Any] = dict(_FINE_TUNING)
    model = str(given.get("model", ""))
    location = Path(str(given["init_from"]) if model in ("", *SIZES) else model)
    if location.is_file() or (location / files.CONFIGURATION).is_file():
        longest = huggingface.longest_sequence(huggingface.read_configuration(str(location)))
        defaults["seq_length"] = min(longest or _FINE_TUNING_CONTEXT, _FINE_TUNING_CONTEXT)
    return {name: value for name, value in defaults.items() if name not in given}


def chosen(flags: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Add the settings that follow from the named model; flags come first, then `--model NAME`, then the file."""
    merged = {**file, **flags}
    model, source = str(merged.get("model", "")), str(merged.get("init_from", ""))
    if source and merged.get("random_weights"):
        raise ConfigurationError(f"random_weights, but init_from = {shown(source)} names weights; give one")
    if model and model not in SIZES:
        return _of_transformers(model, source, flags, merged) | merged
    named = dict(SIZES[model]) if model else {}
    weights = sizes(source) if source else {}
    for name, size in named.items():
        # e.g. rope_theta, which no shape shows
        if name not in flags and weights.get(name, size) != size:
            raise ConfigurationError(
                f"model = {shown(model)} has {name} = {shown(size)}, but the model of init_from = "
                f"{shown(source)} has {shown(weights[name])}; leave out --model or --init-from"
            )
    if "model" in flags:
        return {**weights, **file, **named, **flags}
    return named | weights | merged


def _of_transformers(model: str, source: str, flags: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if not Path(model).exists() and Path(model).name == model:
        raise ConfigurationError(
            f"model = {shown(model)} is no folder or size; {meant(model, SIZES)}known: {', '.join(SIZES)}"
        )
    huggingface.read_configuration(model)
    # flags only, because the file of a run contains all settings
    for name in (name for name in _SIZES if name in flags):
        raise ConfigurationError(f"{name} is decided by model = {shown(model)}; leave {name} out")
    result: dict[str, Any] = {}
    if not (source or given.get("random_weights")):
        folder = Path(model) if Path(model).is_dir() else Path(model).parent
        if not any(file.name.endswith(files.SUFFIX) for file in folder.iterdir()):
            # other formats may run code
            raise ConfigurationError(
                f"model = {shown(model)} has no safetensors beside it; give --random-weights or --init-from DIR"
            )
        result["init_from"] = str(folder)
    if not given.get("tokenizer") and any((Path(model) / name).is_file() for name in (FAST, SPECIAL[0])):
        result["tokenizer"] = model
    return result


def sizes(source: str) -> dict[str, Any]:
    """Return the settings that the files next to the weights define; may be empty."""
    source = outputs.existing(source, "a checkpoint, or a folder of safetensors")
    result: dict[str, Any] = {}
    run = run_of(source)
    if run is not None:
        names = (*_SIZES, "experts_per_token", "vocabulary", "seq_length", "recipe", "router_balance")
        result = {name: getattr(run, name) for name in names}
    elif "://" not in source and (Path(source) / files.CONFIGURATION).is_file():
        content = files.read_layout_json(Path(source) / files.CONFIGURATION)
        described = settings_of(content, source)
        kind, _ = _angles(FieldReader(content, f"{source}: config.json"))
        # the weights were trained with other angles than those of the built-in decoder
        if kind != _DEFAULT_ANGLES:
            raise ConfigurationError(f"{source} has rotary positions of rope_type {shown(kind)}; pass --model {source}")
        result = {name: getattr(described, name) for name in (*_SIZES, "experts_per_token", "vocabulary")}
    return result | _recipe_of(source)


def _recipe_of(source: str) -> dict[str, Any]:
    """Return the recipe that matches a checkpoint's formats or the layout of safetensors, if there is one."""
    if _is_checkpoint(source):
        tags = {weight.tag for weight in CheckpointModel(source).weights.values()} - {None}
        names = [name for name in recipe.NAMES if (spec := recipe.resolve(name).weight) and {spec.tag} == tags]
    else:
        names = [name for name in [recipe_of_files(Path(source))] if name is not None]
    return {"recipe": names[0]} if names else {}


def recipe_of_files(folder: Path) -> str | None:
    """Return the recipe that matches a folder's safetensors; None if none does or they are in high precision."""
    config = folder / files.CONFIGURATION
    quantized = files.read_layout_json(config).get("quantization_config") if config.is_file() else None
    layout = table.detect(quantized, files.SafetensorsFiles(folder).tensors, str(folder))
    return None if layout is None else table.recipe_of(layout)


def _is_checkpoint(source: str) -> bool:
    if "://" in source or is_complete(source):
        return True
    if Path(source).is_dir() and any(path.name.endswith(files.SUFFIX) for path in Path(source).iterdir()):
        return False
    raise ConfigurationError(f"--init-from {source} is no complete checkpoint, and holds no safetensors")


def load(source: str, model: nn.Module) -> str:
    """Load the weights of `source`, before the optimizer is built; return a line about them. Collective."""
    if _is_checkpoint(source):
        checkpoints.load(source, model)
        return f"began with the weights of {source}"
    return f"began with the weights of {'; '.join(layouts.load(source, model).lines())}"


_DEFAULT_ANGLES = "default"
"""transformers' name for unscaled rotary positions."""


def hf_config(settings: TrainSettings) -> dict[str, Any]:
    """Return the Hugging Face configuration of a run's model: Llama, or Qwen3 if queries and keys are normalized."""
    kind = "Qwen3" if settings.qk_norm else "Llama"
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        **{hf_key: getattr(settings, name) for name, hf_key in _LIKE.items()},
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_size,
        "vocab_size": settings.vocabulary or VOCABULARY,
        "rms_norm_eps": settings.norm_eps,
        "rope_theta": settings.rope_theta,
        "rope_parameters": {"rope_type": _DEFAULT_ANGLES, "rope_theta": settings.rope_theta},
        "tie_word_embeddings": settings.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": settings.params_dtype,
    }


_LIKE = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
         "ffn": "intermediate_size", "seq_length": "max_position_embeddings"}  # fmt: skip


_WITH_QK_NORM = {"llama": False, "qwen3": True}
"""transformers families that the built-in decoder can represent, and whether they normalize queries and keys."""


def settings_of(config: Mapping[str, Any], where: str) -> TrainSettings:
    """Read the sizes of a Llama or Qwen3 from its Hugging Face configuration."""
    fields = FieldReader(config, f"{where}: config.json")
    kind, dtype = fields.text("model_type"), fields.text("dtype") or fields.text("torch_dtype")
    biased = fields.flag("attention_bias") or fields.flag("mlp_bias")
    if kind not in _WITH_QK_NORM or biased or fields.flag("use_sliding_window"):
        raise ConfigurationError(
            f"{where}: config.json is of model_type {shown(kind)}; quantshard builds Llamas and Qwen3 without biases "
            f"and windows; train the model itself: --model {where}"
        )
    sizes: dict[str, Any] = {}
    for setting, hf_key in {**_LIKE, "vocabulary": "vocab_size"}.items():
        most = files.MOST_HEADS if setting in ("heads", "layers") else files.MOST
        sizes[setting] = fields.integer(hf_key, 2 if setting == "seq_length" else 1, most)
        if sizes[setting] is None:
            raise fields.wrong(hf_key, "given")
    width, eps = fields.integer("head_dim", 1, files.MOST), fields.number("rms_norm_eps", 1e-30, 1)
    settings = TrainSettings(
        **sizes,
        qk_norm=_WITH_QK_NORM[kind],
        head_dim=0 if width in (None, sizes["hidden"] // sizes["heads"]) else width or 0,
        rope_theta=_angles(fields)[1],
        norm_eps=TrainSettings.norm_eps if eps is None else eps,
        kv_heads=fields.integer("num_key_value_heads", 1, files.MOST_HEADS) or 0,
        tied=files.is_tied(config),
        params_dtype="float32" if dtype == "float32" else "bfloat16",
    ).resolved()
    settings.check()
    return settings


def _angles(fields: FieldReader) -> tuple[str, float]:
    """Return the type of rotary scaling (transformers' name) and the base."""
    # keys of transformers 5 and of earlier releases
    names = ("rope_parameters", "rope_scaling")
    tables = [FieldReader(fields.table(name) or {}, f"{fields.where}: {name}") for name in names]
    kinds = [kind for reader in tables if (kind := reader.text("rope_type") or reader.text("type"))]
    bases = [base for reader in (*tables, fields) if (base := reader.number("rope_theta", 1, 1e12)) is not None]
    return kinds[0] if kinds else _DEFAULT_ANGLES, bases[0] if bases else TrainSettings.rope_theta


def run_of(checkpoint: str) -> TrainSettings | None:
    """Return the settings of the run that owns a checkpoint (see `run_of_checkpoint`); None if there is no such run."""
    run = run_of_checkpoint(checkpoint)
    return None if run is None else run.read_config()[0]


def config_of_run(checkpoint: str) -> dict[str, Any] | None:
    """Return the model configuration of the run that owns a checkpoint; None without a run or an exportable model."""
    run = run_of_checkpoint(checkpoint)
    if run is None:
        return None
    settings, _, corpus = run.read_config()
    if not settings.is_by_sizes:
        return run.read_model(settings)
    if settings.architecture != "llama" or settings.experts:
        return None
    config = hf_config(settings)
    if settings.tokenizer:
        end = corpus.get("end_of_document")
        config |= {"bos_token_id": end, "eos_token_id": end}
    return config


def tokenizer_of_run(checkpoint: str) -> dict[str, bytes]:
    """Return the tokenizer files, by name, of the run that owns a checkpoint; empty without a run or tokenizer."""
    run = run_of_checkpoint(checkpoint)
    settings, _, corpus = (TrainSettings(), None, {}) if run is None else run.read_config()
    contents = tokenizer_contents(settings.tokenizer) if settings.tokenizer else {}
    if contents and tokenizer_digest(contents) != corpus.get("tokenizer"):
        raise ConfigurationError(f"{settings.tokenizer} is not the tokenizer of the run; name that one by --config")
    return contents
