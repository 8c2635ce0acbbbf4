"""TransformerEngine's checkpoints: written anew as ours, offline, without TransformerEngine."""

from quantshard.transformer_engine.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
