"""Reports on a model: what is stored, communicated and computed, and why."""

from quantshard.tools.observe.explain import explain
from quantshard.tools.observe.step_memory import PhaseMemory, StepMemory
from quantshard.tools.observe.table import Report, Row, Totals

__all__ = ["PhaseMemory", "Report", "Row", "StepMemory", "Totals", "explain"]
