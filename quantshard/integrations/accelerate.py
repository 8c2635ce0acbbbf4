"""Public names of the accelerate integration."""

from quantshard.interop.frameworks.accelerate import prepare, replica_arguments

__all__ = [
    "prepare",
    "replica_arguments",
]
