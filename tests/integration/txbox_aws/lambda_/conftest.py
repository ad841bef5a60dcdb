"""A function's tables, and its connection."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from support.workers import worker_process
from support.workers.business import Business


@pytest.fixture
def business(engine: Engine) -> Business:
    return worker_process.prepare(engine)


@pytest.fixture
def pool(schema_url: str) -> Iterator[Engine]:
    """An engine as a function has it: one connection."""
    engine = create_engine(schema_url, pool_size=1, max_overflow=0, pool_timeout=5)
    yield engine
    engine.dispose()
