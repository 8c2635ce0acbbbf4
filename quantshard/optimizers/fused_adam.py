"""FusedAdam: Adam over quantized weights, with masters and moments of 32, 16 or 8 bits, or without masters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quantshard.argument_kinds import suggests_names
from quantshard.errors import ConfigurationError, warn_user
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ
from quantshard.optimizers.adam_optimizer import AdamOptimizer
from quantshard.presets import chosen_options


class FusedAdam(AdamOptimizer):
    """Adam or AdamW for models with quantized weights; on any number of ranks its states are as the parameters' are.

    Every parameter that is coarser than `master_weight_dtype` has a master, seeded from `get_high_precision_init_val`
    where that was kept, else from the (dequantized) parameter. States are allocated here, so that a new process can
    load them, and are DTensors exactly where parameters are.

    All arithmetic is float32. A state of fewer bits is rounded stochastically when a step writes it, so that updates
    below its precision are kept on average, and a positive second moment never becomes zero. The random words depend
    on a seed (made at construction if one is needed, part of the state dict), the step,
    and the place in the global tensor: the bits are the same on any mesh and after any resumption.

    State dtypes: `torch.float32`; `torch.bfloat16`; `torch.float16`, scaled by a power of two for 128 elements of a
    row, for unscaled it would overflow above 65504 and lose the squares of gradients below 2e-4; `torch.uint8`, FP8
    with a power of two for 128 elements: E4M3 of the first moment, of the second, which has no sign and holds squares,
    UE5M3 (`state_cells`). Scaled states are for 2-D parameters; those of others stay float32.

    A step whose gradients are not all finite is skipped on all ranks: no weight, moment, scale or history changes, and
    `skipped_steps` counts it. On GPUs the device skips it, and the host hears of it in the next step (see `step`).

    On GPUs a step runs in kernels over all parameters, with the same bits (`kernel_step`).

    Args:
        params: parameters, (name, parameter) pairs or groups. Parameters must not be on the meta device. Those that
            are trained are quantized, float32, bfloat16 or float16.
        lr: learning rate; `group["lr"]` may be set between steps, as LR schedulers do.
        betas, eps: Adam's.
        weight_decay: 0 by default; in place of torch.optim.AdamW, whose default is 0.01, pass weight_decay=0.01.
        bias_correction: divide the moments by 1 - beta**step.
        adam_w_mode: decoupled weight decay (AdamW); False adds it to the gradient (L2).
        capturable: keep lr and the counts of steps in tensors on the parameters' device, and read nothing back from it
            in `step`, so that a CUDA graph can hold one. The bits are those of `capturable=False`. A bad step is then
            found out late: reading `skipped_steps` or `state_dict()` raises, once, what `step` would have. Set the
            rate with `group["lr"].fill_(rate)`; LR schedulers do. Not for quantized weights without masters. Run a step
            before one is captured, and replace no tensor after it.
        preset: a name of `presets.PRESETS`, "lean8" or "lean6", for the next four options and store_param_remainders.
            Bits and checkpoints are those of an optimizer whose options are spelled out. An option beside it must be
            what the preset says.
        master_weights: True by default. False keeps no masters: weights, quantized ones too, are read, updated and
            rounded stochastically into their own format. Their scales are chosen as always, so what a scale clips is
            lost: an element that has the largest code of its FP4 block grows only by steps of 3% or more, since that
            block's scale is rounded to E4M3; under delayed scaling the largest of the tensor grows every second step.
        master_weight_dtype: float32 (the default), float16 or bfloat16.
        exp_avg_dtype, exp_avg_sq_dtype: float32 (the default), float16, bfloat16 or uint8.
        use_decoupled_grad: read `param.decoupled_grad`, of any floating dtype, instead of `param.grad`.
        store_param_remainders: False by default. If True, masters are kept as what parameters lack of them. Of bfloat16
            parameters these are the low 16 bits of a float32 master: the same training, bit for bit, in half of the
            memory. Of quantized weights of 8 bits, if `master_weight_dtype` is float16, the low 8 bits of a master of
            16: it has the exponents of the codes and 8 bits of mantissa more (E4M11), under the weight's own scales,
            and its high byte, rounded to nearest, is the code. Other parameters keep a master of
            `master_weight_dtype`. What a delayed scale clips of a weight is lost, by up to a step.
        set_grad_none: deprecated; what `zero_grad` does if it is not told. Use `zero_grad(set_to_none=...)`.
        max_skipped_in_a_row: raise after this many skipped steps in a row.
        ema_decay: keep an exponential moving average of the trained values of each parameter (EMA), float32, as the
            state `ema_param`: a step that is not skipped leaves this share of it, as 0.999, and adds the new values of
            the master (of a parameter without one, its new values before they are rounded), corrected for the bias
            (`numerics.averages`). 0, the default, keeps none. `averaged_weights` evaluates with it; `begin_average` and
            `drop_average` change it later, and `group["ema_decay"]` may be set between steps.

    Raises:
        ConfigurationError: an argument does not fit; the message says which.
        RankMismatchError: ranks have different random keys for one weight, or different seeds.
    """

    @suggests_names
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        preset: str | None = None,
        master_weights: bool | None = None,
        master_weight_dtype: torch.dtype | None = None,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool | None = None,
        set_grad_none: bool | None = None,
        max_skipped_in_a_row: int = 10,
        ema_decay: float = 0.0,
    ) -> None:
        if amsgrad:
            raise ConfigurationError("FusedAdam(amsgrad=True) is not supported; use Adam or AdamW")
        if set_grad_none is not None:
            warn_user("set_grad_none is deprecated; call zero_grad(set_to_none=...)", DeprecationWarning)
        given = {
            "master_weights": master_weights,
            "master_weight_dtype": master_weight_dtype,
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
            "store_param_remainders": store_param_remainders,
        }
        kept = chosen_options(type(self).__name__, preset, given)
        self._set_to_none = set_grad_none is None or set_grad_none
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
                "adam_w_mode": adam_w_mode,
            },
            state_dtypes={EXP_AVG: kept.exp_avg_dtype, EXP_AVG_SQ: kept.exp_avg_sq_dtype},
            capturable=capturable,
            master_weights=kept.master_weights,
            master_weight_dtype=kept.master_weight_dtype,
            use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=kept.store_param_remainders,
            max_skipped_in_a_row=max_skipped_in_a_row,
            ema_decay=ema_decay,
        )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, `decoupled_grad` too where it is used: to None (the default), or to zeros."""
        super().zero_grad(self._set_to_none if set_to_none is None else set_to_none)
