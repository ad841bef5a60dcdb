"""The styles in which a service can use the inbox and its siblings: each driver and connection, sync and async.

One port over all of them, for one conformance suite. Tests are coroutines; what blocks is called in a thread.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

import psycopg
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from support.postgres.engines import NO_HSTORE
from txbox import AsyncInbox, AsyncOutbox, Inbox, Outbox
from txbox.coroutines import AsyncWatermarks, async_update_if_newer, async_update_once
from txbox.entities import update_if_newer, update_once
from txbox.watermarks import Watermarks


class Style(ABC):
    """One way to hold a transaction.

    ``lent`` is what is handed to the inbox: a connection or a session.
    """

    is_async = True
    has_mapped_classes = True

    def __init__(self, url: str) -> None:
        self.url = url
        self._threads = ThreadPoolExecutor(32)  # asyncio's own has too few for all that wait at once

    @property
    def inbox(self) -> Any:
        return AsyncInbox if self.is_async else Inbox

    @property
    def outbox(self) -> Any:
        return AsyncOutbox if self.is_async else Outbox

    @property
    def watermarks(self) -> Any:
        return AsyncWatermarks if self.is_async else Watermarks

    @property
    def update_once(self) -> Any:
        return async_update_once if self.is_async else update_once

    @property
    def update_if_newer(self) -> Any:
        return async_update_if_newer if self.is_async else update_if_newer

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call or await it: a method of an inbox, say."""
        if self.is_async:
            return await function(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    @abstractmethod
    def open(self, isolation: str = "READ COMMITTED") -> Any:
        """Open what holds a transaction; it is rolled back at the end, unless it was committed."""

    @abstractmethod
    async def sql(self, lent: Any, statement: str) -> Any:
        """Run a statement in its transaction, and return its first value; None if it returns nothing."""

    async def commit(self, lent: Any) -> None:
        await self.call(lent.commit)

    async def rollback(self, lent: Any) -> None:
        await self.call(lent.rollback)


def _first(result: Any) -> Any:
    return result.scalar() if result.returns_rows else None


class SyncSqlalchemy(Style):
    is_async = False
    session = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.engine = cache(self.make_engine)

    def make_engine(self, isolation: str) -> Engine:
        return create_engine(self.url, isolation_level=isolation, poolclass=NullPool, **NO_HSTORE)

    @asynccontextmanager
    async def open(self, isolation: str = "READ COMMITTED") -> AsyncIterator[Any]:
        engine = self.engine(isolation)
        with Session(engine) if self.session else engine.connect() as lent:
            yield lent

    async def sql(self, lent: Any, statement: str) -> Any:
        return _first(await self.call(lent.execute, text(statement)))


class SyncSession(SyncSqlalchemy):
    session = True


class AsyncSqlalchemy(Style):
    session = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.engine = cache(self.make_engine)

    def make_engine(self, isolation: str) -> AsyncEngine:
        return create_async_engine(self.url, isolation_level=isolation, poolclass=NullPool, **NO_HSTORE)

    @asynccontextmanager
    async def open(self, isolation: str = "READ COMMITTED") -> AsyncIterator[Any]:
        engine = self.engine(isolation)
        async with AsyncSession(engine) if self.session else engine.connect() as lent:
            yield lent

    async def sql(self, lent: Any, statement: str) -> Any:
        return _first(await lent.execute(text(statement)))


class AsyncSessions(AsyncSqlalchemy):
    session = True


class AsyncpgConnections(AsyncSqlalchemy):
    def make_engine(self, isolation: str) -> AsyncEngine:
        url = make_url(self.url)
        path = str(url.query["options"]).removeprefix("-csearch_path=")
        return create_async_engine(
            url.set(drivername="postgresql+asyncpg", query={}),
            isolation_level=isolation,
            poolclass=NullPool,
            connect_args={"server_settings": {"search_path": path}},
        )


class AsyncpgSessions(AsyncpgConnections):
    session = True


class Psycopg(Style):
    is_async = False
    has_mapped_classes = False

    @property
    def conninfo(self) -> str:
        return make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False)

    @asynccontextmanager
    async def open(self, isolation: str = "READ COMMITTED") -> AsyncIterator[Any]:
        connection = await asyncio.to_thread(psycopg.connect, self.conninfo)
        connection.isolation_level = psycopg.IsolationLevel[isolation.replace(" ", "_")]
        try:
            yield connection
        finally:
            connection.close()

    async def sql(self, lent: Any, statement: str) -> Any:
        cursor = await self.call(lent.execute, statement)
        return (cursor.fetchone() or [None])[0] if cursor.description else None


class AsyncPsycopg(Psycopg):
    is_async = True

    @asynccontextmanager
    async def open(self, isolation: str = "READ COMMITTED") -> AsyncIterator[Any]:
        connection = await psycopg.AsyncConnection.connect(self.conninfo)
        await connection.set_isolation_level(psycopg.IsolationLevel[isolation.replace(" ", "_")])
        try:
            yield connection
        finally:
            await connection.close()

    async def sql(self, lent: Any, statement: str) -> Any:
        cursor = await lent.execute(statement)
        return (await cursor.fetchone() or [None])[0] if cursor.description else None


STYLES: dict[str, type[Style]] = {
    "Connection": SyncSqlalchemy,
    "Session": SyncSession,
    "psycopg.Connection": Psycopg,
    "AsyncConnection": AsyncSqlalchemy,
    "AsyncSession": AsyncSessions,
    "AsyncConnection of asyncpg": AsyncpgConnections,
    "AsyncSession of asyncpg": AsyncpgSessions,
    "psycopg.AsyncConnection": AsyncPsycopg,
}
