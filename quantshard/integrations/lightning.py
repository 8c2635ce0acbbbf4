"""Public names of the Lightning integration."""

from quantshard.interop.frameworks.lightning import FabricStrategy, TrainerStrategy, convert_and_shard

__all__ = [
    "FabricStrategy",
    "TrainerStrategy",
    "convert_and_shard",
]
