"""Requests that are cut short: nothing is left behind, and nobody uses the connection of a thread that outlives one."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from support.waiting import wait_until
from support.web.service import engine_for, no_body
from support.workers.business import APPLY, Business
from txbox import Inbox, StatementLeftOpen
from txbox.leases import LeaseState, PostgresLedger
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, UnderLease, everyone

SLEEP = text("SELECT pg_sleep(30)")
WHICH = text("SELECT pg_backend_pid()")

Handler = Callable[[Any], Awaitable[object]]


def application(once: Idempotency, handler: Handler) -> Any:
    """An application around which the middleware is; what it has sent is ``sent``."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await handler(await once(Request(scope, receive)))
        await Response(status_code=201)(scope, receive, send)

    return IdempotencyMiddleware(app, once)


async def request(app: Any, key: str, sent: list[Message]) -> None:
    headers = [(b"idempotency-key", key.encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, no_body, send)


async def cut(ways: str, call: Coroutine[Any, Any, None], entered: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Cut a request short, in one of the ways of asyncio, once it has entered its handler's work."""
    task = asyncio.create_task(call, name="request")
    if ways == "cancel":
        await asyncio.wait_for(entered(), 30)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
    else:
        with suppress(TimeoutError):
            if ways == "wait_for":
                await asyncio.wait_for(task, 0.5)
            else:
                async with asyncio.timeout(0.5):
                    await task


@pytest.mark.parametrize("ways", ["cancel", "wait_for", "timeout"])
def test_a_thread_within_a_statement_is_told_and_the_next_request_has_another_connection(
    schema_url: str, business: Business, ways: str
) -> None:
    engine = create_engine(schema_url, pool_size=1, max_overflow=0)
    entered, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    servers: list[int] = []

    def outlive(session: Session) -> None:
        session.execute(APPLY, {"id": "tea", "body": ""})
        servers.append(session.execute(WHICH).scalar_one())
        entered.set()
        try:
            session.execute(SLEEP)
        except Exception as error:  # noqa: BLE001 - whatever it is
            errors.append(error)
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is told: it has no connection any more
            session.execute(APPLY, {"id": "coffee", "body": ""})
        ended.set()

    def work(session: Session) -> None:
        servers.append(session.execute(WHICH).scalar_one())
        session.execute(APPLY, {"id": "milk", "body": ""})

    async def main() -> None:
        once = Idempotency(InTransaction(sessionmaker(engine), Inbox("billing")), caller=everyone)
        app = application(once, lambda session: run_in_threadpool(outlive, session))
        await cut(ways, request(app, "k1", []), lambda: asyncio.to_thread(entered.wait, 30))
        began = time.monotonic()
        assert await asyncio.to_thread(ended.wait, 20)
        assert time.monotonic() - began < 15, "it does not wait for its statement's end"
        sent: list[Message] = []
        await request(application(once, lambda session: run_in_threadpool(work, session)), "k2", sent)
        assert sent[0]["status"] == 201

    asyncio.run(main())
    engine.dispose()
    assert isinstance(errors[0], DBAPIError)
    assert servers[0] != servers[1]
    wait_until(lambda: business.applied() == {"milk": 1}, "only what was answered is there")
    assert len(business.recorded()) == 1


def test_a_thread_between_two_statements_has_no_second_one(schema_url: str, business: Business) -> None:
    engine = create_engine(schema_url, pool_size=1, max_overflow=0)
    entered, free, ended = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def outlive(session: Session) -> None:
        connection = session.connection()
        session.execute(APPLY, {"id": "tea", "body": ""})
        entered.set()
        assert free.wait(30)
        for late in (session, connection):
            try:
                late.execute(APPLY, {"id": "coffee", "body": ""})
            except Exception as error:  # noqa: BLE001 - whatever it is
                errors.append(error)
        ended.set()

    async def main() -> None:
        once = Idempotency(InTransaction(sessionmaker(engine), Inbox("billing")), caller=everyone)
        app = application(once, lambda session: run_in_threadpool(outlive, session))
        await cut("cancel", request(app, "k1", []), lambda: asyncio.to_thread(entered.wait, 30))
        with engine.connect() as next_one:  # the only one of the pool
            free.set()
            assert await asyncio.to_thread(ended.wait, 30)
            next_one.commit()

    asyncio.run(main())
    engine.dispose()
    assert len(errors) == 2
    assert business.applied() == {}
    assert business.recorded() == set()


@pytest.mark.parametrize("driver", ["async", "asyncpg"])
@pytest.mark.parametrize("statement", ["within", "between"])
def test_a_task_that_is_shielded_loses_its_connection_and_disturbs_nobody(
    schema_url: str, business: Business, driver: str, statement: str
) -> None:
    results: list[Any] = []
    servers: list[int] = []

    async def main() -> None:
        engine = engine_for(schema_url, driver, pool_size=1, max_overflow=0)
        once = Idempotency(InTransaction(async_sessionmaker(engine), Inbox("billing")), caller=everyone)
        entered, free = asyncio.Event(), asyncio.Event()
        tasks: list[asyncio.Future[Any]] = []

        async def outlive(session: AsyncSession) -> None:
            servers.append((await session.execute(WHICH)).scalar_one())
            asyncio.get_running_loop().call_later(0.2, entered.set)
            if statement == "between":
                await free.wait()
            await session.execute(SLEEP if statement == "within" else WHICH)

        async def shield(session: AsyncSession) -> None:
            tasks.append(asyncio.ensure_future(outlive(session)))
            await asyncio.shield(tasks[0])

        async def work(session: AsyncSession) -> None:
            servers.append((await session.execute(WHICH)).scalar_one())
            free.set()
            await asyncio.sleep(0.2)
            await session.execute(APPLY, {"id": "milk", "body": ""})

        await cut("cancel", request(application(once, shield), "k1", []), entered.wait)
        sent: list[Message] = []
        await request(application(once, work), "k2", sent)
        assert sent[0]["status"] == 201
        results.extend(await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20))
        assert engine.pool.checkedout() == 0
        await engine.dispose()

    asyncio.run(main())
    assert isinstance(results[0], DBAPIError if statement == "within" else InvalidRequestError)
    assert (servers[0] == servers[1]) == (statement == "between")
    assert business.applied() == {"milk": 1}
    assert len(business.recorded()) == 1


def test_a_handler_that_answers_while_its_thread_is_at_work_has_done_nothing(
    schema_url: str, business: Business
) -> None:
    engine = create_engine(schema_url, pool_size=1, max_overflow=0)
    entered, ended = threading.Event(), threading.Event()

    def outlive(session: Session) -> None:
        session.execute(APPLY, {"id": "tea", "body": ""})
        entered.set()
        with suppress(DBAPIError):
            session.execute(SLEEP)
        ended.set()

    async def handler(session: Session) -> None:
        threading.Thread(target=outlive, args=[session], daemon=True).start()
        await asyncio.to_thread(entered.wait, 30)
        await asyncio.sleep(0.2)

    async def main() -> None:
        once = Idempotency(InTransaction(sessionmaker(engine), Inbox("billing")), caller=everyone)
        with pytest.raises(StatementLeftOpen):
            await request(application(once, handler), "k1", [])
        assert await asyncio.to_thread(ended.wait, 20)

    asyncio.run(main())
    engine.dispose()
    assert business.applied() == {}
    assert business.recorded() == set()


async def cancelled_in_handler(once: Idempotency, apply: Callable[[Any], Any]) -> None:
    """Run a request up to its handler, and cancel it there, as a server does that shuts down."""
    entered = asyncio.Event()

    async def handler(subject: Any) -> None:
        await apply(subject)
        entered.set()
        await asyncio.Event().wait()

    sent: list[Message] = []
    await cut("cancel", request(application(once, handler), "k1", sent), entered.wait)
    assert sent == []


@pytest.mark.parametrize("driver", ["async", "asyncpg"])
@pytest.mark.parametrize("times", [1, 2])
def test_its_transaction_is_rolled_back_and_its_connection_given_back(
    schema_url: str, business: Business, driver: str, times: int
) -> None:
    rolled_back = []

    async def main() -> None:
        engine = engine_for(schema_url, driver)

        @event.listens_for(engine.sync_engine, "rollback")
        def cancel_again(_: object) -> None:
            if times == 2:
                next(task for task in asyncio.all_tasks() if task.get_name() == "request").cancel()

        @event.listens_for(engine.sync_engine, "checkin")
        def note(driver_connection: object, _: object) -> None:
            rolled_back.append(driver_connection is not None)

        once = Idempotency(InTransaction(async_sessionmaker(engine), Inbox("billing")), caller=everyone)
        await cancelled_in_handler(once, lambda session: session.execute(APPLY, {"id": "tea", "body": ""}))
        assert engine.pool.checkedout() == 0
        await engine.dispose()

    asyncio.run(main())
    assert rolled_back == [True], "the clean-up was cut short, and the connection thrown away"
    assert business.applied() == {}
    assert business.recorded() == set()


def test_its_session_is_not_closed_while_a_thread_works_on_it(schema_url: str, business: Business) -> None:
    entered, free = threading.Event(), threading.Event()
    engine = create_engine(schema_url)
    once = Idempotency(InTransaction(sessionmaker(engine), Inbox("billing")), caller=everyone)

    @event.listens_for(engine, "after_cursor_execute")
    def wait(*_: object) -> None:
        entered.set()
        assert free.wait(30)

    async def nothing(_: object) -> None:
        return

    async def main() -> None:
        sent: list[Message] = []
        task = asyncio.create_task(request(application(once, nothing), "k1", sent))
        await asyncio.to_thread(entered.wait, 30)
        for _ in range(2):
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.2)
            assert not done
        free.set()
        with suppress(asyncio.CancelledError):
            await task
        assert (task.cancelled(), sent) == (True, [])
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]

    try:
        asyncio.run(main())
    finally:
        free.set()
        engine.dispose()
    assert business.recorded() == set()


def test_its_lease_is_released_and_the_next_attempt_is_told(engine: Engine) -> None:
    ledger = PostgresLedger("charging", engine=engine)

    async def nothing(_: object) -> None:
        return

    asyncio.run(cancelled_in_handler(Idempotency(UnderLease(ledger), caller=everyone), nothing))
    acquisition = ledger.acquire("k1")
    assert acquisition.state is LeaseState.ACQUIRED
    assert acquisition.lease is not None
    assert acquisition.lease.unknown_attempts == 1
