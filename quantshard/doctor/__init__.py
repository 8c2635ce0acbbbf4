"""What this machine is, which of its kernels are right, and how fast it is: `quantshard doctor`."""

from quantshard.doctor.report import Report, diagnose

__all__ = ["Report", "diagnose"]
