"""Coroutine handlers: what they are given, what they may do, and what they are refused."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from support.workers.async_worker import apply, work_off
from support.workers.business import Business, once
from support.workers.memory_worker import messages, numbered
from txbox import Inbox, InvalidConfiguration, Message, Outcome
from txbox.instrumentation import Settled
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.memory_source import MemorySource

pytestmark = pytest.mark.anyio


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    account_id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


@pytest.mark.parametrize("factory", [None, "async_sessionmaker"])
async def test_a_handler_works_with_mapped_objects(
    business: Business, async_engine: AsyncEngine, factory: str | None
) -> None:
    async def pay(session: AsyncSession, message: Message) -> None:
        if factory:
            assert not session.sync_session.expire_on_commit
        account = (await session.scalars(select(Account).where(Account.account_id == 1).with_for_update())).one()
        await asyncio.sleep(0)
        account.balance += 1  # flushed by the worker

    options = {"session_factory": async_sessionmaker(expire_on_commit=False)} if factory else {}
    await work_off(MemorySource([*numbered(30), *numbered(30)]), async_engine, pay, batch_size=1, **options)
    assert business.balance() == 30


async def commits(session: AsyncSession) -> None:
    await session.commit()
    await (await session.connection()).commit()


async def commits_by_sql(session: AsyncSession) -> None:
    await session.execute(text("COMMIT"))


async def rolls_back(session: AsyncSession) -> None:
    await session.rollback()


async def leaves_a_statement_open(session: AsyncSession) -> None:
    driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
    cursor = driver.cursor()
    left.append(cursor.stream("SELECT generate_series(1, 100)"))
    await anext(left[-1])


async def swallows_an_error(session: AsyncSession) -> None:
    with suppress(DBAPIError):
        await session.execute(text("SELECT 1 / 0"))


async def raises_cancelled_error(session: AsyncSession) -> None:
    raise asyncio.CancelledError


async def cancels_what_it_waits_for(session: AsyncSession) -> None:
    waits = asyncio.ensure_future(asyncio.sleep(60))
    waits.cancel()
    await waits


async def times_out_by_cancelling_itself(session: AsyncSession) -> None:
    """As some libraries have it, without ``uncancel``."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        raise TimeoutError from None


async def times_out_a_statement(session: AsyncSession) -> None:
    async with asyncio.timeout(0.05):
        await session.execute(text("SELECT pg_sleep(60)"))


async def waits_for_a_statement(session: AsyncSession) -> None:
    await asyncio.wait_for(session.execute(text("SELECT pg_sleep(60)")), 0.05)


async def goes_on_after_its_time(session: AsyncSession) -> None:
    try:
        await times_out_a_statement(session)
    except TimeoutError:
        await session.execute(text("SELECT 1"))


async def swallows_its_time(session: AsyncSession) -> None:
    with suppress(TimeoutError):
        await times_out_a_statement(session)


async def times_out_a_shielded_statement(session: AsyncSession) -> None:
    shielded.append(asyncio.ensure_future(session.execute(text("SELECT pg_sleep(60)"))))
    async with asyncio.timeout(0.05):
        await asyncio.shield(shielded[-1])


async def leaves_a_statement_to_a_task(session: AsyncSession) -> None:
    shielded.append(asyncio.ensure_future(session.execute(text("SELECT pg_sleep(60)"))))
    await asyncio.wait(shielded[-1:], timeout=0.05)


left: list[Any] = []
shielded: list[asyncio.Future[Any]] = []


@pytest.mark.parametrize(
    ("does", "error"),
    [
        (commits, "TransactionEnded"),
        (commits_by_sql, "TransactionEnded"),
        (rolls_back, "TransactionEnded"),
        (leaves_a_statement_open, "StatementLeftOpen"),
        (swallows_an_error, "TransactionAborted"),
        (raises_cancelled_error, "CancelledError"),
        (cancels_what_it_waits_for, "CancelledError"),
        (times_out_by_cancelling_itself, "TimeoutError"),
        (times_out_a_statement, "TimeoutError"),
        (waits_for_a_statement, "TimeoutError"),
        (goes_on_after_its_time, "TransactionEnded"),
        (swallows_its_time, "TransactionEnded"),
        (times_out_a_shielded_statement, "TimeoutError"),
        (leaves_a_statement_to_a_task, "StatementLeftOpen"),
    ],
)
async def test_what_a_handler_must_not_do_is_its_message_s_failure_and_no_more(
    business: Business, async_engine: AsyncEngine, does: Callable[[AsyncSession], Awaitable[None]], error: str
) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        await apply(session, message)
        if message.id == "bad":
            await does(session)

    kept = await work_off(MemorySource(messages("a", "bad", "b")), async_engine, handle, max_attempts=2)
    while left:
        await left.pop().aclose()
    async with asyncio.timeout(20):  # a task's statement does not go on to its end
        while shielded:
            with pytest.raises(DBAPIError):
                await shielded.pop()
    assert async_engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert kept.outcomes("bad") == [Outcome.FAILED, Outcome.DEAD]
    assert {type(one.error).__name__ for one in kept.of(Settled) if one.message_id == "bad"} == {error}
    assert business.applied() == once(["a", "b"])
    assert business.letters() == {"bad": "failed"}


def function(session: Any, message: Message) -> None:
    """No coroutine."""


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"handler": function}, r"AsyncWorker\.handler must be a coroutine function"),
        ({"concurrency": 16}, r"pool has 15 connections: give create_async_engine\(…, pool_size=16\)"),
        ({"concurrency": 0}, r"AsyncWorker\.concurrency must be from 1 to"),
        ({"prefetch": 0}, r"AsyncWorker\.prefetch must be at least"),
        ({"engine": "sync"}, r"AsyncWorker\.engine must be an AsyncEngine, not Engine"),
        ({"engine": "asyncpg"}, r"not of asyncpg: a worker sends several statements"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(
    engine: Engine, schema_url: str, options: dict[str, Any], error: str
) -> None:
    made = create_async_engine(schema_url)
    engines = {"sync": engine, "asyncpg": create_async_engine(made.url.set(drivername="postgresql+asyncpg", query={}))}
    options = {"engine": made, "handler": apply, **options}
    options["engine"] = engines.get(options["engine"], options["engine"])
    with pytest.raises(InvalidConfiguration, match=error):
        AsyncWorker(MemorySource(), inbox=Inbox("billing"), **options)


def test_it_takes_no_option_of_threads(schema_url: str) -> None:
    with pytest.raises(TypeError, match=r"AsyncWorker\(\) got an unexpected keyword argument 'threads'"):
        AsyncWorker(MemorySource(), inbox=Inbox("billing"), engine=create_async_engine(schema_url), threads=2)  # type: ignore[call-arg]
