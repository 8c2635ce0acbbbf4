"""TransformerEngine's packages: import `quantshard.compat.transformer_engine.X` instead of `transformer_engine.X`.

Modules and recipes are quantshard's, with an adapter for TransformerEngine's arguments. Differences are listed in
docs/transformer-engine.md.
"""

from quantshard.compat.transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
