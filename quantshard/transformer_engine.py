"""TransformerEngine's checkpoints: written anew as ours, offline, without TransformerEngine."""

from quantshard.interop.transformer_engine import Conversion, convert

__all__ = [
    "Conversion",
    "convert",
]
