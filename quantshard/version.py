"""The version of the package: the one place that says it; pyproject.toml reads this file."""

__version__ = "0.2.0"
