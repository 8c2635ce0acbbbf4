"""Stages of torch.distributed.pipelining: which one the calling code runs in, which PyTorch has no question for."""

from __future__ import annotations

import sys
import types
from typing import NamedTuple

import torch.distributed as dist

from quantshard.private_torch.lookup import needs_attributes

_STAGES = "torch.distributed.pipelining.stage"


class RunningStage(NamedTuple):
    """A stage of a pipeline. `group`: the ranks that share the pipeline, None: all. `infers`: whether it only finds out
    the shapes of what it gives, from inputs without values."""

    group: dist.ProcessGroup | None
    infers: bool


def running_stage() -> RunningStage | None:
    """The stage whose module runs, or runs again for backward, on this thread. None at once where no pipeline was
    imported."""
    stages = sys.modules.get(_STAGES)
    return None if stages is None else _on_stack(stages, sys._getframe(1))


@needs_attributes("delayed scaling under torch.distributed.pipelining")
def _on_stack(stages: types.ModuleType, frame: types.FrameType | None) -> RunningStage | None:
    """The innermost stage on the stack above a frame.

    A stage runs its module on values in few methods, which all versions have; what infers shapes has other names in
    each. So whatever else of that file runs the module does no more than this.
    """
    stage, names = stages.PipelineStage, vars(stages)
    on_values = {
        each.__code__ for each in (stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk)
    }
    infers = False
    while frame is not None:
        if frame.f_globals is names:
            if frame.f_code in on_values:
                return RunningStage(frame.f_locals["self"].group, False)
            infers = True
        frame = frame.f_back
    return RunningStage(None, True) if infers else None
