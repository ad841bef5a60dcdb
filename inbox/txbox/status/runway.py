"""The runway: what is kept, how far back, how large it is, and when something was last forgotten."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping
from sqlalchemy.exc import DBAPIError

from txbox.errors import InvalidConfiguration, TxboxError
from txbox.instrumentation import DatabaseLost, DatabaseRestored, Hook, HorizonRead, RunwayRead, emit
from txbox.instrumentation.events import MAINTAINER
from txbox.instrumentation.logs import log_event
from txbox.postgres.engines import adopt
from txbox.postgres.server import estimate_rows
from txbox.postgres.sql import moment, with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import bounded_wait, check_table, short_transaction
from txbox.schema import tables
from txbox.service import Service

LOOKED_AT_BLOCKS = 128
"""Blocks of the inbox to read from each cursor of its maintainer: the oldest ids are there."""

INTERVAL_SECONDS = 60.0
"""Seconds between two reports of the runway as events."""

OVERDUE_SECONDS = 300.0
"""When a round is overdue: a service has one every few seconds, or every minute while there is much to do."""


@dataclass(frozen=True, slots=True)
class HorizonStatus:
    """How far back a subscriber remembers.

    Attributes:
        subscriber_id: the subscriber.
        horizon: messages sent before it are not run any more.
        age_seconds: age of the horizon, by the database's clock.
        oldest_at: when its oldest id was recorded, as far as that can be seen from where the maintainer works; rows of
            letters that wait may be older. None if none was seen there, and for a rotating inbox.
    """

    subscriber_id: str
    horizon: datetime
    age_seconds: float
    oldest_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class GenerationStatus:
    """One generation of a rotating inbox; ``rows`` by Postgres's statistics, ``bytes`` with its index."""

    generation: int
    opened_at: datetime
    closed_at: datetime | None
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MaintenanceTask:
    """What maintainers have done of one task.

    Attributes:
        task: its name.
        finished_at: when it last finished.
        removed: rows removed in all.
        error: what prevented it when it could last not be done: the database's error, or a missing window.
    """

    task: str
    finished_at: datetime | None
    removed: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ArchiveStatus:
    """How far an archive is; nothing is forgotten that it does not have.

    Attributes:
        location: its folder.
        archived_upto: everything sent or processed before this is in it; None: nothing is.
        archived_at: when it last advanced; None: never.
        behind_seconds: since ``archived_upto``, by the database's clock; None: nothing is in it.
    """

    location: str
    archived_upto: datetime | None
    archived_at: datetime | None
    behind_seconds: float | None


@dataclass(frozen=True, slots=True)
class Runway:
    """What is kept and forgotten.

    Attributes:
        maintainer: the one that works, or did so last; None if none ever has.
        at_work: whether one works, or did so half a minute ago.
        seconds_ago: since the last round finished; None if none ever did.
        overdue: whether the last round finished longer ago than a service takes.
        inbox_rows: of all generations, by Postgres's statistics.
        inbox_bytes: of all generations, with the index.
        horizons: of each subscriber that forgets, by name.
        generations: of a rotating inbox, the oldest first.
        rotation_due_seconds: until a new generation is due, negative if overdue; None if that is not known.
        tasks: by name.
        waits_for: server processes whose transactions began before the horizons moved and are still running; nothing
            more is forgotten until they end.
        archives: to which days are moved, by folder.
    """

    maintainer: str | None
    at_work: bool
    seconds_ago: float | None
    overdue: bool
    inbox_rows: int
    inbox_bytes: int
    horizons: tuple[HorizonStatus, ...] = ()
    generations: tuple[GenerationStatus, ...] = ()
    rotation_due_seconds: float | None = None
    tasks: tuple[MaintenanceTask, ...] = ()
    waits_for: tuple[int, ...] = ()
    archives: tuple[ArchiveStatus, ...] = ()

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and bytes of each generation, the newest first; of an inbox that does not rotate, of all of it."""
        newest_first = [(one.rows, one.bytes) for one in reversed(self.generations)]
        return newest_first or [(self.inbox_rows, self.inbox_bytes)]


class RunwayStatements(SqlFile, file="runway.sql"):
    tasks: str
    horizons: str
    inbox_size: str
    generations: str
    oldest_kept: str
    waits_for: str
    archives: str


def read_runway(connection: Connection, *, schema: str | None = None, prefix: str = "") -> Runway | None:
    """Return what is kept and forgotten; None if nothing was ever to be forgotten.

    Args:
        connection: to read with.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.
    """
    sql = RunwayStatements.load(schema, prefix)
    for table in (sql.tables.maintenance, sql.tables.inbox_horizon, sql.tables.inbox_generation, sql.tables.archive):
        check_table(connection, table)
    tasks = {row["task"]: row for row in connection.exec_driver_sql(sql.tasks).mappings()}
    horizons = tuple(
        HorizonStatus(**with_moments(row, "horizon")) for row in connection.exec_driver_sql(sql.horizons).mappings()
    )
    archives = tuple(
        ArchiveStatus(**with_moments(row, "archived_upto", "archived_at"))
        for row in connection.exec_driver_sql(sql.archives).mappings()
    )
    with bounded_wait(connection, sql.tables.processed_message):
        generations = connection.exec_driver_sql(sql.generations).mappings().all()
        if not (tasks or horizons or generations or archives):
            return None
        size = connection.exec_driver_sql(sql.inbox_size).one()
    if horizons and not size.partitioned:
        oldest = _oldest(connection, sql, tasks.get("inbox"))
        horizons = tuple(replace(one, oldest_at=oldest.get(one.subscriber_id)) for one in horizons)
    lease = tasks.get("lease")
    seconds_ago = None if lease is None else lease["seconds_ago"]
    return Runway(
        maintainer=None if lease is None else lease["owner"],
        at_work=lease is not None and lease["at_work"],
        seconds_ago=seconds_ago,
        overdue=seconds_ago is not None and seconds_ago > OVERDUE_SECONDS,
        inbox_rows=estimate_rows(connection, sql.name_of("processed_message")),
        inbox_bytes=size.bytes,
        horizons=horizons,
        generations=tuple(_generation(row) for row in generations),
        rotation_due_seconds=_due(generations, tasks.get("rotation")),
        tasks=tuple(
            MaintenanceTask(name, moment(row["finished_at"]), row["removed"], _prevented_by(row["detail"]))
            for name, row in tasks.items()
            if name not in ("lease", "horizons")
        ),
        waits_for=_waits_for(connection, sql, tasks.get("horizons")),
        archives=archives,
    )


class RunwayReporter(Service):
    """Reads what is kept and forgotten once a minute, and reports it to hooks; any process may run one.

    ::

        reporter = RunwayReporter(engine, hooks=[PrometheusHook()])
        reporter.start()

    So the metrics show when a maintainer is gone: how long ago one worked is read from the database.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        schema: str | None = None,
        prefix: str = "",
        interval_seconds: float = INTERVAL_SECONDS,
        hooks: Iterable[Hook] = (),
    ) -> None:
        """Store the database; it connects only at ``start``, ``run`` or ``run_once``.

        Args:
            engine: the database, or a replica of it.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            interval_seconds: between two reports.
            hooks: get every event; see ``txbox.instrumentation``.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        if not 0.01 <= interval_seconds <= 3_600:
            raise InvalidConfiguration(
                f"RunwayReporter.interval_seconds must be from 0.01 to 3600, not {interval_seconds!r}"
            )
        super().__init__()
        self._engine = adopt(engine)
        self._schema = schema
        self._prefix = prefix
        self._interval_seconds = interval_seconds
        self._hooks += [log_event, *hooks]
        self._source = tables(schema, prefix).processed_message.fullname

    def run_once(self) -> Runway | None:
        """Read the runway, report it to the hooks, and return it; None if nothing was ever to be forgotten.

        Raises:
            SchemaMissing: the tables do not exist.
            DBAPIError: as the database raised it.
        """
        with short_transaction(self._engine) as connection:
            runway = read_runway(connection, schema=self._schema, prefix=self._prefix)
        if runway is not None:
            emit(
                self._hooks,
                RunwayRead(MAINTAINER, self._source, runway.seconds_ago, runway.rotation_due_seconds, runway.sizes),
            )
            for one in runway.horizons:
                behind = None if one.oldest_at is None else (one.horizon - one.oldest_at).total_seconds()
                oldest = None if behind is None else one.age_seconds + behind
                emit(self._hooks, HorizonRead(one.subscriber_id, self._source, one.age_seconds, oldest))
        return runway

    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        self.run_once()
        return {"txbox-runway-reporter": self._work}

    def _stopped(self, finished: bool) -> None:
        """Report nothing: there is no work to hand back."""

    def _work(self) -> None:
        is_lost = False
        while not self._stopping.wait(self._interval_seconds):
            try:
                self.run_once()
            except (DBAPIError, TxboxError) as error:
                is_lost = True
                emit(self._hooks, DatabaseLost(MAINTAINER, self._source, error, self._interval_seconds))
            else:
                if is_lost:
                    emit(self._hooks, DatabaseRestored(MAINTAINER, self._source))
                is_lost = False


def _prevented_by(detail: Mapping[str, Any]) -> str | None:
    return detail.get("error") or detail.get("prevented_by")


def _waits_for(connection: Connection, sql: RunwayStatements, horizons: RowMapping | None) -> tuple[int, ...]:
    """Return the server processes that the maintainer waits for and that still run."""
    waits_for = [] if horizons is None else horizons["detail"].get("waits_for", [])
    if not waits_for:
        return ()
    return tuple(connection.exec_driver_sql(sql.waits_for, {"virtualxids": waits_for}).scalars())


def _oldest(connection: Connection, sql: RunwayStatements, inbox: RowMapping | None) -> dict[str, datetime | None]:
    heads = [] if inbox is None else list(inbox["detail"].get("heads", {}).values())
    found: dict[str, datetime | None] = {}
    for head in sorted({*map(int, heads)} or {0}):
        places = {"first": f"({head},0)", "beyond": f"({head + LOOKED_AT_BLOCKS},0)"}
        for row in connection.exec_driver_sql(sql.oldest_kept, places):
            times = [at for at in (found.get(row.subscriber_id), moment(row.oldest)) if at is not None]
            found[row.subscriber_id] = min(times, default=None)
    return found


def _generation(row: RowMapping) -> GenerationStatus:
    values: dict[str, Any] = with_moments(row, "opened_at", "closed_at")
    return GenerationStatus(**{name: value for name, value in values.items() if name != "age_seconds"})


def _due(generations: Sequence[RowMapping], rotation: RowMapping | None) -> float | None:
    every = None if rotation is None else rotation["detail"].get("every_seconds")
    return None if every is None or not generations else float(every) - generations[-1]["age_seconds"]
