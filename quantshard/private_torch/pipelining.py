"""The stage of torch.distributed.pipelining that the calling code runs in, which PyTorch has no API for."""

from __future__ import annotations

import sys
import types
from typing import NamedTuple

import torch.distributed as dist

from quantshard.private_torch.lookup import needs_attributes

_STAGES = "torch.distributed.pipelining.stage"


class RunningStage(NamedTuple):
    """A pipeline stage.

    `group`: ranks that share the pipeline; None: all. `infers`: whether the stage only infers output shapes, from
    inputs without values.
    """

    group: dist.ProcessGroup | None
    infers: bool


def running_stage() -> RunningStage | None:
    """The stage that runs its module on this thread, in forward or for recomputation in backward, or None.

    Returns None at once if the pipelining module was not imported.
    """
    stages = sys.modules.get(_STAGES)
    return None if stages is None else _on_stack(stages, sys._getframe(1))


@needs_attributes("delayed scaling under torch.distributed.pipelining")
def _on_stack(stages: types.ModuleType, frame: types.FrameType | None) -> RunningStage | None:
    """The innermost stage on the stack, from a frame outwards.

    In all versions a stage runs its module on values in the same few methods. The names of shape inference vary, so a
    call from any other function of that file counts as shape inference.
    """
    stage, names = stages.PipelineStage, vars(stages)
    on_values = {
        method.__code__
        for method in (stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk)
    }
    infers = False
    while frame is not None:
        if frame.f_globals is names:
            if frame.f_code in on_values:
                return RunningStage(frame.f_locals["self"].group, False)
            infers = True
        frame = frame.f_back
    return RunningStage(None, True) if infers else None
