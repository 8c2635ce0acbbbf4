"""Statistics of a model's numbers in training, alarms, and the origin of infinite and NaN values."""

from quantshard.tools.statistics.nonfinite import NonfiniteValue, first_nonfinite
from quantshard.tools.statistics.recorder import Statistics
from quantshard.tools.statistics.rows import Alarm, OperandError, StatisticsRow, StatisticsSample

__all__ = [
    "Alarm",
    "NonfiniteValue",
    "OperandError",
    "Statistics",
    "StatisticsRow",
    "StatisticsSample",
    "first_nonfinite",
]
