"""The exceptions that quantshard raises on purpose.

    QuantshardError
     |-- ConfigurationError (also a ValueError)     an argument, option or file of the user's does not fit
     |-- RecipeMismatchError (also a ValueError)    a weight's format is not the one the recipe in force asks for
     |-- UnsupportedOperationError (also a RuntimeError)  an operation would change or dequantize a weight unasked
     |-- FallbackError (also a RuntimeError)        strict was asked for, and something would take a slower path
     |-- CheckpointError (also a RuntimeError)      a checkpoint is missing, damaged, or of another model or recipe
     |-- RankMismatchError (also a RuntimeError)    ranks disagree on something that must be equal
     |-- TorchVersionError (also a RuntimeError)    this version of PyTorch lacks what a feature needs
     `-- NonFiniteGradientError (also a RuntimeError)  infinite or NaN gradients, too often or unskippable

Each message says what happened, to which tensor, with which numbers, and what to do next.
"""

from __future__ import annotations


class QuantshardError(Exception):
    """Base of all errors that quantshard raises on purpose."""


class ConfigurationError(QuantshardError, ValueError):
    """An argument, option or file of the user's does not fit."""


class RecipeMismatchError(QuantshardError, ValueError):
    """A weight's format is not the one that the recipe in force asks for."""


class UnsupportedOperationError(QuantshardError, RuntimeError):
    """An operation would change or dequantize a quantized tensor without being asked to.

    Not a TypeError: Python's operators take one for "try the other operand", and `==` would end in False.
    """


class FallbackError(QuantshardError, RuntimeError):
    """Strict was asked for, and something would take a slower or larger path than its native one."""


class CheckpointError(QuantshardError, RuntimeError):
    """A checkpoint is missing, damaged, or of another model or recipe."""


class RankMismatchError(QuantshardError, RuntimeError):
    """Ranks disagree on something that must be equal everywhere."""


class TorchVersionError(QuantshardError, RuntimeError):
    """This version of PyTorch lacks a private function, class or attribute that a feature needs."""


class NonFiniteGradientError(QuantshardError, RuntimeError):
    """Too many steps in a row had infinite or NaN gradients, or one had that its optimizer cannot skip."""
