"""TransformerEngine's packages: `transformer_engine.X` is `quantshard.compat.transformer_engine.X`.

The classes are quantshard's own. What differs, and what is refused: docs/transformer-engine.md.
"""

from quantshard.compat.transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
