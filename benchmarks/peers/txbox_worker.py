"""txbox: workers over memory and over Postgres."""

import asyncio
import json
from typing import Any

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from benchmarks.consumer.deliveries import PreparedSource
from benchmarks.coroutines.benchmark import add_awaited
from benchmarks.peers.feed import SCHEMA, Feed, wait_for_the_end
from benchmarks.shared.database import AMOUNT, SUBSCRIBER
from benchmarks.shared.effects import EFFECT, add_to, add_to_all
from txbox import AsyncInbox, Inbox, Message
from txbox.messages.destinations import INBOX
from txbox.outbox.lanes import LANES_PER_DESTINATION, lanes_of
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.delivery import Delivery
from txbox_workers.postgres import PostgresWorker
from txbox_workers.worker import Worker


def handle(session: Session, message: Message) -> None:
    """Apply one message."""
    add_to(session, int(message.body))


def handle_by_cursor(cursor: psycopg.Cursor[Any], message: Message) -> None:
    """Apply one message at the driver's level."""
    cursor.execute(ADD, (AMOUNT, int(message.body)))


def account_of(message: Message) -> int:
    """Name the row that a message locks."""
    return int(message.body)


def handle_all(session: Session, messages: list[Message]) -> None:
    """Apply a batch."""
    add_to_all(session, (int(message.body) for message in messages))


def handle_all_by_cursor(cursor: psycopg.Cursor[Any], messages: list[Message]) -> None:
    """Apply a batch at the driver's level: psycopg sends all of it before it waits for an answer."""
    cursor.executemany(ADD, [(AMOUNT, account) for account in sorted(int(message.body) for message in messages)])


OPTIONS: dict[str, dict[str, Any]] = {
    "effect": {"effect": EFFECT, "batch_size": 100},
    "batch": {"batch_handler": handle_all, "batch_size": 100},
    "each": {"handler": handle},
    "each locks": {"handler": handle, "locks": account_of},
    "cursor tens": {"batch_handler": handle_all_by_cursor},
    "cursors": {"handler": handle_by_cursor, "locks": account_of},
    "message": {"handler": handle, "transactions": "message"},
    "cursor": {"handler": handle_by_cursor, "transactions": "message"},
}
ADD = f"UPDATE {SCHEMA}.account SET balance = balance + %s WHERE account_id = %s"


def run_worker(feed: Feed, url: str) -> None:
    """Work with threads, over memory or, where the variant begins with "postgres", over the outbox."""
    form = feed.variant.removeprefix("postgres ")
    road = form != feed.variant
    options = dict(OPTIONS[form])
    engine = create_engine(url, pool_size=feed.connections, max_overflow=4)
    options |= {"inbox": Inbox(SUBSCRIBER, schema=SCHEMA), "engine": engine, "threads": feed.connections}
    if road:
        _fill_outbox(engine, as_json=form == "effect")
        worker: Worker = PostgresWorker(**options)
    else:
        worker = Worker(_source(feed, options.pop("batch_size", 10), as_json=form == "effect"), **options)
    settings = f"{feed.connections} threads, batches of {100 if form in ('effect', 'batch') else 10}"
    feed.begin("txbox", f"{settings}, {'the outbox as queue' if road else 'messages in memory'}")
    worker.start()
    feed.wait_for(worker)


async def run_async_worker(feed: Feed, url: str) -> None:
    """Work with coroutines."""
    engine = create_async_engine(url, pool_size=feed.connections, max_overflow=4)
    inbox = AsyncInbox(SUBSCRIBER, schema=SCHEMA)
    source = _source(feed, 10, as_json=False)
    worker = AsyncWorker(
        source, inbox=inbox, engine=engine, handler=add_awaited, concurrency=feed.connections, prefetch=1_000
    )
    feed.begin("txbox", f"concurrency={feed.connections}, batches of ten, messages in memory")
    async with worker:
        await asyncio.to_thread(feed.wait_for, worker)


def _source(feed: Feed, batch: int, *, as_json: bool) -> PreparedSource:
    made = [
        Delivery(Message(message_id, _body(account, as_json=as_json)), receipt=str(number))
        for number, (message_id, account) in enumerate(feed.deliveries)
    ]
    return PreparedSource(made, batch)


def _body(account: int, *, as_json: bool) -> bytes:
    return json.dumps({"account": account}).encode() if as_json else str(account).encode()


def _fill_outbox(engine: Any, *, as_json: bool) -> None:
    body = "json_build_object('account', account)::text" if as_json else "account::text"
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"INSERT INTO {SCHEMA}.outbox_message (lane, message_id, destination, headers, body) "
            f"SELECT {lanes_of(f'{INBOX}{SUBSCRIBER}')[0]} + number %% {LANES_PER_DESTINATION}, message_id, "
            f"'{INBOX}{SUBSCRIBER}', '{{}}', convert_to({body}, 'UTF8') FROM {SCHEMA}.feed ORDER BY number"
        )


def main() -> None:
    """Run the variant."""
    feed = Feed()
    url = feed.url.replace("postgresql://", "postgresql+psycopg://")
    if feed.variant == "async":
        asyncio.run(run_async_worker(feed, url))
    else:
        run_worker(feed, url)
    wait_for_the_end()


if __name__ == "__main__":
    main()
