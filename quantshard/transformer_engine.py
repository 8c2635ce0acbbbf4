"""Conversion of TransformerEngine's checkpoints to quantshard's, without TransformerEngine."""

from quantshard.interop.transformer_engine import Conversion, convert

__all__ = ["Conversion", "convert"]
