"""No test leaves an observer to the next."""

import pytest

from quantshard.tensor import observation


@pytest.fixture(autouse=True)
def _nobody_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "active", None)
