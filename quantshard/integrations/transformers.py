"""Public names of the transformers integration."""

from quantshard.interop.frameworks.transformers import (
    AdamFactory,
    QuantizedTraining,
    QuantshardConfig,
    QuantshardQuantizer,
    adam,
    training_config,
)

__all__ = [
    "AdamFactory",
    "QuantizedTraining",
    "QuantshardConfig",
    "QuantshardQuantizer",
    "adam",
    "training_config",
]
