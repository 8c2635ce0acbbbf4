"""Statistics of a model's numbers in training, alarms, and the origin of infinite and NaN values."""

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
