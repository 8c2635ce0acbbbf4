"""Weights in the layouts of other programs, as safetensors: export, import and inspection."""

from quantshard.interop.layouts import LAYOUTS, LLAMA, Export, Import, Layout, Names, export, inspect, load

__all__ = [
    "LAYOUTS",
    "LLAMA",
    "Export",
    "Import",
    "Layout",
    "Names",
    "export",
    "inspect",
    "load",
]
