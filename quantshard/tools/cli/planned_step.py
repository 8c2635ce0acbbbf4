"""The training step that `quantshard plan` counts the memory of: a run's own, or one of a given batch."""

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
    """What the command line says of a step. `batch` is of a micro-batch on one rank. `limits_memory`: a limit is given,
    which needs a step."""

    batch: int | None
    seq_length: int | None
    checkpoint_activations: bool
    compute_capability: str
    limits_memory: bool

    @property
    def is_asked(self) -> bool:
        """Whether any option is of a step."""
        return bool(self.batch or self.seq_length or self.checkpoint_activations or self.limits_memory)

    @property
    def capability(self) -> tuple[int, int]:
        """As two numbers.

        Raises:
            ConfigurationError: it is no version.
        """
        found = re.fullmatch(r"(\d{1,2})\.(\d)", self.compute_capability, re.ASCII)
        if found is None:
            raise ConfigurationError(
                f"--compute-capability {self.compute_capability}: give two numbers, such as 9.0 (an H100 or H200) or "
                "10.0 (a B200)"
            )
        return int(found[1]), int(found[2])


def planned_step(
    found: ModelSource, axes: Mapping[str, int], options: StepOptions
) -> tuple[TrainingStep | None, tuple[str, ...]]:
    """The step, and, where there is none, why not, in a line. A run has a batch and a length of its own.

    Raises:
        ConfigurationError: a step was asked for that cannot be counted.
    """
    step, why = _step(found, axes, options)
    if step is None and options.is_asked:
        raise ConfigurationError(f"the memory of a step is not counted: {why}")
    return step, _uncounted(found.settings) if step is not None else (f"{_LACKS}: {why}",)


def _uncounted(settings: TrainSettings | None) -> tuple[str, ...]:
    """What a run's settings ask for that a step is counted without, in lines."""
    if settings is None:
        return ()
    asked = {"compile": settings.compile, f"statistics_every = {settings.statistics_every}": settings.statistics_every}
    return tuple(f"{name}: the peak is that of a step without it" for name, is_asked in asked.items() if is_asked)


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
        again = options.checkpoint_activations
        return TrainingStep(options.batch, options.seq_length, checkpoint_activations=again, capability=capability), ""
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
    """Sequences of a micro-batch on a rank; None if they do not come out even."""
    if settings.micro_batch:
        return settings.micro_batch
    parts = settings.micro_batches * math.prod(axes.values())
    return None if settings.global_batch % parts else settings.global_batch // parts


def _loss(settings: TrainSettings, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return models.trained_loss(model, models.losses(model, tokens, targets), settings)
