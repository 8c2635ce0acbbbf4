"""Reports on a model: what is stored, communicated and computed, and why."""

from quantshard.tools.observe.costs import PhaseMemory, Row, StepMemory, Totals
from quantshard.tools.observe.explain import explain
from quantshard.tools.observe.table import Report

__all__ = ["PhaseMemory", "Report", "Row", "StepMemory", "Totals", "explain"]
