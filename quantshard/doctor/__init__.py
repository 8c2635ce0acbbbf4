"""What this machine is, which of its kernels are right, and how fast it is: `quantshard doctor`."""

from quantshard.doctor.report import MachineReport, diagnose
from quantshard.doctor.results import Result, Watch

__all__ = ["MachineReport", "Result", "Watch", "diagnose"]
