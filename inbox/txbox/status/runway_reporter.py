"""The runway as events, read at intervals by a process that need not be a maintainer.

::

    reporter = RunwayReporter(engine, hooks=[PrometheusHook()])
    reporter.start()

So the metrics show when a maintainer is gone: how long ago one worked is read from the database.
"""

from collections.abc import Callable, Iterable, Mapping

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from txbox.errors import InvalidConfiguration, TxboxError
from txbox.instrumentation import (
    DatabaseLost,
    DatabaseRestored,
    Hook,
    HorizonRead,
    RunwayRead,
    emit,
)
from txbox.instrumentation.events import MAINTAINER
from txbox.instrumentation.logs import log_event
from txbox.postgres.engines import adopt
from txbox.postgres.transactions import short_transaction
from txbox.schema import tables
from txbox.service import Service
from txbox.status.runway import Runway, read_runway

INTERVAL_SECONDS = 60.0
"""Seconds between two reports."""


class RunwayReporter(Service):
    """Reads what is kept and forgotten once a minute, and reports it to hooks; any process may run one."""

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
            newest_first = [(one.rows, one.bytes) for one in reversed(runway.generations)]
            generations = newest_first or [(runway.inbox_rows, runway.inbox_bytes)]
            emit(
                self._hooks,
                RunwayRead(MAINTAINER, self._source, runway.seconds_ago, runway.rotation_due_seconds, generations),
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
