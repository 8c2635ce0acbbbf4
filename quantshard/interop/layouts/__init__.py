"""Import and export of a model's weights as safetensors in the layouts of other programs."""

from quantshard.interop.layouts.loading import Import, load
from quantshard.interop.layouts.names import LLAMA, Names
from quantshard.interop.layouts.table import LAYOUTS, Layout
from quantshard.interop.layouts.writing import Export, export

__all__ = ["LAYOUTS", "LLAMA", "Export", "Import", "Layout", "Names", "export", "load"]
