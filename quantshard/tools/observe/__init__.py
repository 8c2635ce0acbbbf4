"""Reports on a model: what is stored, communicated and computed, and why."""

from quantshard.tools.observe.explain import explain
from quantshard.tools.observe.table import PhaseMemory, Report, Row, StepMemory, Totals

__all__ = ["PhaseMemory", "Report", "Row", "StepMemory", "Totals", "explain"]
