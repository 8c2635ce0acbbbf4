"""The Hugging Face configuration of a run's model, and what such a configuration says of a Llama."""

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
"""transformers' word for rotary positions that are not scaled."""


def hf_config(settings: TrainSettings) -> dict[str, Any]:
    """The Hugging Face configuration of a run's Llama, or, with normalized queries and keys, Qwen3."""
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
"""Families of transformers that the decoder here is like, and whether they normalize queries and keys."""


def settings_of(config: Mapping[str, Any], where: str) -> TrainSettings:
    """The sizes of a Llama or Qwen3 from its Hugging Face configuration.

    Raises:
        ConfigurationError: it is of another architecture, or lacks a size.
    """
    fields = FieldReader(config, f"{where}: config.json")
    kind, dtype = fields.text("model_type"), fields.text("dtype") or fields.text("torch_dtype")
    instead = "build your model and load into it by quantshard.layouts.load"
    biased = fields.flag("attention_bias") or fields.flag("mlp_bias")
    if kind not in _WITH_QK_NORM or biased or fields.flag("use_sliding_window"):
        raise ConfigurationError(
            f"{where}: config.json is of model_type {shown(kind)}; the command builds Llamas and Qwen3 without biases "
            f"and windows: train the model itself by --model, or {instead}"
        )
    found: dict[str, Any] = {}
    for ours, theirs in {**_LIKE, "vocabulary": "vocab_size"}.items():
        most = MOST_HEADS if ours in ("heads", "layers") else MOST
        count = fields.integer(theirs, 2 if ours == "seq_length" else 1, most)
        if count is None:
            raise fields.wrong(theirs, "given")
        found[ours] = count
    width, eps = fields.integer("head_dim", 1, MOST), fields.number("rms_norm_eps", 1e-30, 1)
    settings = TrainSettings(
        **found,
        qk_norm=_WITH_QK_NORM[kind],
        head_dim=0 if width in (None, found["hidden"] // found["heads"]) else width or 0,
        rope_theta=_angles(fields)[1],
        norm_eps=TrainSettings.norm_eps if eps is None else eps,
        kv_heads=fields.integer("num_key_value_heads", 1, MOST_HEADS) or 0,
        tied=is_tied(config),
        params_dtype="float32" if dtype == "float32" else "bfloat16",
    ).resolved()
    settings.check()
    return settings


def _angles(fields: FieldReader) -> tuple[str, float]:
    """How rotary positions are scaled, by transformers' word for it, and their base."""
    held = [FieldReader(fields.table(name) or {}, f"{fields.where}: {name}") for name in _ANGLES]
    kinds = [kind for each in held if (kind := each.text("rope_type") or each.text("type"))]
    bases = [base for each in (*held, fields) if (base := each.number("rope_theta", 1, 1e12)) is not None]
    return kinds[0] if kinds else _DEFAULT_ANGLES, bases[0] if bases else TrainSettings.rope_theta


_ANGLES = ("rope_parameters", "rope_scaling")
"""Where transformers 5, and those before, say how rotary positions are scaled."""


def check_angles(config: Mapping[str, Any], where: str) -> None:
    """Refuse rotary positions that the decoder here does not have: weights would see other angles than they learned.

    Raises:
        ConfigurationError: they are scaled.
    """
    kind, _ = _angles(FieldReader(config, f"{where}: config.json"))
    if kind != _DEFAULT_ANGLES:
        raise ConfigurationError(
            f"{where}: config.json has rotary positions of rope_type {shown(kind)}, which the decoder that is built by "
            f"sizes does not have; train the model itself: --model {where}"
        )


def run_of(checkpoint: str) -> TrainSettings | None:
    """The settings of the run whose checkpoint this is; None if there is no such run. See `run_of_checkpoint`."""
    run = run_of_checkpoint(checkpoint)
    return None if run is None else _described(run)


def _described(run: RunDir) -> TrainSettings:
    """As its file has them: what they name need not be there."""
    return TrainSettings(**from_mapping(read_settings_file(run.config), str(run.config)))


def config_of_run(checkpoint: str) -> dict[str, Any] | None:
    """The configuration of the model of the run whose checkpoint this is; None if there is no such run, or model."""
    run = run_of_checkpoint(checkpoint)
    if run is None:
        return None
    settings = _described(run)
    if not settings.is_by_sizes:
        return run.read_model(settings)
    if settings.architecture != "llama" or settings.experts:
        return None
    found = hf_config(settings)
    if settings.tokenizer:
        end = run.read_config()[2].get("end_of_document")
        found |= {"bos_token_id": end, "eos_token_id": end}
    return found


def tokenizer_of_run(checkpoint: str) -> dict[str, bytes]:
    """The tokenizer's files of the run whose checkpoint this is, by name; none if there is no run, or no tokenizer.

    Raises:
        ConfigurationError: they are not there any more, or are other ones.
    """
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
