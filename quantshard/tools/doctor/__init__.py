"""`quantshard doctor`: describes this machine, checks its kernels, and measures its speed."""

from quantshard.tools.doctor.report import MachineReport, diagnose, is_report
from quantshard.tools.doctor.results import Result, Watch

__all__ = ["MachineReport", "Result", "Watch", "diagnose", "is_report"]
