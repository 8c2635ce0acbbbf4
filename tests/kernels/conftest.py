"""Triton's interpreter, faster."""

import pytest

from tests.interpreter import prepared_once


@pytest.fixture(autouse=True, scope="session")
def _prepare_once():
    with prepared_once():
        yield
