"""TransformerEngine's checkpoints: written anew as ours, offline, without TransformerEngine."""

from quantshard.interop.transformer_engine.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
