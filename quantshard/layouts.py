"""Layouts: a model's weights as other programs store them, in safetensors; export and import."""

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
