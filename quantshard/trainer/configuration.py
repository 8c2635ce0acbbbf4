"""The Hugging Face configuration of a run's model, and what such a configuration says of a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantshard.errors import ConfigurationError
from quantshard.foreign import FieldReader, shown
from quantshard.layouts.writing import MOST, MOST_HEADS, is_tied
from quantshard.trainer.config import TrainSettings, from_mapping, read_settings_file
from quantshard.trainer.data import VOCABULARY
from quantshard.trainer.data.tokenizer import tokenizer_contents, tokenizer_digest
from quantshard.trainer.run_dir import RunDir

_EPSILON, _ROTARY_BASE = 1e-5, 10000.0


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
        "vocab_size": settings.vocabulary or VOCABULARY,
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


def run_of(checkpoint: str) -> TrainSettings | None:
    """The settings of the run whose checkpoint this is; None if it is not in a run's folder."""
    file = _folder_of(checkpoint) / "config.toml"
    if "://" in checkpoint or not file.is_file():
        return None
    return TrainSettings(**from_mapping(read_settings_file(file), str(file)))


def config_of_run(checkpoint: str) -> dict[str, Any] | None:
    """The configuration of the model of the run whose checkpoint this is; None if there is no such run, or model."""
    settings = run_of(checkpoint)
    if settings is None or settings.architecture != "llama":
        return None
    found = hf_config(settings)
    if settings.tokenizer:
        end = RunDir(_folder_of(checkpoint)).read_config()[2].get("end_of_document")
        found |= {"bos_token_id": end, "eos_token_id": end}
    return found


def tokenizer_of_run(checkpoint: str) -> dict[str, bytes]:
    """The tokenizer's files of the run whose checkpoint this is, by name; none if there is no run, or no tokenizer.

    Raises:
        ConfigurationError: they are not there any more, or are other ones.
    """
    described = run_of(checkpoint)
    if described is None or not described.tokenizer:
        return {}
    settings, _, corpus = RunDir(_folder_of(checkpoint)).read_config()
    contents = tokenizer_contents(settings.tokenizer)
    if tokenizer_digest(contents) != corpus.get("tokenizer"):
        raise ConfigurationError(
            f"{settings.tokenizer} is not the tokenizer that the run was started with; name a folder with config.json "
            "and the tokenizer by --config"
        )
    return contents


def _folder_of(checkpoint: str) -> Path:
    return Path(checkpoint).absolute().parent.parent
