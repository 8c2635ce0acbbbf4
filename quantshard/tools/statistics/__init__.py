"""What the numbers of a model do while it trains, alarms, and where infinite and NaN values come from."""

from quantshard.tools.statistics.alarms import Alarm
from quantshard.tools.statistics.nonfinite import NonfiniteValue, first_nonfinite
from quantshard.tools.statistics.recorder import Statistics
from quantshard.tools.statistics.rows import OperandError, StatisticsRow, StatisticsSample

__all__ = [
    "Alarm",
    "NonfiniteValue",
    "OperandError",
    "Statistics",
    "StatisticsRow",
    "StatisticsSample",
    "first_nonfinite",
]
