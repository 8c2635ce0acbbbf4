"""TransformerEngine's contexts, including their old names, and its queries about hardware support."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from quantshard import modules
from quantshard.errors import ConfigurationError, silence
from quantshard.gemm import predictions
from quantshard.modules.contexts import context, settings
from quantshard.recipe import Recipe, resolve

__all__ = [
    "FP8GlobalStateManager",
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]

# TransformerEngine's layers usually keep their weights in high precision.
silence("quantized each forward")

quantized_model_init = fp8_model_init = modules.quantized_model_init


class AutocastAdapter(modules.autocast):
    """`quantshard.autocast` with TransformerEngine's arguments."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: str | Recipe | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if calibrating:
            raise ConfigurationError("autocast(calibrating=True) is not supported: train with delayed scaling instead")
        super().__init__(enabled, recipe, amax_reduction_group, **kwargs)


autocast = AutocastAdapter


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: str | Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` with its old argument names: `fp8_recipe` for `recipe`, `fp8_group` for `amax_reduction_group`."""
    if _graph:
        raise ConfigurationError("fp8_autocast(_graph=True) is not supported; call make_graphed_callables")
    return autocast(enabled=enabled, calibrating=calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group)


def get_default_recipe() -> Recipe:
    """Return the default recipe: MXFP8 on GPUs of compute capability 10.x, otherwise current scaling."""
    return resolve(None)


get_default_fp8_recipe = get_default_recipe


def _native(recipe: str, return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether a recipe's GEMMs are native, and with `return_reason` also why not."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path, reason = predictions.gemm_path(resolve(recipe).weight, device, resolve(recipe))
    is_native = path == "native"
    return (is_native, "" if is_native else reason) if return_reason else is_native


# All recipes work on all devices; without native support, GEMMs are emulated and slower than BF16.
is_fp8_available = partial(_native, "current")
is_mxfp8_available = partial(_native, "mxfp8")
is_fp8_block_scaling_available = partial(_native, "block")
is_nvfp4_available = partial(_native, "nvfp4")


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether BF16 GEMMs are native. On a CPU, this is always True."""
    is_native = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    reason = "" if is_native else f"{torch.cuda.get_device_name()} has no BF16"
    return (is_native, reason) if return_reason else is_native


class FP8GlobalStateManager:
    """Queries of TransformerEngine's global state, answered from quantshard's contexts."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return whether an autocast that quantizes is active."""
        return settings.quantizes(context.current_setting())

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Return whether a `quantized_model_init` that quantizes is active."""
        return context.init_plan().quantize

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """Return the recipe of the innermost autocast, or the default recipe."""
        inside = context.in_autocast()
        return settings.registered[context.current_setting()].recipe if inside else get_default_recipe()

    is_fp8_available = staticmethod(partial(is_fp8_available, return_reason=True))
    is_mxfp8_available = staticmethod(partial(is_mxfp8_available, return_reason=True))
    is_fp8_block_scaling_available = staticmethod(partial(is_fp8_block_scaling_available, return_reason=True))
    is_nvfp4_available = staticmethod(partial(is_nvfp4_available, return_reason=True))
