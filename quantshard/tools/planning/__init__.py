"""Plans what a model would cost on a rank of any mesh, and the peak memory of a training step there."""

from quantshard.tools.planning.plan import plan
from quantshard.tools.planning.rehearsal import TrainingStep

__all__ = ["TrainingStep", "plan"]
