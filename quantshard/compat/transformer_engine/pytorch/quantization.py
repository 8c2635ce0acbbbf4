"""TransformerEngine's contexts by their old names too, and its questions about hardware."""

from __future__ import annotations

import torch
import torch.distributed as dist

from quantshard.errors import ConfigurationError, silence
from quantshard.gemm import backend
from quantshard.modules import autocast, quantized_model_init
from quantshard.modules.contexts import context, context_warnings
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
silence(context_warnings.PLAIN_WEIGHT)

fp8_model_init = quantized_model_init


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: str | Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` with the arguments' old names: `fp8_recipe` is the recipe, `fp8_group` the `amax_reduction_group`.

    Raises:
        ConfigurationError: as `autocast`, and for `_graph=True`.
    """
    if _graph:
        raise ConfigurationError(
            "fp8_autocast(_graph=True) is not supported: it is what make_graphed_callables sets; call that"
        )
    return autocast(enabled=enabled, calibrating=calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group)


def get_default_recipe() -> Recipe:
    """Return the recipe of an autocast that names none: MXFP8 on GPUs of compute capability 10.x, otherwise current.

    TransformerEngine's default is the same on 10.x and 12.x; on older GPUs it is delayed scaling.
    """
    return resolve(None)


get_default_fp8_recipe = get_default_recipe


Availability = tuple[bool, str]
"""Whether something is native on the current device; if not, why not, else an empty string."""


def _native(recipe: str) -> Availability:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path, reason = backend.gemm_path(resolve(recipe).weight, device, resolve(recipe))
    return (True, "") if path == "native" else (False, reason)


def _answer(found: Availability, return_reason: bool) -> bool | Availability:
    return found if return_reason else found[0]


def is_fp8_available(return_reason: bool = False) -> bool | Availability:
    """Whether products of FP8 with one scale a tensor are native here, and with `return_reason` also why not.

    Every recipe runs everywhere: where this says no, products are emulated, and slower than BF16.
    """
    return _answer(_native("current"), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | Availability:
    """The same of MXFP8."""
    return _answer(_native("mxfp8"), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | Availability:
    """The same of FP8 in blocks."""
    return _answer(_native("block"), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | Availability:
    """The same of NVFP4."""
    return _answer(_native("nvfp4"), return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | Availability:
    """Whether products in BF16 are native here: on a CPU too, as TransformerEngine does not say."""
    if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
        return _answer((True, ""), return_reason)
    return _answer((False, f"{torch.cuda.get_device_name()} has no BF16"), return_reason)


class FP8GlobalStateManager:
    """The questions that scripts ask TransformerEngine's global state. There is none here."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """True inside an autocast that quantizes."""
        return context.quantizes(context.current_setting())

    @staticmethod
    def with_fp8_parameters() -> bool:
        """True inside a `quantized_model_init` that quantizes."""
        return context.quantizes_weights()

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """The recipe of the innermost autocast, or the default one."""
        inside = context.in_autocast()
        return context.setting(context.current_setting()).recipe if inside else get_default_recipe()

    @staticmethod
    def is_fp8_available() -> Availability:
        """As `is_fp8_available(return_reason=True)`."""
        return _native("current")

    @staticmethod
    def is_mxfp8_available() -> Availability:
        """As `is_mxfp8_available(return_reason=True)`."""
        return _native("mxfp8")

    @staticmethod
    def is_fp8_block_scaling_available() -> Availability:
        """As `is_fp8_block_scaling_available(return_reason=True)`."""
        return _native("block")

    @staticmethod
    def is_nvfp4_available() -> Availability:
        """As `is_nvfp4_available(return_reason=True)`."""
        return _native("nvfp4")
