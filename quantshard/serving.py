"""Weights of a model in training, sent to an inference engine in a low-precision layout."""

from quantshard.interop.serving import LiveWeights

__all__ = ["LiveWeights"]
