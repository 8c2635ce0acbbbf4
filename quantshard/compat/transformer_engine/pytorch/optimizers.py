"""TransformerEngine's `pytorch.optimizers`."""

from quantshard.optimizers import FusedAdam

__all__ = ["FusedAdam"]
