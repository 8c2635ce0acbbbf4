"""Describes the training step for the memory estimate of `quantshard plan`.

The step comes from a run's settings, or from the options for batch and sequence length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quantshard import kernels
from quantshard.errors import ConfigurationError
from quantshard.tools.cli.models import ModelSource
from quantshard.tools.planning import TrainingStep
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.mesh import TP, MeshSpec

_LACKS = "activations, gradients and gathered weights are not in it"


@dataclass(frozen=True)
class StepOptions:
    """Options of the command line for a step.

    Attributes:
        batch: sequences of a micro-batch on one rank.
        limits_memory: whether a memory limit is set, which requires a step.
    """

    batch: int | None
    seq_length: int | None
    checkpoint_activations: bool
    compute_capability: str
    limits_memory: bool

    @property
    def is_asked(self) -> bool:
        """Whether any option requires a step."""
        return bool(self.batch or self.seq_length or self.checkpoint_activations or self.limits_memory)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability as (major, minor).

        Raises:
            ConfigurationError: `compute_capability` is not of the form X.Y.
        """
        match = re.fullmatch(r"(\d{1,2})\.(\d)", self.compute_capability, re.ASCII)
        if match is None:
            raise ConfigurationError(
                f"--compute-capability {self.compute_capability}: give two numbers, such as 9.0 (an H100 or H200) or "
                "10.0 (a B200)"
            )
        return int(match[1]), int(match[2])


def planned_step(
    found: ModelSource, axes: Mapping[str, int], options: StepOptions
) -> tuple[TrainingStep | None, tuple[str, ...]]:
    """The step, or None, and notes about what the memory estimate does not include.

    Raises:
        ConfigurationError: the options require a step, but its memory cannot be estimated.
    """
    step, why = _step(found, axes, options)
    if step is None and options.is_asked:
        raise ConfigurationError(f"the memory of a step is not counted: {why}")
    return step, _uncounted(found.settings) if step is not None else (f"{_LACKS}: {why}",)


def _uncounted(settings: TrainSettings | None) -> tuple[str, ...]:
    """Notes about enabled settings of a run that the memory estimate ignores."""
    if settings is None:
        return ()
    ignored = {
        "compile": settings.compile,
        f"statistics_every = {settings.statistics_every}": settings.statistics_every,
    }
    return tuple(f"{name}: the peak is that of a step without it" for name, is_asked in ignored.items() if is_asked)


def _step(found: ModelSource, axes: Mapping[str, int], options: StepOptions) -> tuple[TrainingStep | None, str]:
    capability = options.capability
    if axes.get(TP, 1) > 1:
        return None, f"the mesh has an axis of tensor parallelism, {TP}={axes[TP]}"
    if found.is_stored:
        return None, "a checkpoint does not say how its model computes; plan the run or config.json that it is of"
    if not kernels.USABLE:
        return None, "it is counted with the kernels, for which Triton must be installed (no GPU is needed)"
    settings = found.settings
    if settings is None:
        if options.batch is None or options.seq_length is None:
            return None, "give --batch and --seq-length"
        recompute = options.checkpoint_activations
        return TrainingStep(
            options.batch, options.seq_length, checkpoint_activations=recompute, capability=capability
        ), ""
    if settings.experts:
        return None, "which expert a token goes to, and so what is kept, follows from values"
    batch = options.batch or _own_batch(settings, axes)
    if batch is None:
        return None, f"global_batch = {settings.global_batch} cannot be divided on this mesh; give --batch"
    step = TrainingStep(
        batch,
        options.seq_length or settings.seq_length,
        micro_batches=settings.parts(MeshSpec(**axes)),
        loss=partial(_loss, settings),
        checkpoint_activations=options.checkpoint_activations,
        forward_prefetch=True,
        reduce_dtype=settings.torch_reduce_dtype,
        norm_dtype=torch.float64,
        capability=capability,
    )
    return step, ""


def _own_batch(settings: TrainSettings, axes: Mapping[str, int]) -> int | None:
    """Sequences of a micro-batch on one rank, or None if the global batch is not divisible."""
    if settings.micro_batch:
        return settings.micro_batch
    parts = settings.micro_batches * math.prod(axes.values())
    return None if settings.global_batch % parts else settings.global_batch // parts


def _loss(settings: TrainSettings, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return models.trained_loss(model, models.losses(model, tokens, targets), settings)
