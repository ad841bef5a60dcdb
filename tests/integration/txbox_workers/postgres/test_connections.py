"""The sessions of workers over the outbox: none is left behind, and none holds up what forgets."""

import asyncio
import threading
from contextlib import suppress

import pytest
from sqlalchemy import Engine, NullPool, create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from support.txbox.outbox import publish
from support.waiting import wait_until
from support.workers.memory_worker import at_work
from txbox import AsyncInbox, BrokerError, Inbox, Message, Outgoing
from txbox.maintenance.rotation import Generations
from txbox_workers.postgres import AsyncPostgresWorker, PostgresSource, PostgresWorker, source

NAME = "worker-over-the-outbox"


def sessions(engine: Engine) -> list[str]:
    """The last statement of each of its sessions."""
    with engine.connect() as connection:
        found = "SELECT query FROM pg_stat_activity WHERE application_name = %s"
        return list(connection.exec_driver_sql(found, (NAME,)).scalars())


def test_a_worker_of_coroutines_that_has_stopped_has_no_sessions(engine: Engine, schema_url: str) -> None:
    handled: list[str] = []

    async def handle(_: AsyncSession, message: Message) -> None:
        handled.append(message.id)

    async def work() -> None:
        own = create_async_engine(schema_url, connect_args={"application_name": NAME})
        async with AsyncPostgresWorker(inbox=AsyncInbox("billing"), engine=own, handler=handle):
            await asyncio.to_thread(wait_until, lambda: handled, "the message is processed")
            assert "LISTEN txbox_outbox" in sessions(engine)
        await own.dispose()
        await asyncio.to_thread(wait_until, lambda: not sessions(engine), "no session is left", timeout=5)

    publish(engine, Outgoing("inbox:billing", "1"))
    asyncio.run(work())


def test_what_connects_only_after_the_source_was_closed_is_closed(
    engine: Engine, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(source, "ENDING_SECONDS", 0.1)
    own = create_engine(schema_url, poolclass=NullPool, connect_args={"application_name": NAME})
    own.connect().close()  # others wait for an engine's first connection
    connecting, is_closed = threading.Semaphore(0), threading.Event()

    @event.listens_for(own, "connect")
    def wait(*_: object) -> None:
        connecting.release()
        assert is_closed.wait(20)

    messages = PostgresSource(own, "billing")

    def receive() -> None:
        with suppress(BrokerError):
            messages.receive()

    receiving = threading.Thread(target=receive)
    receiving.start()
    assert connecting.acquire(timeout=20), "of what reads"
    assert connecting.acquire(timeout=20), "of the claims"
    messages.close()
    is_closed.set()
    receiving.join(20)
    wait_until(lambda: not sessions(engine), "no session is left", timeout=5)
    own.dispose()


def test_the_open_transaction_of_a_workers_claims_holds_up_no_forgetting(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now())")
    handled: list[str] = []
    worker = PostgresWorker(inbox=Inbox("billing"), engine=engine, handler=lambda _, one: handled.append(one.id))
    publish(engine, Outgoing("inbox:billing", "1"))
    with at_work(worker):
        wait_until(lambda: handled, "it has claims")
        assert wait_until(lambda: Generations(engine).settle(seconds=0.5), timeout=10).keys() == {"billing"}
