"""Lion for quantized weights: one moment, and updates of equal magnitude."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from quantshard.numerics.adam import EXP_AVG
from quantshard.numerics.lion import STATES, LionSettings, lion
from quantshard.numerics.states import EMA_DECAY
from quantshard.optimizers.elementwise import ElementwiseOptimizer
from quantshard.optimizers.kernel_step import Update
from quantshard.state_storage import CommonOptions, storage_arguments


class Lion(ElementwiseOptimizer):
    """Lion (Chen et al., 2023) for models with quantized weights, bitwise the same on any number of ranks.

    Lion keeps one moment and a master: 8 bytes per parameter in float32, 5 with an FP8 moment. Every element moves up
    or down by the learning rate, so use an lr 3 to 10 times smaller than AdamW's and a weight decay larger by the same
    factor (section 5 of the paper).

    Masters, low-precision states, stochastic rounding, skipped steps, state dicts and GPU kernels work as in
    `FusedAdam`.

    Args:
        betas: decay of the mean whose sign is the update, and of the mean that is stored.
        weight_decay: decoupled weight decay.
        preset: "lean8" or "lean6" (`PRESETS`), which sets the storage of the moment and the masters, as in
            `FusedAdam`. Both mean the same for Lion: an FP8 moment and 16-bit masters.
        exp_avg_dtype: dtype of the moment: float32 (default), float16, bfloat16 or uint8 (FP8).

    Other arguments are those of `FusedAdam`.
    """

    states = STATES
    checked_numbers = ("lr", "weight_decay", "betas", EMA_DECAY)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        exp_avg_dtype: torch.dtype | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, **storage_arguments(type(self).__name__, {EXP_AVG: exp_avg_dtype}, common))

    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: LionSettings
    ) -> Update:
        new_master, exp_avg = lion(grad, master, states[EXP_AVG], settings)
        return new_master, {EXP_AVG: exp_avg}

    kernel_formula = update

    def settings(self, group: dict[str, Any]) -> LionSettings:
        beta1, beta2 = map(float, group["betas"])
        lr = group["lr"] if self._capturable else float(group["lr"])
        return LionSettings(lr, beta1, beta2, float(group["weight_decay"]))
