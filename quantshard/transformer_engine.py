"""Offline conversion of TransformerEngine checkpoints, without TransformerEngine."""

from quantshard.interop.transformer_engine import Conversion, convert

__all__ = [
    "Conversion",
    "convert",
]
