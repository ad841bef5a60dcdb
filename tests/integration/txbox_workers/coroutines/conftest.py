"""Workers with coroutine handlers: each test is a coroutine that it runs itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import URL, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from support.workers.async_worker import Engines


@pytest.fixture
def named_url(schema_url: str, request: pytest.FixtureRequest) -> URL:
    """The database's URL, with an application name of the test's own, by which its connections are found."""
    return make_url(schema_url).update_query_dict({"application_name": f"aw{abs(hash(request.node.name))}"[:60]})


@pytest.fixture
def async_engine(named_url: URL) -> Engines:
    """An engine of one event loop: async with async_engine() as engine."""

    @asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[AsyncEngine]:
        engine = create_async_engine(named_url, **{"pool_size": 20, **options})
        try:
            yield engine
        finally:
            await engine.dispose()

    return make
