"""Public names of the PEFT integration."""

from quantshard.interop.frameworks.peft import load_adapter, register, save_adapter

__all__ = [
    "load_adapter",
    "register",
    "save_adapter",
]
