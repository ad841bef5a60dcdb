"""Records in Postgres how far an archive reaches; maintainers and relays forget nothing beyond that point."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine

from txbox import InvalidConfiguration
from txbox.operations.audit.sides import AuditStatements
from txbox.postgres.server import SERVER
from txbox.postgres.sql import moment
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table, short_transaction
from txbox_spark.archive.archive_folder import ArchiveStretch
from txbox_spark.runtime.jdbc import parts_of, sampled_percent

POLL_SECONDS = 0.5


class ArchiveStatements(SqlFile, file="archive.sql", fragments_of=AuditStatements):
    begin: str
    abandon: str
    read: str
    cutoff: str
    unsettled: str
    still_unsettled: str
    count_sent: str
    count_processed: str
    propose: str
    finish: str
    release: str
    inbox_bytes: str
    cut_inbox: str
    rows_sent: str
    rows_processed: str


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """How far an archive reaches.

    Attributes:
        archived_upto: it has everything sent or processed before this time; None if it is empty.
        pending: days that are written and are being moved into place; None if there are none.
    """

    archive_id: str
    archived_upto: datetime | None
    pending: ArchiveStretch | None


class ArchiveLedger:
    """The row of one archive, and the counts of what goes into the archive."""

    def __init__(self, engine: Engine, schema: str | None, prefix: str, location: str) -> None:
        self.sql = ArchiveStatements.load(schema, prefix)
        self._engine = engine
        self._location = location

    def check(self) -> None:
        """Raise ``SchemaMissing`` unless the tables exist."""
        tables = self.sql.tables
        with short_transaction(self._engine) as connection:
            for table in (
                tables.archive,
                tables.processed_message,
                tables.message_lease,
                tables.dead_letter,
                tables.outbox_sent,
            ):
                check_table(connection, table)

    def begin(self) -> ArchiveState:
        """Return the archive's state; create its row if there is none."""
        with short_transaction(self._engine) as connection:
            given = {"location": self._location, "archive_id": secrets.token_hex(8)}
            connection.exec_driver_sql(self.sql.begin, given)
        state = self.read()
        assert state is not None  # noqa: S101 - it was just begun
        return state

    def read(self) -> ArchiveState | None:
        """Return the archive's state; None if it was not begun."""
        with short_transaction(self._engine) as connection:
            row = connection.exec_driver_sql(self.sql.read, {"location": self._location}).one_or_none()
        if row is None:
            return None
        pending = None if row.pending is None else ArchiveStretch.from_json(row.pending)
        return ArchiveState(row.archive_id, moment(row.archived_upto), pending)

    def abandon(self, archive_id: str) -> None:
        """Delete the row of an empty archive, so that maintainers and relays may forget again."""
        self._change(self.sql.abandon, archive_id)

    def cutoff(self, settle: timedelta) -> datetime:
        """Return the end of the last UTC day that has been over for ``settle``, by the database's clock."""
        with short_transaction(self._engine) as connection:
            found = moment(connection.exec_driver_sql(self.sql.cutoff, {"settle": settle}).scalar_one())
        assert found is not None  # noqa: S101 - it is close to now
        return found

    def wait_until_settled(self, cutoff: datetime, *, wait_seconds: float) -> None:
        """Wait until every transaction has ended that may still write rows of days before ``cutoff``.

        A row has the time at which its transaction began, so an open transaction may still commit rows of a day that is
        over. Transactions that begin from now on cannot.

        Raises:
            InvalidConfiguration: a transaction is still open after ``wait_seconds``.
        """
        with short_transaction(self._engine) as connection:
            waited_for = {
                row.name: row.who for row in connection.exec_driver_sql(self.sql.unsettled, {"cutoff": cutoff})
            }
        until = time.monotonic() + wait_seconds
        while waited_for:
            with short_transaction(self._engine) as connection:
                still = set(connection.exec_driver_sql(self.sql.still_unsettled, {"names": list(waited_for)}).scalars())
            waited_for = {name: who for name, who in waited_for.items() if name in still}
            if waited_for and time.monotonic() >= until:
                who = ", ".join(sorted(set(waited_for.values()))[:5])
                raise InvalidConfiguration(
                    f"a transaction that may have begun before {cutoff:%Y-%m-%d} 00:00 UTC is still open, so that day "
                    f"may not be complete; end it, or run this later: {who}"
                )
            if waited_for:
                time.sleep(POLL_SECONDS)

    def count_sent(self, first: datetime, beyond: datetime) -> tuple[list[tuple[datetime, int]], int]:
        """Return the hours with sent messages, in order, each with its row count; and the widest row's bytes."""
        hours, widest = [], 0
        for row in self._count(self.sql.count_sent, first, beyond):
            hour = moment(row.hour)
            assert hour is not None  # noqa: S101 - it is not before the year 1
            hours.append((hour, row.rows))
            widest = max(widest, row.widest)
        return hours, widest

    def count_processed(self, first: datetime, beyond: datetime) -> dict[str, int]:
        """Return how many messages were processed on each day; days without any are left out."""
        return {row.day: row.rows for row in self._count(self.sql.count_processed, first, beyond)}

    def inbox_bounds(self) -> list[tuple[str, str]]:
        """Return keys that cut the inbox evenly, in order; empty if the inbox is small."""
        with short_transaction(self._engine) as connection:
            size = int(connection.exec_driver_sql(self.sql.inbox_bytes).scalar_one())
            if (parts := parts_of(size)) == 1:
                return []
            given = {"percent": sampled_percent(size), "parts": parts}
            return [
                (row.subscriber_id, row.message_id) for row in connection.exec_driver_sql(self.sql.cut_inbox, given)
            ]

    def _count(self, statement: str, first: datetime, beyond: datetime) -> Sequence[Any]:
        with short_transaction(self._engine) as connection:
            connection.exec_driver_sql(SERVER.no_time_limit)
            return connection.exec_driver_sql(statement, {"first": first, "beyond": beyond}).all()

    def propose(self, stretch: ArchiveStretch, after: datetime | None) -> bool:
        """Record the days to be added after the time ``after``; return False if another run was first."""
        given = {"first": after, "pending": stretch.as_json()}
        return self._change(self.sql.propose, stretch.archive_id, **given)

    def finish(self, stretch: ArchiveStretch) -> bool:
        """Record that the days are in place; return False if another run has recorded it."""
        return self._change(self.sql.finish, stretch.archive_id, run=stretch.run, beyond=stretch.beyond)

    def release(self) -> bool:
        """Delete the archive's row, so that it no longer holds anything back; return whether there was one."""
        with short_transaction(self._engine) as connection:
            return connection.exec_driver_sql(self.sql.release, {"location": self._location}).rowcount == 1

    def _change(self, statement: str, archive_id: str, **values: object) -> bool:
        given = {"location": self._location, "archive_id": archive_id, **values}
        with short_transaction(self._engine) as connection:
            return connection.exec_driver_sql(statement, given).rowcount == 1
