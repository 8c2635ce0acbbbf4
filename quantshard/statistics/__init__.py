"""What the numbers of a model do while it trains, alarms, and where infinite and NaN values come from."""

from quantshard.statistics.alarms import Alarm
from quantshard.statistics.nonfinite import NonfiniteValue, first_nonfinite
from quantshard.statistics.recorder import Statistics
from quantshard.statistics.rows import OperandError, StatisticsRow, StatisticsSample

__all__ = [
    "Alarm",
    "NonfiniteValue",
    "OperandError",
    "Statistics",
    "StatisticsRow",
    "StatisticsSample",
    "first_nonfinite",
]
