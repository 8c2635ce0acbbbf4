"""Weights in the layouts of other programs, as safetensors: export, import and inspection."""

from quantshard.checkpoints.inspection import inspect_checkpoint as inspect
from quantshard.interop.layouts import LAYOUTS, LLAMA, Export, Import, Layout, Names, export, load

__all__ = ["LAYOUTS", "LLAMA", "Export", "Import", "Layout", "Names", "export", "inspect", "load"]
