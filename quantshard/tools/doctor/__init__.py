"""What this machine is, which of its kernels are right, and how fast it is: `quantshard doctor`."""

from quantshard.tools.doctor.report import MachineReport, diagnose, is_report
from quantshard.tools.doctor.results import Result, Watch

__all__ = ["MachineReport", "Result", "Watch", "diagnose", "is_report"]
