"""A worker in a process of its own, which tests may kill. Run it with its settings as JSON in the one argument.

Every run of the handler leaves a row in ``run``, committed at once over a second connection: what a process did is
known even when it did not live to tell.
"""

import asyncio
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from support.processes import start_python
from support.workers.business import ADD, APPLY, Business, apply
from txbox import AsyncInbox, Inbox, Message, Outbox, SqlEffect
from txbox import instrumentation as events
from txbox.backoff import Backoff
from txbox.instrumentation import Hook
from txbox.messages.destinations import INBOX
from txbox.postgres import round_trip
from txbox.testing import kill_at
from txbox_aws.sqs import AsyncSqsWorker, SqsWorker
from txbox_workers.postgres import AsyncPostgresWorker, PostgresWorker

NOTE = text("INSERT INTO run (message_id, pid) VALUES (:id, :pid)")
COUNT = text("SELECT count(*) FROM run WHERE message_id = :id")

EFFECT = """
INSERT INTO effect (message_id, body) SELECT message_id, kind FROM fresh_event;
UPDATE account SET balance = balance + (SELECT count(*) FROM fresh_event) WHERE account_id = 1"""


class SlowOutbox(Outbox):
    """Takes a while between publishing and commit, so that a kill can land there."""

    def publish_many(self, connection_or_session: Any, messages: Any) -> list[str]:
        ids = super().publish_many(connection_or_session, messages)
        time.sleep(0.005)
        return ids


def prepare(engine: Any) -> Business:
    """Make the tables that the process writes to."""
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE run (message_id text NOT NULL, pid int NOT NULL, at timestamptz DEFAULT clock_timestamp())"
        )
    return Business(engine)


def start(url: str, queue: str, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a worker process.

    Args:
        url: the database, whose search path holds the tables.
        queue: the queue's URL; or the destination ``inbox:billing``, which a PostgresWorker consumes.
        settings: ``deadly`` ids kill their process in the handler, ``deadly_once`` ids in their first run only;
            ``kill_at`` names the event that kills; ``kill_before`` is the number of the round trip of ours, from 1,
            before which it is killed; ``pause`` is how long the handler takes, in seconds; ``log`` is a
            file for what the worker logs; ``in_sql``: the effect is one in SQL, which publishes the ids, and what is
            received counts as run; ``coroutines``: it is an AsyncSqsWorker, with a handler to match; the rest goes to
            the worker.
    """
    return start_python("-m", "support.workers.worker_process", json.dumps({"url": url, "queue": queue, **settings}))


async def run_with_coroutines(
    url: str,
    queue: str,
    deadly: Collection[str],
    deadly_once: Collection[str],
    pause: float,
    hooks: Sequence[Hook],
    settings: dict[str, Any],
) -> bool:
    """Work until SIGTERM, with the same handler as a coroutine; return whether it has finished what was begun."""
    engine = create_async_engine(url)
    notes = create_async_engine(url, isolation_level="AUTOCOMMIT", pool_size=20)

    async def handle(session: AsyncSession, message: Message) -> None:
        async with notes.connect() as connection:
            await connection.execute(NOTE, {"id": message.id, "pid": os.getpid()})
            runs = (await connection.execute(COUNT, {"id": message.id})).scalar_one()
        await session.execute(APPLY, {"id": message.id, "body": message.text})
        await session.execute(ADD, {"account": 1, "amount": 1})
        if message.id in deadly or (message.id in deadly_once and runs == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(pause)

    settings["concurrency"] = settings.pop("threads", 1)
    worker = (AsyncPostgresWorker if queue.startswith(INBOX) else partial(AsyncSqsWorker, queue))(
        inbox=AsyncInbox("billing", wait_seconds=0.2),
        engine=engine,
        handler=handle,
        backoff=Backoff(0, 0),
        hooks=hooks,
        **settings,
    )
    return await worker.run()


def kill_before(number: int) -> None:
    """Kill this process before one of the round trips in which statements of ours go out together."""
    numbers, run_steps = itertools.count(1), round_trip.run_steps

    def killing(*args: Any) -> Any:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_steps(*args)

    for module in list(sys.modules.values()):
        if module.__name__.startswith("txbox") and getattr(module, "run_steps", None) is run_steps:
            vars(module)["run_steps"] = killing


def main() -> None:
    """Work until SIGTERM."""
    settings = json.loads(sys.argv[1])
    url, queue = settings.pop("url"), settings.pop("queue")
    deadly, deadly_once = set(settings.pop("deadly", ())), set(settings.pop("deadly_once", ()))
    pause = settings.pop("pause", 0.0)
    moment = settings.pop("kill_at", None)
    if log := settings.pop("log", None):
        logging.basicConfig(filename=log, level=logging.INFO)
    hooks = [kill_at(getattr(events, moment))] if moment else []
    if round_trips := settings.pop("kill_before", 0):
        kill_before(round_trips)
    notes = create_engine(url, isolation_level="AUTOCOMMIT", pool_size=1)

    def handle(session: Session, message: Message) -> None:
        with notes.connect() as connection:
            connection.execute(NOTE, {"id": message.id, "pid": os.getpid()})
            runs = connection.execute(COUNT, {"id": message.id}).scalar_one()
        apply(session, message)
        session.execute(ADD, {"account": 1, "amount": 1})
        if message.id in deadly or (message.id in deadly_once and runs == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)  # not a wait: work that takes a while, so that a kill or a signal can land in it

    def note_received(event: events.Event) -> None:
        if isinstance(event, events.Received):
            with notes.connect() as connection:
                for message_id in event.message_ids:
                    connection.execute(NOTE, {"id": message_id, "pid": os.getpid()})

    how: dict[str, Any] = {"handler": handle}
    if settings.pop("in_sql", False):
        script = f"{EFFECT}; SELECT pg_sleep({pause}); SELECT message_id AS body FROM fresh_event"
        publishing = {"outbox": SlowOutbox(), "destination": "own:somewhere"}
        how = {"effect": SqlEffect.of(script, fields="kind text default 'x'", **publishing)}
        hooks.append(note_received)
    settings = {"visibility_seconds": 1, **settings}
    if not queue.startswith(INBOX):
        settings.setdefault("wait_seconds", 1)
    if settings.pop("coroutines", False):
        done = asyncio.run(run_with_coroutines(url, queue, deadly, deadly_once, pause, hooks, settings))
        sys.exit(0 if done else 3)
    worker = (PostgresWorker if queue.startswith(INBOX) else partial(SqsWorker, queue))(
        inbox=Inbox("billing", wait_seconds=0.2),
        engine=create_engine(url),
        **how,
        backoff=Backoff(0, 0),
        hooks=hooks,
        **settings,
    )
    sys.exit(0 if worker.run() else 3)


if __name__ == "__main__":
    main()
