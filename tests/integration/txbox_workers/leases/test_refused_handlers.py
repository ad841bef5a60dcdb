"""Handlers that return before their work is done."""

from typing import Any

import pytest
from sqlalchemy import Engine

from support.memory_worker import delivery, process
from txbox import DeadLetters, Inbox, Message, Outcome
from txbox.leases import PostgresLedger
from txbox_workers.memory import MemorySource
from txbox_workers.worker import Worker

pytestmark = pytest.mark.usefixtures("short_pauses")


async def coroutine_function(message: Message) -> None: ...


@pytest.mark.parametrize("kept_by", ["ledger", "inbox"])
def test_a_handler_that_returns_something_to_await_has_failed(
    engine: Engine, ledger: PostgresLedger, kept_by: str
) -> None:
    alone: dict[str, Any] = {"ledger": ledger, "dead_letters": DeadLetters(engine)}
    options = alone if kept_by == "ledger" else {"inbox": Inbox("mailing"), "engine": engine}
    worker = Worker(
        MemorySource(),
        handler=lambda *given: coroutine_function(given[-1]),
        max_attempts=1,
        **options,
    )
    assert process(worker, delivery("x")) == [("x-1", Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert "so its work is not done" in letter.error
