"""Offline conversion of TransformerEngine checkpoints to quantshard checkpoints, without TransformerEngine."""

from quantshard.interop.transformer_engine.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
