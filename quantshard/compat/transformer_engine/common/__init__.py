"""TransformerEngine's `common`: its recipes."""

from quantshard.compat.transformer_engine.common import recipe

__all__ = ["recipe"]
