"""Model FLOPs utilization (MFU; Chowdhery et al., 2022, arXiv:2204.02311, appendix B): the share of the device's peak
that the model itself needs. Recomputation in backward does not count."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from quantshard.foreign import FieldReader
from quantshard.modules import GroupedLinear
from quantshard.tools.trainer.models.model import Embedding
from quantshard.tools.trainer.settings.config import TrainSettings

_MOST: Final = 1 << 40

BF16_PEAKS: Final[Mapping[str, float]] = MappingProxyType(
    {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "B300": 2250e12}
)
"""Dense BF16 FLOP/s by part of the GPU's name, from NVIDIA's data sheets; the first match counts."""


def flops_of_token(model: nn.Module, settings: TrainSettings, configuration: Mapping[str, Any] | None) -> float | None:
    """Return the FLOP of forward and backward per token: 6 per matrix weight, plus 12 L H D T for attention over T
    tokens in L layers of H heads of D features. None if unknown, as for stacked experts of transformers."""
    heads = _heads(settings, configuration)
    params = list(model.parameters())
    if heads is None or any(param.ndim > 2 for param in params):
        return None
    tables, matrices = set[int](), set[int]()
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            # a token passes through some experts only, and other ranks may hold some
            continue
        (tables if isinstance(module, nn.Embedding | Embedding) else matrices).update(
            id(param) for param in module.parameters(recurse=False)
        )
    if settings.tied and configuration is None:
        # the embedding, which is also the head
        matrices.add(id(params[0]))
    weights = float(sum(param.numel() for param in params if param.ndim == 2 and id(param) in matrices))
    if settings.experts and configuration is None:
        weights += 3 * settings.layers * settings.experts_per_token * settings.hidden * settings.ffn
    return 6.0 * weights + 12.0 * heads * settings.seq_length


def _heads(settings: TrainSettings, configuration: Mapping[str, Any] | None) -> int | None:
    """Return the number of features over all heads of all layers; None if the configuration lacks a size."""
    if configuration is None:
        return settings.layers * settings.heads * settings.head_size
    fields = FieldReader(configuration, settings.model)
    names = (("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"), ("hidden_size", "n_embd"))
    layers, heads, hidden = (fields.integer(a, 1, _MOST) or fields.integer(b, 1, _MOST) for a, b in names)
    if layers is None or heads is None or hidden is None:
        return None
    return layers * heads * (fields.integer("head_dim", 1, _MOST) or hidden // heads)


def peak_of(device: torch.device, settings: TrainSettings) -> float | None:
    """Return the peak FLOP/s of the device: from the settings, or of a known GPU; None for any other device."""
    if settings.peak_tflops:
        return settings.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in BF16_PEAKS.items() if part in name), None)
