"""The engine that a contract test runs against, and the expected tokens of its model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.engine.api import Engine
from tests.engine.contract.engines import ENGINES, SMALL_CONTEXT, EngineUnderTest


@pytest.fixture(params=ENGINES)
def subject(request: pytest.FixtureRequest) -> EngineUnderTest:
    return request.param()


@pytest.fixture
def engine(subject: EngineUnderTest) -> Iterator[Engine]:
    made = subject.make(0)
    yield made
    made.close()


@pytest.fixture
def small_engine(subject: EngineUnderTest) -> Iterator[Engine]:
    """An engine with a context of SMALL_CONTEXT rows."""
    made = subject.make(SMALL_CONTEXT)
    yield made
    made.close()
