"""The training step that `quantshard plan` counts the memory of: a run's own, or one of a given batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quantshard.cli.models import ModelSource
from quantshard.errors import ConfigurationError
from quantshard.planning import TrainingStep
from quantshard.trainer import model as models
from quantshard.trainer.config import TrainSettings
from quantshard.trainer.mesh import TP

_LACKS = "activations, gradients and gathered weights are not in it"


def planned_step(
    found: ModelSource,
    axes: Mapping[str, int],
    batch: int | None,
    seq_length: int | None,
    checkpoint_activations: bool,
    is_asked: bool,
) -> tuple[TrainingStep | None, tuple[str, ...]]:
    """The step, and, where there is none, why not, in a line.

    `batch` is of a micro-batch on one rank; a run has one, and a length, of its own. `is_asked`: another option needs a
    step.

    Raises:
        ConfigurationError: a step was asked for that cannot be counted.
    """
    is_asked = is_asked or checkpoint_activations or batch is not None or seq_length is not None
    step, why = _step(found, axes, batch, seq_length, checkpoint_activations)
    if step is None and is_asked:
        raise ConfigurationError(f"the memory of a step cannot be counted: {why}")
    return step, () if step is not None else (f"{_LACKS}: {why}",)


def _step(
    found: ModelSource, axes: Mapping[str, int], batch: int | None, seq_length: int | None, checkpointed: bool
) -> tuple[TrainingStep | None, str]:
    if axes.get(TP, 1) > 1:
        return None, f"not counted under tensor parallelism ({TP}={axes[TP]})"
    if found.is_stored:
        return None, "a checkpoint does not say how its model computes; plan the run or config.json that it is of"
    settings = found.settings
    if settings is None:
        if batch is None or seq_length is None:
            return None, "give --batch and --seq-length"
        return TrainingStep(batch, seq_length, checkpoint_activations=checkpointed), ""
    own = _own_batch(settings, axes)
    if batch is None and own is None:
        return None, f"global_batch = {settings.global_batch} cannot be divided on this mesh; give --batch"
    step = TrainingStep(
        batch or own or 0,
        seq_length or settings.seq_length,
        micro_batches=settings.micro_batches,
        loss=_loss,
        checkpoint_activations=checkpointed,
        forward_prefetch=True,
        reduce_dtype=settings.torch_reduce_dtype,
        norm_dtype=torch.float64,
    )
    return step, ""


def _own_batch(settings: TrainSettings, axes: Mapping[str, int]) -> int | None:
    """Sequences of a micro-batch on a rank; None if they do not come out even."""
    parts = settings.micro_batches
    for size in axes.values():
        parts *= size
    return None if settings.global_batch % parts else settings.global_batch // parts


def _loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return models.loss(model(tokens), targets)
