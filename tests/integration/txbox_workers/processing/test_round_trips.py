"""What a message costs, counted at the server's door: round trips, and statements."""

import asyncio
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from support.postgres.tcp_proxy import CountingProxy
from support.workers.business import ADD, Business
from support.workers.memory_worker import make, process
from txbox import AsyncInbox, Message, Outcome, SqlEffect
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource

ON_ONE = "UPDATE account SET balance = balance + 1 WHERE account_id = 1"
WARM = 8
"""So often something runs before it is counted: connections are made, and statements prepared."""


def deliver(number: int, count: int) -> list[Delivery]:
    return [Delivery(Message(f"{number}-{one}", b"{}"), receipt=f"{number}-{one}") for one in range(count)]


def by_session(session: Session, _: Message) -> None:
    session.execute(ADD, {"account": 1, "amount": 1})


def by_cursor(cursor: psycopg.Cursor[Any], _: Message) -> None:
    cursor.execute(ON_ONE)


async def awaited(session: AsyncSession, _: Message) -> None:
    await session.execute(ADD, {"account": 1, "amount": 1})


async def by_async_cursor(cursor: psycopg.AsyncCursor[Any], _: Message) -> None:
    await cursor.execute(ON_ONE)


def all_by_session(session: Session, messages: list[Message]) -> None:
    session.execute(ADD, {"account": 1, "amount": len(messages)})


IN_SQL = SqlEffect.of(
    "UPDATE account SET balance = balance + (SELECT count(*) FROM fresh_event) WHERE account_id = 1",
    fields="x int default 0",
)
SINGLE: dict[str, Any] = {"transactions": "message"}
BEGUN, ENDED = 4, 2
"""BEGIN, the guard, the transaction's limit and the record; the guard's end and COMMIT."""
UNGUARDED = -2
"""An effect in SQL needs no guard."""


@pytest.mark.parametrize(
    ("how", "messages", "trips", "statements"),
    [
        ({"handler": by_session, **SINGLE}, 1, 3, BEGUN + 1 + ENDED),
        ({"handler": by_cursor, **SINGLE}, 1, 3, BEGUN + 1 + ENDED),
        ({"handler": by_session}, 10, 12, BEGUN + 10 + ENDED),
        ({"handler": by_cursor}, 10, 12, BEGUN + 10 + ENDED),
        ({"handler": by_cursor, "locks": lambda message: message.id}, 10, 12, BEGUN + 10 + ENDED),
        ({"batch_handler": all_by_session}, 10, 3, BEGUN + 1 + ENDED),
        ({"effect": IN_SQL, **SINGLE}, 1, 2, BEGUN + 1 + ENDED + UNGUARDED),
        ({"effect": IN_SQL}, 10, 2, BEGUN + 1 + ENDED + UNGUARDED),
    ],
    ids=["message", "cursor", "batch", "cursors", "in order", "batch handler", "SQL single", "SQL"],
)
def test_what_messages_cost(
    business: Business,
    proxied: Engine,
    proxy: CountingProxy,
    how: dict[str, Any],
    messages: int,
    trips: int,
    statements: int,
) -> None:
    worker = make(MemorySource(), proxied, **how)
    for number in range(WARM):
        deliveries = deliver(number, messages)
        packets, sent = proxy.packets, proxy.statements
        settled = process(worker, *deliveries)
        assert [outcome for _, outcome in settled] == [Outcome.PROCESSED] * messages
    assert (proxy.packets - packets, proxy.statements - sent) == (trips, statements)
    assert business.balance() == WARM * messages


@pytest.mark.parametrize("messages", [1, 10])
@pytest.mark.parametrize("handler", [awaited, by_async_cursor], ids=["session", "cursor"])
def test_coroutines_cost_as_much(
    business: Business, schema_url: str, proxy: CountingProxy, handler: Any, messages: int
) -> None:
    source = MemorySource()
    options: dict[str, Any] = {"concurrency": 1, "batch_size": messages, "gather_seconds": 10 if messages > 1 else 0}

    async def main() -> tuple[int, int]:
        engine = create_async_engine(make_url(schema_url).set(host="127.0.0.1", port=proxy.port), pool_size=1)
        async with AsyncWorker(source, inbox=AsyncInbox("billing"), engine=engine, handler=handler, **options):
            for number in range(WARM):
                packets, sent = proxy.packets, proxy.statements
                for one in deliver(number, messages):
                    source.send(one.message)
                assert await asyncio.to_thread(source.wait_until_empty, 20)
            spent = proxy.packets - packets, proxy.statements - sent
        await engine.dispose()
        return spent

    assert asyncio.run(main()) == (messages + 2, BEGUN + messages + ENDED)
    assert business.balance() == WARM * messages


@pytest.mark.parametrize("how", [{"handler": by_session}, {"effect": IN_SQL}], ids=["handler", "SQL"])
def test_duplicates_cost_one_question(
    business: Business, proxied: Engine, proxy: CountingProxy, how: dict[str, Any]
) -> None:
    """Whether they are parked; an effect asks it with COMMIT."""
    worker = make(MemorySource(), proxied, **how)
    for _ in range(WARM):
        packets, sent = proxy.packets, proxy.statements
        process(worker, *deliver(0, 10))
    trips, statements = (3, BEGUN + 1 + ENDED) if "handler" in how else (2, BEGUN + 1 + ENDED + UNGUARDED)
    assert (proxy.packets - packets, proxy.statements - sent) == (trips, statements)
    assert business.balance() == 10
