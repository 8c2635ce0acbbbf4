"""FusedAdam: Adam for quantized weights, with master weights and moments in 32, 16 or 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from quantshard.errors import ConfigurationError
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ
from quantshard.optimizers.elementwise import AdamOptimizer
from quantshard.state_storage import CommonOptions, storage_arguments


class FusedAdam(AdamOptimizer):
    """Adam or AdamW for models with quantized weights, on one process or sharded.

    Every parameter with less precision than `master_weight_dtype` has a master weight. It starts from
    `get_high_precision_init_val()` if the initial values were kept, otherwise from the (dequantized) parameter. States
    are allocated by the constructor, so a new process can load them, and are DTensors exactly where the parameters are.

    All arithmetic is float32. A state in fewer bits is rounded stochastically when a step writes it, so updates below
    its precision are kept on average; a positive second moment never becomes zero. The random bits depend only on a
    seed (created by the constructor if needed, saved in the state dict), the step and the index in the global tensor,
    so the result is bitwise the same on any mesh and after resuming.

    State dtypes are `torch.float32`, `torch.bfloat16`, `torch.float16` and `torch.uint8` (FP8: E4M3 for the first
    moment, UE5M3 for the second). The last two have a power-of-two scale per block of 128 elements of a row; parameters
    that are not 2-D use float32 instead.

    If any gradient is infinite or NaN, the step is skipped on all ranks: no weight, moment, scale or amax history
    changes, and `skipped_steps` counts it. On GPUs a step runs in kernels that process all parameters at once, with the
    same bits; the device skips bad steps, and the host learns about it in the next one (see `step`).

    Args:
        params: parameters, (name, parameter) pairs or groups. No parameter can be on the meta device. Trained
            parameters are quantized, float32, bfloat16 or float16.
        lr: learning rate. `group["lr"]` can be set between steps, as LR schedulers do.
        betas, eps: Adam's coefficients.
        weight_decay: 0 by default. To replace torch.optim.AdamW with its default of 0.01, pass weight_decay=0.01.
        bias_correction: divide the moments by 1 - beta**step.
        adam_w_mode: decoupled weight decay (AdamW). False adds the decay to the gradient (L2).
        capturable: keep lr and step counts in tensors on the parameters' device and never synchronize in `step`, so
            that a CUDA graph can capture a step, with the same bits. A bad step is reported late: reading
            `skipped_steps` or calling `state_dict()` raises, once, the error that `step` would have raised. Set the
            rate with `group["lr"].fill_(rate)`; LR schedulers do. Quantized weights then need masters. Run one step
            before capturing, and do not replace any tensor afterwards.
        preset: "lean8" or "lean6" (`PRESETS`), which sets the next four options and store_param_remainders, with which
            explicit options must agree.
        master_weights: True by default. False keeps no masters: weights, including quantized ones, are read, updated
            and rounded stochastically to their own format. The largest element of an FP4 block then grows only by 3% or
            more, because the block's scale is rounded to E4M3.
        master_weight_dtype: float32 (default), float16 or bfloat16.
        exp_avg_dtype, exp_avg_sq_dtype: float32 (default), float16, bfloat16 or uint8.
        use_decoupled_grad: read `param.decoupled_grad`, of any floating-point dtype, instead of `param.grad`.
        store_param_remainders: True stores only the bits of a master that the parameter lacks: for a bfloat16 parameter
            the low 16 bits of a float32 master (the same training, bit for bit), for an 8-bit quantized weight with
            `master_weight_dtype=torch.float16` the low 8 bits of a 16-bit master, which shares the weight's scales.
        set_grad_none: default of `zero_grad(set_to_none=)`, True if None.
        max_skipped_in_a_row: raise after this many consecutive skipped steps.
        ema_decay: decay of an exponential moving average (EMA) of each parameter, kept in float32 as the state
            `ema_param`; 0 (default) keeps no average. Each step that is not skipped averages in the new values of the
            master (or, without one, the new values before rounding), with bias correction (`numerics.adam`). See
            `averaged_weights`, `begin_average` and `drop_average`.
        release_gradients: update parameters during `backward`, in units whose gradients are complete (and reduced by
            FSDP2), and free these gradients; `step` updates the rest and counts. The results have the same bits. If a
            gradient is not finite, units that were updated before it stay updated. Call `step` after every backward.
            DDP, GradScaler and functions that read all gradients cannot be used with it.
        max_grad_norm: with release_gradients, scale gradients so that the norm of all is at most this; 0 (default): do
            not. The norm is that of the previous backward, so the first step is not scaled; for the present norm run a
            first backward in `measure_grad_norm`.
        max_grad_value: with release_gradients, clamp gradients to this absolute value; 0 (default): do not.
    """

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
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        set_grad_none: bool | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        if amsgrad:
            raise ConfigurationError("FusedAdam(amsgrad=True) is not supported; use Adam or AdamW")
        self._set_to_none = set_grad_none is not False
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction,
            adam_w_mode=adam_w_mode,
        )  # fmt: skip
        dtypes = {EXP_AVG: exp_avg_dtype, EXP_AVG_SQ: exp_avg_sq_dtype}
        super().__init__(params, defaults, **storage_arguments(type(self).__name__, dtypes, common))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: set them to None, or to zero. The default is `set_grad_none`."""
        super().zero_grad(self._set_to_none if set_to_none is None else set_to_none)
