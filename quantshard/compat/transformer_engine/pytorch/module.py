"""TransformerEngine's `pytorch.module`: quantshard's modules with TransformerEngine's arguments."""

from quantshard import modules
from quantshard.compat.transformer_engine.arguments import ModuleAdapter, NormAdapter, adapted

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm", "TransformerLayer"]

Linear = adapted(modules.Linear, ModuleAdapter, __name__)
LayerNormLinear = adapted(modules.LayerNormLinear, ModuleAdapter, __name__)
LayerNormMLP = adapted(modules.LayerNormMLP, ModuleAdapter, __name__)
GroupedLinear = adapted(modules.GroupedLinear, ModuleAdapter, __name__)
TransformerLayer = adapted(modules.TransformerLayer, ModuleAdapter, __name__)
LayerNorm = adapted(modules.LayerNorm, NormAdapter, __name__)
RMSNorm = adapted(modules.RMSNorm, NormAdapter, __name__)
