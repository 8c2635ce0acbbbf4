"""Refuses explicit settings that would have no effect because another setting is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.schema import shown_value


def _holds_out(settings: TrainSettings) -> bool:
    return settings.heldout > 0 or bool(settings.heldout_data)


_USED: Final[dict[str, tuple[Callable[[TrainSettings], bool], str]]] = {
    "experts_per_token": (lambda settings: settings.experts > 0, "experts"),
    "balance_loss": (lambda settings: settings.experts > 0, "experts"),
    "rope_theta": (lambda settings: settings.architecture == "llama", "architecture = 'llama'"),
    "momentum": (lambda settings: settings.optimizer == "muon", "optimizer = 'muon'"),
    "momentum_dtype": (lambda settings: settings.optimizer == "muon", "optimizer = 'muon'"),
    "eps": (lambda settings: settings.optimizer != "lion", "another optimizer than 'lion'"),
    "exp_avg_sq_dtype": (lambda settings: settings.optimizer != "lion", "another optimizer than 'lion'"),
    "decay_steps": (lambda settings: settings.schedule != "constant", "another schedule than 'constant'"),
    "keep_every": (lambda settings: settings.keep_last > 0, "keep_last"),
    "alarm_saturation": (lambda settings: settings.statistics_every > 0, "statistics_every"),
    "sequence_parallel": (lambda settings: "tp" in settings.mesh, "a mesh with tp"),
    "decay_share": (lambda settings: settings.schedule == "wsd", "schedule = 'wsd'"),
    "lr_floor": (lambda settings: settings.schedule != "constant", "another schedule than 'constant'"),
    "recompute_every": (lambda settings: settings.recompute == "layer", "recompute = 'layer'"),
    "master_dtype": (lambda settings: settings.master_weights, "master_weights = true"),
    "master_remainders": (lambda settings: settings.master_weights, "master_weights = true"),
    "data_weights": (lambda settings: len(settings.data) != 1, "a second --data"),
    "eval_every": (_holds_out, "heldout or heldout_data"),
    "eval_sequences": (_holds_out, "heldout or heldout_data"),
    "sample_every": (lambda settings: settings.sample_tokens > 0, "sample_tokens"),
}
"""By setting: whether it has an effect, and the setting that it needs."""


def check_used(given: Iterable[str], settings: TrainSettings) -> None:
    """Refuse explicit settings without effect.

    Raises:
        ConfigurationError: names the setting and the one that it needs.
    """
    for name in given:
        is_used, needs = _USED.get(name, (None, ""))
        if is_used is not None and not is_used(settings):
            raise ConfigurationError(
                f"{name} = {shown_value(getattr(settings, name))} would do nothing, since it needs {needs}; give that "
                "too, or leave it out"
            )
