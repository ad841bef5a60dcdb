"""Requests that are cancelled in their handlers, as by a server that shuts down: nothing is left behind."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from support.web.service import engine_for
from support.workers.business import APPLY, Business
from txbox import Inbox
from txbox.leases import LeaseState, PostgresLedger
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, UnderLease, everyone

SCOPE = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [(b"idempotency-key", b"k1")]}


async def cancelled_in_handler(once: Idempotency, apply: Callable[[Any], Any]) -> None:
    """Run a request up to its handler, and cancel it there."""
    entered = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await apply(await once(Request(scope, receive)))
        entered.set()
        await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Any) -> None:
        raise AssertionError("nothing is to be answered")

    task = asyncio.create_task(IdempotencyMiddleware(app, once)(dict(SCOPE), receive, send), name="request")
    await asyncio.wait_for(entered.wait(), 30)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


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

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await once(Request(scope, receive))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Any) -> None:
        raise AssertionError("nothing is to be answered")

    async def main() -> None:
        task = asyncio.create_task(IdempotencyMiddleware(app, once)(dict(SCOPE), receive, send))
        await asyncio.to_thread(entered.wait, 30)
        for _ in range(2):
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.2)
            assert not done
        free.set()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
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
