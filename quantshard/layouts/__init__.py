"""Layouts: a model's weights as other programs store them, in safetensors; export and import."""

from quantshard.layouts.inspection import inspect
from quantshard.layouts.loading import Import, load
from quantshard.layouts.names import LLAMA, Names
from quantshard.layouts.table import LAYOUTS, Layout
from quantshard.layouts.writing import Export, export

__all__ = ["LAYOUTS", "LLAMA", "Export", "Import", "Layout", "Names", "export", "inspect", "load"]
