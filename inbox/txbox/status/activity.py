"""What workers and relays did in the last hours, by their own reports, for charts."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from sqlalchemy import Connection

from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table

KEPT_DAYS = 7
"""How long activity is kept. Maintainers delete older rows, and so do workers and relays that end."""

MINUTE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class ActivitySeries:
    """Counts per stretch of time, the oldest first.

    Attributes:
        name: of the subscriber or destination; empty for the whole outbox.
        figure: what is counted: an outcome, ``deadlocks`` or ``retries``; ``sent`` or ``failed``.
        begins_at: when the first stretch began, in UTC, by the database's clock.
        stretch_seconds: how long each stretch is; the last one has not ended.
        counts: one per stretch.
    """

    name: str
    figure: str
    begins_at: datetime
    stretch_seconds: int
    counts: tuple[int, ...]


class ActivityStatements(SqlFile, file="activity.sql"):
    newest_stretch: str
    activity_of_one: str
    activity_of_all: str


def read_activity(
    connection: Connection,
    kind: Literal["subscriber", "destination", "outbox"],
    *,
    name: str | None = None,
    hours: float = 3.0,
    stretches: int = 60,
    schema: str | None = None,
    prefix: str = "",
) -> tuple[ActivitySeries, ...]:
    """Return the reported activity of each name, one series per figure that occurred; raise ``SchemaMissing``.

    Args:
        connection: to read with.
        kind: what the names are of.
        name: return only this one; None: all.
        hours: how far back, at most ``KEPT_DAYS``.
        stretches: into how many stretches the hours are divided, each a whole number of minutes.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.
    """
    sql = ActivityStatements.load(schema, prefix)
    check_table(connection, sql.tables.reported_activity)
    seconds = stretch_seconds(hours, stretches)
    values = {"kind": kind, "seconds": seconds, "stretches": stretches}
    newest = connection.exec_driver_sql(sql.newest_stretch, {"seconds": seconds}).scalar_one()
    rows = (
        connection.exec_driver_sql(sql.activity_of_all, values)
        if name is None
        else connection.exec_driver_sql(sql.activity_of_one, {**values, "name": name})
    )
    found: dict[tuple[str, str], list[int]] = {}
    for of, figure, stretch, count in rows:
        place = stretches - 1 + stretch
        if 0 <= place < stretches:  # after a failover, a minute may be ahead of this server's clock
            found.setdefault((of, figure), [0] * stretches)[place] = count
    begins_at = datetime.fromtimestamp(newest, UTC) - timedelta(seconds=seconds * (stretches - 1))
    return tuple(
        ActivitySeries(of, figure, begins_at, seconds, tuple(counts)) for (of, figure), counts in found.items()
    )


def stretch_seconds(hours: float, stretches: int) -> int:
    """Return how long each stretch is: a whole number of minutes."""
    return max(round(hours * 3600 / stretches / MINUTE_SECONDS), 1) * MINUTE_SECONDS
