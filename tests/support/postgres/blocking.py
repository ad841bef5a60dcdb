"""Who waits for whom inside Postgres: so that tests wait until a transaction really waits, and never sleep."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine

from support.waiting import wait_until

Call = Callable[[Connection], Any]


def backend_pid(connection: Connection) -> int:
    """Return the server process behind a connection. In a transaction, this also takes its snapshot."""
    return int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())


def wait_until_blocked(engine: Engine, pid: int, *, by: int | None = None) -> None:
    """Return as soon as that server process waits for a lock which another one holds: any other, or this one."""
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as observer:

        def blocked() -> bool:
            holders = observer.exec_driver_sql("SELECT pg_blocking_pids(%s)", (pid,)).scalar_one()
            return bool(holders) if by is None else holders == [by]

        wait_until(blocked, f"server process {pid} waiting for a lock of {by or 'another'}", every=0.005)


@contextmanager
def second_waits_for_first(
    engine: Engine, pool: ThreadPoolExecutor, first_call: Call, second_call: Call, isolation: str = "READ COMMITTED"
) -> Iterator[tuple[Connection, Connection, "Future[Any]"]]:
    """Two transactions with snapshots of their own; the first has made its call, and the second waits for its end.

    Yields:
        Both connections, and what comes of the second call.
    """
    isolated = engine.execution_options(isolation_level=isolation)
    with isolated.connect() as first, isolated.connect() as second:
        pid = backend_pid(second)  # the statement also takes the snapshot of a transaction that has but one
        assert first_call(first) is True
        waiting = pool.submit(second_call, second)
        try:
            wait_until_blocked(engine, pid)
            yield first, second, waiting
        finally:
            first.invalidate()  # whatever went wrong: nobody waits for the first one any more
