"""Converts between a run's settings and Hugging Face configurations of Llama and Qwen3 models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantshard.errors import ConfigurationError
from quantshard.foreign import FieldReader, shown
from quantshard.interop.layouts.writing import MOST, MOST_HEADS, is_tied
from quantshard.tools.trainer.data import VOCABULARY
from quantshard.tools.trainer.data.tokenizer import tokenizer_contents, tokenizer_digest
from quantshard.tools.trainer.run_dir import RunDir, run_of_checkpoint
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.settings_file import from_mapping, read_settings_file

_DEFAULT_ANGLES = "default"
"""transformers' name for unscaled rotary positions."""


def hf_config(settings: TrainSettings) -> dict[str, Any]:
    """Return the Hugging Face configuration of a run's model: Llama, or Qwen3 if queries and keys are normalized."""
    kind = "Qwen3" if settings.qk_norm else "Llama"
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_size": settings.hidden,
        "intermediate_size": settings.ffn,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_size,
        "vocab_size": settings.vocabulary or VOCABULARY,
        "max_position_embeddings": settings.seq_length,
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
    advice = "build your model and load into it by quantshard.layouts.load"
    biased = fields.flag("attention_bias") or fields.flag("mlp_bias")
    if kind not in _WITH_QK_NORM or biased or fields.flag("use_sliding_window"):
        raise ConfigurationError(
            f"{where}: config.json is of model_type {shown(kind)}; the command builds Llamas and Qwen3 without biases "
            f"and windows: train the model itself by --model, or {advice}"
        )
    sizes: dict[str, Any] = {}
    for setting, hf_key in {**_LIKE, "vocabulary": "vocab_size"}.items():
        most = MOST_HEADS if setting in ("heads", "layers") else MOST
        count = fields.integer(hf_key, 2 if setting == "seq_length" else 1, most)
        if count is None:
            raise fields.wrong(hf_key, "given")
        sizes[setting] = count
    width, eps = fields.integer("head_dim", 1, MOST), fields.number("rms_norm_eps", 1e-30, 1)
    settings = TrainSettings(
        **sizes,
        qk_norm=_WITH_QK_NORM[kind],
        head_dim=0 if width in (None, sizes["hidden"] // sizes["heads"]) else width or 0,
        rope_theta=_angles(fields)[1],
        norm_eps=TrainSettings.norm_eps if eps is None else eps,
        kv_heads=fields.integer("num_key_value_heads", 1, MOST_HEADS) or 0,
        tied=is_tied(config),
        params_dtype="float32" if dtype == "float32" else "bfloat16",
    ).resolved()
    settings.check()
    return settings


def _angles(fields: FieldReader) -> tuple[str, float]:
    """Return the type of rotary scaling (transformers' name) and the base."""
    tables = [FieldReader(fields.table(name) or {}, f"{fields.where}: {name}") for name in _ANGLES]
    kinds = [kind for reader in tables if (kind := reader.text("rope_type") or reader.text("type"))]
    bases = [base for reader in (*tables, fields) if (base := reader.number("rope_theta", 1, 1e12)) is not None]
    return kinds[0] if kinds else _DEFAULT_ANGLES, bases[0] if bases else TrainSettings.rope_theta


_ANGLES = ("rope_parameters", "rope_scaling")
"""Keys of the rotary scaling in transformers 5 and in earlier releases."""


def check_angles(config: Mapping[str, Any], where: str) -> None:
    """Refuse scaled rotary positions, which the built-in decoder lacks: the weights were trained with other angles."""
    kind, _ = _angles(FieldReader(config, f"{where}: config.json"))
    if kind != _DEFAULT_ANGLES:
        raise ConfigurationError(
            f"{where}: config.json has rotary positions of rope_type {shown(kind)}, which the decoder that is built by "
            f"sizes does not have; train the model itself: --model {where}"
        )


def run_of(checkpoint: str) -> TrainSettings | None:
    """Return the settings of the run that owns a checkpoint (see `run_of_checkpoint`); None if there is no such run."""
    run = run_of_checkpoint(checkpoint)
    return None if run is None else _described(run)


def _described(run: RunDir) -> TrainSettings:
    """Read the settings as recorded, without checking that their paths exist."""
    return TrainSettings(**from_mapping(read_settings_file(run.config), str(run.config)))


def config_of_run(checkpoint: str) -> dict[str, Any] | None:
    """Return the model configuration of the run that owns a checkpoint; None without a run or an exportable model."""
    run = run_of_checkpoint(checkpoint)
    if run is None:
        return None
    settings = _described(run)
    if not settings.is_by_sizes:
        return run.read_model(settings)
    if settings.architecture != "llama" or settings.experts:
        return None
    config = hf_config(settings)
    if settings.tokenizer:
        end = run.read_config()[2].get("end_of_document")
        config |= {"bos_token_id": end, "eos_token_id": end}
    return config


def tokenizer_of_run(checkpoint: str) -> dict[str, bytes]:
    """Return the tokenizer files, by name, of the run that owns a checkpoint; empty without a run or tokenizer."""
    run = run_of_checkpoint(checkpoint)
    if run is None or not _described(run).tokenizer:
        return {}
    settings, _, corpus = run.read_config()
    contents = tokenizer_contents(settings.tokenizer)
    if tokenizer_digest(contents) != corpus.get("tokenizer"):
        raise ConfigurationError(
            f"{settings.tokenizer} is not the tokenizer that the run was started with; name a folder with config.json "
            "and the tokenizer by --config"
        )
    return contents
