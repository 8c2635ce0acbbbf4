"""Lion over quantized weights: one moment, and updates of one size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quantshard.argument_kinds import suggests_names
from quantshard.numerics.adam import EXP_AVG
from quantshard.numerics.lion import STATES, LionSettings, lion
from quantshard.optimizers import options
from quantshard.optimizers.kernel_optimizer import KernelOptimizer
from quantshard.optimizers.step import Update
from quantshard.presets import chosen_options


class Lion(KernelOptimizer):
    """Lion (Chen et al., 2023) for models with quantized weights; on any number of ranks its state is as the parameters
    are, and a step has the same bits.

    It keeps one moment and a master: 8 bytes a parameter in float32, 5 with an FP8 moment. Every element moves by the
    learning rate, up or down, so lr is 3 to 10 times smaller than AdamW's, and weight decay as much larger (section 5
    of the paper).

    Masters, states of fewer bits, stochastic rounding, skipped steps, state dicts and kernels on GPUs are those of
    `FusedAdam`.

    Args:
        params: parameters, (name, parameter) pairs or groups, as of `FusedAdam`.
        lr: learning rate; `group["lr"]` may be set between steps, as LR schedulers do.
        betas: of the mean whose sign is the update, and of the mean that is kept.
        weight_decay: decoupled.
        preset: a name of `presets.PRESETS`, "lean8" or "lean6", in place of the options that say how masters and the
            moment are kept; as of `FusedAdam`. For Lion both are the same: an FP8 moment and masters of 16 bits.
        exp_avg_dtype: how the moment is stored: float32 (the default), float16, bfloat16 or uint8 (FP8).
        capturable, master_weights, master_weight_dtype, use_decoupled_grad, store_param_remainders,
            max_skipped_in_a_row, ema_decay: as of `FusedAdam`.

    Raises:
        ConfigurationError: an argument does not fit; the message says which.
        RankMismatchError: ranks have different random keys for one weight, or different seeds.
    """

    states = STATES

    @suggests_names
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        exp_avg_dtype: torch.dtype | None = None,
        capturable: bool = False,
        preset: str | None = None,
        master_weights: bool | None = None,
        master_weight_dtype: torch.dtype | None = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool | None = None,
        max_skipped_in_a_row: int = 10,
        ema_decay: float = 0.0,
    ) -> None:
        given = {
            "exp_avg_dtype": exp_avg_dtype,
            "master_weights": master_weights,
            "master_weight_dtype": master_weight_dtype,
            "store_param_remainders": store_param_remainders,
        }
        kept = chosen_options(type(self).__name__, preset, given)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            state_dtypes={EXP_AVG: kept.exp_avg_dtype},
            capturable=capturable,
            master_weights=kept.master_weights,
            master_weight_dtype=kept.master_weight_dtype,
            use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=kept.store_param_remainders,
            max_skipped_in_a_row=max_skipped_in_a_row,
            ema_decay=ema_decay,
        )

    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: LionSettings
    ) -> Update:
        """See `numerics.lion.lion`."""
        new = lion(grad, master, states[EXP_AVG], settings)
        return new.master, {EXP_AVG: new.exp_avg}

    kernel_formula = update

    def settings(self, group: dict[str, Any]) -> LionSettings:
        """The numbers of a group in this step."""
        beta1, beta2 = map(float, group["betas"])
        lr = group["lr"] if self._capturable else float(group["lr"])
        return LionSettings(lr, beta1, beta2, float(group["weight_decay"]))

    def check_group(self, where: str, group: Mapping[str, Any], reads_rate: bool = True) -> None:
        """Check that the numbers of a group make a step; see `options.check_lion`.

        Raises:
            ConfigurationError: they make none, or would make weights infinite.
        """
        options.check_lion(where, group, reads_rate)
