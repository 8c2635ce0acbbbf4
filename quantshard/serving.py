"""Weights of a model in training, sent to an inference engine in a low-precision layout."""

from quantshard.interop.serving import INCOMPLETE, LiveWeights, VLLMReceiver, publish, published, weight_source

__all__ = ["INCOMPLETE", "LiveWeights", "VLLMReceiver", "publish", "published", "weight_source"]
