"""Looking at a model: what is stored, sent and computed, and why."""

from quantshard.observe.explain import explain
from quantshard.observe.plan import plan
from quantshard.observe.table import Report, Row, Totals

__all__ = ["Report", "Row", "Totals", "explain", "plan"]
