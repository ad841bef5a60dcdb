"""The state of the leases in a Postgres: how many are in flight, have run out, or have failed."""

from dataclasses import dataclass

from sqlalchemy import Connection, Engine

from txbox.leases.postgres_ledger import LeaseStatements
from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.server import estimate_rows
from txbox.postgres.transactions import check_table

__all__ = ["LeaseStatus", "LedgerStatus", "read_lease_status"]


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """The state of one subscriber's leases.

    Attributes:
        subscriber_id: the subscriber.
        completed: messages that are done.
        in_flight: messages that an owner is working on.
        run_out: messages whose owner has not renewed its lease and that no other owner has taken over: most likely it
            died, and the broker will deliver them again.
        failed: messages whose last attempt failed, and that are free.
        longest_seconds: how long ago the oldest attempt in flight or run out began; None if there is none.
    """

    subscriber_id: str
    completed: int = 0
    in_flight: int = 0
    run_out: int = 0
    failed: int = 0
    longest_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """The state of the leases of all subscribers.

    Attributes:
        rows: of the table.
        exact: whether they were counted; otherwise ``rows`` is the planner's estimate and ``ledgers`` is empty.
        ledgers: one for each subscriber that has leases, by name.
    """

    rows: int = 0
    exact: bool = True
    ledgers: tuple[LedgerStatus, ...] = ()


def read_lease_status(
    engine: Engine, *, schema: str | None = None, prefix: str = "", exact_up_to_rows: float
) -> LeaseStatus:
    """Return the state of leases; raise ``SchemaMissing`` if the table does not exist.

    Args:
        engine: the database.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.
        exact_up_to_rows: largest table, by Postgres's statistics, that is counted; counting reads every row.
    """
    with engine.connect() as connection, own_cursors(connection):
        return read_leases(connection, schema=schema, prefix=prefix, exact_up_to_rows=exact_up_to_rows)


def read_leases(
    connection: Connection, *, schema: str | None = None, prefix: str = "", exact_up_to_rows: float
) -> LeaseStatus:
    """Return the state of leases: ``read_lease_status`` on the caller's connection."""
    sql = LeaseStatements.load(schema, prefix)
    check_table(connection, sql.tables.message_lease)
    rows = estimate_rows(connection, sql.name_of("message_lease"))
    if rows > exact_up_to_rows:
        return LeaseStatus(rows, exact=False)
    ledgers = tuple(LedgerStatus(*row) for row in connection.exec_driver_sql(sql.counts))
    counted = sum(one.completed + one.in_flight + one.run_out + one.failed for one in ledgers)
    return LeaseStatus(counted, ledgers=ledgers)
