"""Optimizers for models with quantized weights."""

from quantshard.numerics.states import StateSpec
from quantshard.optimizers.averaging import averaged_weights
from quantshard.optimizers.clipping import clip_grad_norm_
from quantshard.optimizers.elementwise import ElementwiseOptimizer
from quantshard.optimizers.fused_adam import FusedAdam
from quantshard.optimizers.lion import Lion
from quantshard.optimizers.master_weights import MasterWeights
from quantshard.optimizers.muon import Muon, muon_groups
from quantshard.state_storage import PRESETS

__all__ = [
    "PRESETS", "ElementwiseOptimizer", "FusedAdam", "Lion", "MasterWeights", "Muon", "StateSpec",
    "averaged_weights", "clip_grad_norm_", "muon_groups",
]  # fmt: skip
