"""What a model that nobody has wrapped yet would cost on a rank of any mesh, and what a training step takes there."""

from quantshard.tools.planning.plan import plan
from quantshard.tools.planning.rehearsal import TrainingStep

__all__ = ["TrainingStep", "plan"]
