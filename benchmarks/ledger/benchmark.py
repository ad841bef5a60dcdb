"""The ledgers' benchmark: what a lease costs, beside the least that could be written down by hand.

Every message is acquired and completed, once, in two round trips that commit by themselves.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from sqlalchemy import create_engine

from benchmarks.shared.database import SCHEMA, SUBSCRIBER
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import in_threads
from txbox import idempotent
from txbox.leases import LeaseState, Ledger, PostgresLedger

LEAST_OF_LIMIT = 0.35
"""Plain SQLAlchemy reaches 0.26 of pgbench with one connection and one transaction for each message."""

PLAIN = f"{SCHEMA}.plain_lease"
PLAIN_ROWS = 400_000

DESCRIPTION = """\
Acquire and complete leases by

  conditional UPDATE   the limit, by pgbench: rows that are there already are taken by one
                       UPDATE and completed by another; no insert, no fence, no attempts
  PostgresLedger       acquire() and complete()
  idempotent           a decorated function that does nothing

After each measurement the completed messages are counted by SQL.
"""


def by_conditional_update(run: Run, count: int) -> Sample:
    """The limit."""
    database = run.database
    # Room on each page, so that no update has to leave it: the best that Postgres can do.
    database.execute(
        f"DROP TABLE IF EXISTS {PLAIN}; CREATE TABLE {PLAIN} "
        "(id bigint PRIMARY KEY, state text NOT NULL, until timestamptz) WITH (fillfactor=40);"
        f"INSERT INTO {PLAIN} SELECT number, 'free' FROM generate_series(1, {PLAIN_ROWS}) AS number"
    )
    database.execute(f"VACUUM ANALYZE {PLAIN}")
    database.checkpoint()
    script = (
        "\\set n :n + 1\n"
        f"UPDATE {PLAIN} SET state = 'taken', until = clock_timestamp() + interval '30 s' "
        f"WHERE id = :n * {count} + :client_id AND (state = 'free' OR state = 'taken' AND until < now());\n"
        f"UPDATE {PLAIN} SET state = 'done' WHERE id = :n * {count} + :client_id AND state = 'taken';\n"
    )
    result = run.pgbench(script, count, {"n": 0})
    done = database.number(f"SELECT count(*) FROM {PLAIN} WHERE state = 'done'")
    if done < 0.99 * result.transactions:
        raise WrongResult(f"conditional UPDATE, {count}c: {result.transactions} transactions, {done} rows done")
    return Sample(result.tps)


def by_ledger(run: Run, key: str, count: int) -> Sample:
    """``PostgresLedger``, by itself or under a decorated function: each client has a connection."""
    database = run.database
    database.execute(f"TRUNCATE {SCHEMA}.message_lease")
    database.checkpoint()

    @contextmanager
    def client(_number: int) -> Iterator[Callable[[], int]]:
        engine = create_engine(run.url, pool_size=1)
        ledger = PostgresLedger(SUBSCRIBER, engine=engine, schema=SCHEMA)
        work: Callable[[str], object] = partial(_acquire_and_complete, ledger)
        if key.startswith("idempotent"):
            work = idempotent(lambda _: None, ledger=ledger, identify=lambda message_id: message_id)
        yield lambda: (work(str(uuid.uuid4())), 1)[1]
        engine.dispose()

    rate = in_threads(count, client, run.options["seconds"])
    completed = database.number(f"SELECT count(*) FROM {SCHEMA}.message_lease WHERE completed_at IS NOT NULL")
    if completed != rate.done:
        raise WrongResult(f"{key}: {rate.done} messages left {completed} completed leases")
    return Sample(rate.per_second, {"cpu_us": rate.cpu_us})


def _acquire_and_complete(ledger: Ledger, message_id: str) -> None:
    acquisition = ledger.acquire(message_id)
    assert acquisition.state is LeaseState.ACQUIRED
    assert acquisition.lease is not None
    ledger.complete(acquisition.lease)


def tables(run: Run) -> list[Table]:
    """One table for each number of connections."""
    found = []
    for count in run.options["connections"]:
        limit = Row(f"conditional UPDATE, {count}c", partial(by_conditional_update, run, count))
        rows = [limit]
        for name, least in (("PostgresLedger", LEAST_OF_LIMIT), ("idempotent", None)):
            key = f"{name}, {count}c"
            rows.append(Row(key, partial(by_ledger, run, key, count), limit.key, least, ours=True))
        found.append(Table(f"connections: {count}", rows))
    return found


BENCHMARK = Benchmark(
    name="ledger",
    title="Leases acquired and completed a second",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 3, 5),
        "seconds": Option("of each measurement", 2.0, 5.0),
        "connections": Option("numbers of them, with commas", (1, 4, 16), (1, 4, 16)),
    },
    tables=tables,
)
