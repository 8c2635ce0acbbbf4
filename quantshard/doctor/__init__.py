"""What this machine is, which of its kernels are right, and how fast it is: `quantshard doctor`."""

from quantshard.doctor.report import MachineReport, diagnose, is_report
from quantshard.doctor.results import Result, Watch

__all__ = ["MachineReport", "Result", "Watch", "diagnose", "is_report"]
