"""Workers with coroutine handlers, and an engine of the test's own event loop."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import URL, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from support.waiting import wait_until
from support.workers.async_worker import Engines


@pytest.fixture
def named_url(schema_url: str, request: pytest.FixtureRequest) -> URL:
    """The database's URL, with an application name of the test's own, by which its connections are found."""
    return make_url(schema_url).update_query_dict({"application_name": f"aw{abs(hash(request.node.name))}"[:60]})


@pytest.fixture
def anyio_backend() -> str:
    """The library whose event loop tests run on."""
    return "asyncio"


@pytest.fixture
def make_async_engine(named_url: URL) -> Engines:
    """An engine of one event loop: async with make_async_engine() as engine."""

    @asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[AsyncEngine]:
        engine = create_async_engine(named_url, **{"pool_size": 20, **options})
        try:
            yield engine
        finally:
            await engine.dispose()

    return make


@pytest.fixture
async def async_engine(make_async_engine: Engines) -> AsyncIterator[AsyncEngine]:
    """The engine of a test that is a coroutine."""
    async with make_async_engine() as engine:
        yield engine


@pytest.fixture
def no_threads() -> Iterator[None]:
    """See that workers leave no thread behind."""
    before = set(threading.enumerate())
    yield

    def left() -> set[str]:  # the process has one watchdog; a renewer ends when it has had nothing to do for a while
        names = {one.name for one in set(threading.enumerate()) - before}
        return {name for name in names if name not in ("txbox-watchdog", "txbox-leases")}

    wait_until(lambda: not left(), f"no thread is left of {left()}", timeout=5)
