"""TransformerEngine's packages: import `quantshard.compat.transformer_engine.X` instead of `transformer_engine.X`.

The classes are quantshard's own. docs/transformer-engine.md lists differences and unsupported features.
"""

from quantshard.compat.transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
