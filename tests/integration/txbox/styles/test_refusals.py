"""What is given to the wrong class is refused in words, and never with MissingGreenlet."""

import asyncio
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from support.postgres.blocking import backend_pid, wait_until_blocked
from support.txbox.entities import Account
from support.txbox.inbox import recorded
from txbox import AsyncInbox, AsyncOutbox, Inbox, Outbox
from txbox.entities import update_once

pytestmark = pytest.mark.anyio


async def test_functions_name_the_classes_for_coroutines(schema_url: str) -> None:
    engine = create_async_engine(schema_url)
    conninfo = make_url(schema_url).set(drivername="postgresql").render_as_string(hide_password=False)
    async with (
        AsyncSession(engine) as session,
        AsyncSession(engine) as begun,
        engine.connect() as connection,
        await psycopg.AsyncConnection.connect(conninfo) as driver,
    ):
        await begun.connection()
        unbegun = session.sync_session
        for given in (session, unbegun, begun.sync_session, connection, connection.sync_connection, driver):
            with pytest.raises(TypeError, match="AsyncInbox, AsyncOutbox or AsyncWatermarks"):
                Inbox("billing").record(given, "m-1")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="AsyncInbox, AsyncOutbox or AsyncWatermarks"):
                Outbox().publish(given, "own:somewhere", "body")  # type: ignore[arg-type]
        unbegun.add(Account(account_id="bob"))
        by_class = AsyncSession(binds={Account: engine}).sync_session
        for given in (session, unbegun, begun.sync_session, by_class, connection, connection.sync_connection):
            with pytest.raises(TypeError, match="async_update_once"):
                update_once(given, Account, "ann", "m-1", {})  # type: ignore[arg-type]
        unbegun.expunge_all()
        assert await session.run_sync(Inbox("billing").record, "m-1") is True, "a function that runs in a greenlet may"
    await engine.dispose()


async def test_coroutines_name_the_classes_for_functions(engine: Engine) -> None:
    with Session(engine) as session, engine.connect() as connection:
        for given in (session, connection, connection.connection.dbapi_connection, engine):
            with pytest.raises(TypeError, match="without Async in its name"):
                await AsyncInbox("billing").record(given, "m-1")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="without Async in its name"):
                await AsyncOutbox().publish(given, "own:somewhere", "body")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"is needed, not AsyncEngine$"):
        await AsyncInbox("billing").record(create_async_engine(engine.url), "m-1")  # type: ignore[arg-type]


def test_mapped_classes_need_sqlalchemy(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(TypeError, match="not a connection of psycopg"):
        update_once(connection.connection.dbapi_connection, Account, "ann", "m-1", {})  # type: ignore[arg-type]


async def test_a_connection_may_be_used_by_a_transaction_that_was_cancelled_only_after_its_rollback(
    schema_url: str, engine: Engine
) -> None:
    """Cancelled within a statement that waits: nothing is left, and the pool gives out a connection that works."""
    asynchronous = create_async_engine(schema_url, pool_size=1, max_overflow=0)
    inbox = AsyncInbox("billing", wait_seconds=60)
    with engine.connect() as other:
        Inbox("billing").record(other, "m-1")

        async def record(connection: AsyncConnection) -> None:
            await inbox.record(connection, "m-0")
            await inbox.record(connection, "m-1")

        async with asynchronous.connect() as connection:
            pid = await connection.run_sync(backend_pid)
            waiting = asyncio.create_task(record(connection))
            await asyncio.to_thread(wait_until_blocked, engine, pid)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        other.commit()
    async with asynchronous.begin() as connection:
        assert await inbox.record_many(connection, ["m-0", "m-1"]) == {"m-0"}
    await asynchronous.dispose()
    assert recorded(engine) == [("billing", "m-0"), ("billing", "m-1")]


async def test_a_cancellation_while_relays_are_notified_gives_the_connection_back(
    schema_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = psycopg.AsyncCursor.execute
    cancelled = 0

    async def cancelling(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal cancelled
        task = asyncio.current_task()
        if str(query).startswith("NOTIFY") and task is not None:
            cancelled += 1
            task.cancel()
        return await execute(self, query, *args, **kwargs)

    monkeypatch.setattr(psycopg.AsyncCursor, "execute", cancelling)
    asynchronous = create_async_engine(schema_url, pool_size=1, max_overflow=0, pool_timeout=2)

    async def publish() -> None:
        async with asynchronous.begin() as connection:
            await AsyncOutbox().publish(connection, "own:somewhere", "body")
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(publish())
    assert cancelled == 1
    async with asynchronous.connect() as connection:
        published = await connection.exec_driver_sql("SELECT count(*) FROM outbox_message")
        assert published.scalar_one() == 1
    await asynchronous.dispose()
