"""TransformerEngine's `pytorch.fp8`: the old path of `pytorch.quantization`."""

from quantshard.compat.transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    fp8_autocast,
    fp8_model_init,
    get_default_fp8_recipe,
)

__all__ = ["FP8GlobalStateManager", "fp8_autocast", "fp8_model_init", "get_default_fp8_recipe"]
