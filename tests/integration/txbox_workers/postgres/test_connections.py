"""Workers over the outbox leave no session behind."""

import asyncio

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from support.txbox.outbox import publish
from support.waiting import wait_until
from txbox import AsyncInbox, Message, Outgoing
from txbox_workers.postgres import AsyncPostgresWorker

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
