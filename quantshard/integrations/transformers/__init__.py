"""transformers: quantization in `from_pretrained`, saving with `save_pretrained`, and the Trainer.

`quantshard.convert` imports this package if transformers' models are already imported. To load a quantized model in a
process that does not call `convert`, import this package first.
"""

from quantshard.integrations.transformers.loading import QuantshardConfig, QuantshardQuantizer, training_config
from quantshard.integrations.transformers.trainer import AdamFactory, QuantizedTraining, adam
from quantshard.interop.conversion import attention

__all__ = ["AdamFactory", "QuantizedTraining", "QuantshardConfig", "QuantshardQuantizer", "adam", "training_config"]

attention.register()
