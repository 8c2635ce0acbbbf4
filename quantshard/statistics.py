"""What the numbers of a model do while it trains, alarms, and where infinite and NaN values come from."""

from quantshard.tools.statistics import (
    Alarm,
    NonfiniteValue,
    OperandError,
    Statistics,
    StatisticsRow,
    StatisticsSample,
    first_nonfinite,
)

__all__ = [
    "Alarm",
    "NonfiniteValue",
    "OperandError",
    "Statistics",
    "StatisticsRow",
    "StatisticsSample",
    "first_nonfinite",
]
