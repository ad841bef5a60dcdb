"""Who waits for whom inside Postgres: so that tests wait until a transaction really waits, and never sleep."""

from sqlalchemy import Connection, Engine

from support.waiting import wait_until

__all__ = ["backend_pid", "wait_until_blocked"]


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
