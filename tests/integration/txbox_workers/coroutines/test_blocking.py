"""What blocks, blocks no event loop: dead letters and reports whose engine is one for functions."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine

from support.waiting import wait_until
from support.workers.business import Business
from support.workers.memory_worker import AT_ONCE, messages
from txbox import DeadLetters, Message
from txbox.leases import PostgresLedger
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.memory_source import MemorySource

pytestmark = pytest.mark.anyio

WAITS_FOR_LOCK = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"


@pytest.mark.parametrize("table", ["dead_letter", "worker_report"])
async def test_with_a_ledger_alone_the_loop_goes_on_while_dead_letters_and_reports_wait(
    engine: Engine, business: Business, table: str
) -> None:
    async def fail(message: Message) -> None:
        raise ValueError("no")

    source = MemorySource()
    ledger, letters = PostgresLedger("mailing", engine=engine), DeadLetters(engine)
    worker = AsyncWorker(
        source, ledger=ledger, dead_letters=letters, handler=fail, max_attempts=1, backoff=AT_ONCE, concurrency=1
    )
    loop = asyncio.get_running_loop()

    def hold_up() -> None:
        """Lock the table, and while the worker waits for it, ask the loop for an answer."""
        with engine.connect() as holder, engine.connect() as observer:
            holder.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            source.send(messages("a")[0])
            observed = observer.execution_options(isolation_level="AUTOCOMMIT")

            def waits() -> Any:
                return observed.exec_driver_sql(WAITS_FOR_LOCK, (table,)).scalar_one()

            wait_until(waits, f"the worker waits for {table}", timeout=30)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
            assert waits(), "the loop answers before the wait has ended"

    async with worker:
        await asyncio.to_thread(hold_up)
        assert await asyncio.to_thread(source.wait_until_empty, 30)
    assert business.letters() == {"a": "failed"}
