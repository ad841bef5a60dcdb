"""Workers that take their messages from the outbox, beside the same workers over memory, and beside pgbench.

One business update, an amount onto one of 10,000 accounts, is measured with each of them.
"""

import asyncio
import threading
from functools import partial
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.consumer.clients import handle
from benchmarks.consumer.deliveries import PreparedSource, make_deliveries
from benchmarks.coroutines.benchmark import add_awaited
from benchmarks.shared.database import ACCOUNTS, AMOUNT, SCHEMA, SUBSCRIBER
from benchmarks.shared.effects import EFFECT
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import START_SECONDS, WARM_UP_SECONDS, Rate, in_processes, ready, window
from txbox import AsyncInbox, Inbox
from txbox.instrumentation import Committed, Event
from txbox.messages.destinations import INBOX
from txbox.outbox.lanes import LANES_PER_DESTINATION, lanes_of
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.postgres import AsyncPostgresWorker, PostgresWorker
from txbox_workers.worker import Worker

CONNECTIONS = 16
BATCH = 100
OF_MEMORY, OF_PGBENCH = 0.8, 0.7
"""Targets, as ratios."""

HANDLER_PER_SECOND, SETS_PER_SECOND = 8_000, 200_000
"""Messages that wait: more than is reached here; a faster machine ends its measurement when they are used up."""

PREFETCH = 1_000

MEMORY, OUTBOX = "Worker over memory", "PostgresWorker"
SETS, EFFECTS = f"pgbench, sets of {BATCH}", "PostgresWorker, SqlEffect"
ASYNC_MEMORY, ASYNC_OUTBOX = "AsyncWorker over memory", "AsyncPostgresWorker"

DESCRIPTION = f"""\
Measure the same business update by workers that take their messages from the outbox
of their own database, and settle each in the transaction that processes it:

  {OUTBOX:<26}{CONNECTIONS} threads, a transaction for each message, beside
                            the same worker over memory
  {EFFECTS:<26}{CONNECTIONS} threads, sets of {BATCH}, beside pgbench: one statement
                            claims, inserts, updates and deletes
  {ASYNC_OUTBOX:<26}{CONNECTIONS} tasks, a transaction for each message, beside
                            the same worker over memory

What waits is there before the clock starts. After each measurement the balances and
the inbox must add up to the messages that are gone; otherwise nothing is reported.
"""

LANES = lanes_of(f"{INBOX}{SUBSCRIBER}")

EACH = LANES_PER_DESTINATION // CONNECTIONS
# Each client has lanes of its own: none waits for another one, or skips what another one holds.
SETS_SCRIPT = rf"""
\set lane :low + :client_id * {EACH} + random(0, {EACH - 1})
WITH claimed AS MATERIALIZED (
  DELETE FROM {SCHEMA}.outbox_message WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM {SCHEMA}.outbox_message WHERE lane = :lane AND due_at IS NULL
    ORDER BY position LIMIT {BATCH} FOR UPDATE SKIP LOCKED
  )) RETURNING message_id, (convert_from(body, 'UTF8')::jsonb ->> 'account')::int AS account_id
), fresh AS (
  INSERT INTO {SCHEMA}.processed_message (subscriber_id, message_id)
  SELECT '{SUBSCRIBER}', message_id FROM claimed ORDER BY message_id
  ON CONFLICT DO NOTHING RETURNING message_id
), change AS MATERIALIZED (
  SELECT account_id, count(*) * {AMOUNT} AS amount FROM claimed JOIN fresh USING (message_id) GROUP BY account_id
), locked AS MATERIALIZED (
  SELECT account.account_id, change.amount FROM {SCHEMA}.account JOIN change USING (account_id)
  ORDER BY account.account_id FOR NO KEY UPDATE OF account
)
UPDATE {SCHEMA}.account SET balance = balance + locked.amount FROM locked
WHERE account.account_id = locked.account_id;
"""
"""The limit of every worker that takes sets from a table."""


class Counter:
    """Counts the messages of transactions that have committed, and measures their rate once the first has."""

    def __init__(self, total: int) -> None:
        """``used_up`` is set when all of ``total`` are done."""
        self._total, self._lock = total, threading.Lock()
        self.done, self.begun, self.used_up = 0, threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        """Count an event, if it is one of these."""
        if type(event) is Committed:
            with self._lock:
                self.done += event.first
                self.begun.set()
                if self.done >= self._total:
                    self.used_up.set()

    def rate(self, seconds: float) -> Rate:
        """Return the rate of some seconds, of a worker that has started."""
        if not self.begun.wait(START_SECONDS):
            raise RuntimeError("nothing was processed")
        return window(lambda: self.done, seconds, self.used_up)


def by_threads(_number: int, url: str, seconds: float, count: int, source: str) -> Rate:
    """Consume with threads from memory, from the outbox, or from there with an effect; return the rate."""
    counter = Counter(count)
    engine = create_engine(url, pool_size=CONNECTIONS, max_overflow=4)
    options: dict[str, Any] = {"inbox": Inbox(SUBSCRIBER, schema=SCHEMA), "engine": engine, "threads": CONNECTIONS}
    options |= {"hooks": [counter]}
    options |= {"handler": handle, "transactions": "message"} if source != EFFECTS else {"effect": EFFECT}
    if source == MEMORY:
        worker = Worker(PreparedSource(make_deliveries(count, distance=count), 10), prefetch=PREFETCH, **options)
    else:
        worker = PostgresWorker(**options, **({"batch_size": BATCH} if source == EFFECTS else {}))
    ready()
    worker.start()
    rate = counter.rate(seconds)
    if not worker.stop():
        raise RuntimeError("the worker did not drain")
    engine.dispose()
    return rate._replace(done=counter.done)


def by_coroutines(_number: int, url: str, seconds: float, count: int, source: str) -> Rate:
    """Consume with coroutines from memory or from the outbox; return the rate."""
    counter = Counter(count)
    deliveries = make_deliveries(count, distance=count) if source == ASYNC_MEMORY else []

    async def consume() -> Rate:
        engine = create_async_engine(url, pool_size=CONNECTIONS, max_overflow=4)
        options: dict[str, Any] = {"inbox": AsyncInbox(SUBSCRIBER, schema=SCHEMA), "engine": engine}
        options |= {"concurrency": CONNECTIONS, "prefetch": PREFETCH, "hooks": [counter]}
        options |= {"handler": add_awaited, "transactions": "message"}
        of_memory = source == ASYNC_MEMORY
        worker: Any = AsyncWorker(PreparedSource(deliveries, 10), **options) if of_memory else None
        async with worker or AsyncPostgresWorker(**options):
            rate = await asyncio.to_thread(counter.rate, seconds)
        await engine.dispose()
        return rate

    ready()
    return asyncio.run(consume())._replace(done=counter.done)


def tables(run: Run) -> list[Table]:
    """Each worker over the outbox beside its limit."""
    return [
        Table(
            f"{CONNECTIONS} threads",
            [
                Row(MEMORY, partial(_consumed, run, by_threads, MEMORY)),
                Row(OUTBOX, partial(_consumed, run, by_threads, OUTBOX), MEMORY, OF_MEMORY, ours=True),
            ],
        ),
        Table(
            f"sets of {BATCH}",
            [
                Row(SETS, partial(_by_pgbench, run)),
                Row(EFFECTS, partial(_consumed, run, by_threads, EFFECTS), SETS, OF_PGBENCH, ours=True),
            ],
        ),
        Table(
            f"{CONNECTIONS} tasks",
            [
                Row(ASYNC_MEMORY, partial(_consumed, run, by_coroutines, ASYNC_MEMORY)),
                Row(
                    ASYNC_OUTBOX,
                    partial(_consumed, run, by_coroutines, ASYNC_OUTBOX),
                    ASYNC_MEMORY,
                    OF_MEMORY,
                    ours=True,
                ),
            ],
        ),
    ]


def _fill(run: Run, per_second: int, *, as_json: bool) -> int:
    """Start over with messages that wait; return how many."""
    count = round((run.options["seconds"] + WARM_UP_SECONDS) * per_second)
    database, account = run.database, f"1 + number * 7919::bigint % {ACCOUNTS}"
    body = f"json_build_object('account', {account})::text" if as_json else f"({account})::text"
    database.reset(others=("outbox_message", "inbox_lane"))
    database.execute(
        f"INSERT INTO {SCHEMA}.outbox_message (lane, message_id, destination, headers, body) "
        f"SELECT {LANES[0]} + number % {LANES_PER_DESTINATION}, md5(number::text), '{INBOX}{SUBSCRIBER}', '{{}}', "
        f"convert_to({body}, 'UTF8') FROM generate_series(1, {count}) AS number"
    )
    database.execute(f"VACUUM ANALYZE {SCHEMA}.outbox_message")
    database.checkpoint()
    return count


def _check(run: Run, what: str, applied: int) -> None:
    if run.database.recorded() != applied:
        raise WrongResult(f"{what}: {applied} messages left {run.database.recorded()} records")
    run.database.check(applied, what)


def _gone(run: Run, filled: int) -> int:
    return filled - run.database.number(f"SELECT count(*) FROM {SCHEMA}.outbox_message")


def _consumed(run: Run, work: Any, source: str) -> Sample:
    sets = source == EFFECTS
    count = _fill(run, SETS_PER_SECOND if sets else HANDLER_PER_SECOND, as_json=sets)
    (rate,) = in_processes(1, work, run.url, run.options["seconds"], count, source)
    _check(run, source, rate.done)
    if source not in (MEMORY, ASYNC_MEMORY) and _gone(run, count) != rate.done:
        raise WrongResult(f"{source}: {rate.done} messages were processed, {_gone(run, count)} are gone")
    return Sample(rate.per_second, {"cpu_us": rate.cpu_us})


def _by_pgbench(run: Run) -> Sample:
    count = _fill(run, SETS_PER_SECOND, as_json=True)
    result = run.pgbench(SETS_SCRIPT, CONNECTIONS, {"low": LANES[0]})
    applied = _gone(run, count)
    _check(run, SETS, applied)
    if applied < 0.9 * BATCH * result.transactions:
        raise WrongResult(f"{SETS}: {result.transactions} transactions took {applied} messages: too few waited")
    return Sample(applied * result.tps / result.transactions)


BENCHMARK = Benchmark(
    name="outbox_worker",
    title="Messages that workers take from the outbox and process a second",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 3, 7),
        "seconds": Option("of each measurement", 3.0, 10.0),
    },
    tables=tables,
)
