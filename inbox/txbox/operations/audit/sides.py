"""The two sides of an audit: what an outbox has sent and what an inbox has, each read by single statements."""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, Table
from sqlalchemy.exc import DBAPIError

from txbox.backoff import Backoff, retry
from txbox.dead_letters.letter import DeadLetterStatements
from txbox.errors import NothingKept
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.postgres.engines import adopt, require_server
from txbox.postgres.sql import moment
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import QUERY_CANCELED, SERIALIZATION_FAILURE, sqlstate
from txbox.postgres.transactions import check_table, short_transaction

STATEMENT_TIMEOUT = "10s"

COUNTED_WAITING = 100_000
"""Most messages of the outbox that one statement counts or searches."""

LETTERS = 2_000
"""Most dead letters that one statement compares."""


class AuditStatements(SqlFile, file="audit.sql", fragments_of=DeadLetterStatements):
    state: str  # of the row ``entry`` of the inbox
    limit_statement: str
    outbox_begin: str
    kept_since: str
    inbox_begin: str
    next_subscriber: str
    sent_edge: str
    recorded_edge: str
    sent_digests: str
    sent_destinations: str
    recorded_digests: str
    sent_list: str
    recorded_list: str
    judge_missing: str
    first_parked: str
    judge_foreign: str
    find_waiting: str
    judge_letters: str


@dataclass(frozen=True, slots=True)
class Range:
    """A range of ids, above ``after`` and up to ``upto``. Compared byte by byte, as Python compares text."""

    after: str
    upto: str


class AuditedDatabase:
    """A database that is read by single statements, each in its own transaction."""

    def __init__(self, engine: Engine, schema: str | None, prefix: str) -> None:
        self._engine = adopt(engine)
        self.sql = AuditStatements.load(schema, prefix)

    def check(self, *tables: Table) -> None:
        """Raise if a table is missing, or if the encoding is not UTF-8, which would order ids differently."""
        with short_transaction(self._engine) as connection:
            require_server(connection)
            for table in tables:
                check_table(connection, table)

    def read(self, statement: str, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Return the rows of a statement.

        A replica may cancel it, or end the connection, because of what it has to replay; then the statement runs again.
        """

        def work() -> Sequence[Any]:
            with short_transaction(self._engine) as connection:
                connection.exec_driver_sql(self.sql.limit_statement, {"statement_timeout": STATEMENT_TIMEOUT})
                return connection.exec_driver_sql(statement, parameters).all()

        def again(error: Exception, _run: int) -> bool:
            lost = isinstance(error, DBAPIError) and error.connection_invalidated
            return lost or sqlstate(error) == SERIALIZATION_FAILURE

        return retry(work, again=again, backoff=_AGAIN, runs=_ATTEMPTS)


def subscribers(database: AuditedDatabase) -> Iterator[str]:
    """Yield each subscriber that has left a trace in an inbox, in order."""
    after: str | None = ""
    while True:
        parameters = {"after": after, "relay": f"{RELAY_SUBSCRIBER}:"}
        after = database.read(database.sql.next_subscriber, parameters)[0][0]
        if after is None:
            return
        yield after


class _Side:
    """What both sides can say about a stretch, by statements of the same meaning.

    Attributes:
        judged_since: what was sent or processed before this is not judged; None: everything is.
    """

    def __init__(self, database: AuditedDatabase, kind: str, asked: Mapping[str, Any]) -> None:
        self.database, self._kind, self._asked = database, kind, asked
        self.judged_since: datetime | None = None

    def edge(self, stretch: Range, rows: int) -> str | None:
        """Return the id that ends a part of ``rows`` rows; None if the stretch has fewer."""
        found = self._read("edge", stretch, rows=rows)
        return found[0].message_id if found else None

    def digests(self, stretch: Range) -> dict[int, Any]:
        """Return the counts and digest of each bucket that is not empty."""
        return {row.bucket: row for row in self._read("digests", stretch, seed=_SEED)}

    def ids(self, stretch: Range, buckets: Sequence[int]) -> Sequence[Any]:
        """Return the ids in some buckets, each with its time in microseconds, whether it is judged, and more."""
        return self._read("list", stretch, seed=_SEED, buckets=buckets)

    def _read(self, what: str, stretch: Range, **more: object) -> Sequence[Any]:
        given = {"after": stretch.after, "upto": stretch.upto, "judged_since": self.judged_since or "-infinity"}
        return self.database.read(getattr(self.database.sql, f"{self._kind}_{what}"), {**given, **self._asked, **more})


class Sent(_Side):
    """What an outbox has sent to some destinations."""

    def __init__(self, database: AuditedDatabase, destinations: tuple[str, ...], shared: bool) -> None:
        super().__init__(database, "sent", {"destinations": list(destinations)})
        self.destinations, self.shared = destinations, shared
        self._relays = [f"{RELAY_SUBSCRIBER}:{destination}" for destination in destinations]
        self.now = self.kept_since = datetime.now(UTC)

    def begin(self, counts: Counter[str]) -> str:
        """Read where the audit begins; return the greatest id."""
        tables = self.database.sql.tables
        self.database.check(tables.outbox_sent, tables.outbox_message)
        given = {**self._asked, "relays": self._relays, "counted": COUNTED_WAITING}
        row = self.database.read(self.database.sql.outbox_begin, given)[0]
        if row.kept_since is None:
            raise NothingKept(
                "no sent messages are kept, so there is nothing to compare with: run the relay with --keep-sent "
                "(Relay(keep_sent=…)), or audit the inbox alone"
            )
        self.now, self.kept_since = known(row.now), known(row.kept_since)
        counts.update(waiting=row.waiting, undelivered=row.undelivered)
        return str(row.last_id)

    def destinations_in(self, stretch: Range, destinations: Collection[str]) -> set[str]:
        """Return those of the destinations to which anything was sent in a stretch, as far as it is judged."""
        return {row.destination for row in self._read("destinations", stretch, destinations=sorted(destinations))}

    def quiet(self, every: Range, destinations: Collection[str]) -> set[str]:
        """Return those of the destinations to which anything was ever sent; none if it takes too long to find out."""
        try:
            return self.destinations_in(every, destinations)
        except DBAPIError as error:
            if sqlstate(error) != QUERY_CANCELED:
                raise
            return set()

    def known(self, message_ids: Sequence[str]) -> dict[str, bool]:
        """Return which ids this outbox has sent or parked, and whether to these destinations."""
        given = {"message_ids": message_ids, **self._asked, "relays": self._relays}
        found: dict[str, bool] = {}
        for message_id, here in self.database.read(self.database.sql.judge_foreign, given) if message_ids else ():
            found[message_id] = found.get(message_id, False) or here
        return found

    def waiting(self, message_ids: Sequence[str]) -> set[str]:
        """Return which ids are still in the outbox."""
        found: set[str] = set()
        lane: int | None = -(2**63)
        position = 0
        while lane is not None:
            given = {"message_ids": message_ids, "lane": lane, "position": position, "rows": COUNTED_WAITING}
            ids, lane, position = self.database.read(self.database.sql.find_waiting, given)[0]
            found.update(ids)
        return found

    def read_kept_since(self) -> datetime:
        """Return when the oldest message that is still kept was sent."""
        return moment(self.database.read(self.database.sql.kept_since, {})[0].kept_since) or self.now


class RecordedSide(_Side):
    """What the inbox of a subscriber has."""

    def __init__(self, database: AuditedDatabase, subscriber_id: str) -> None:
        super().__init__(database, "recorded", {"subscriber_id": subscriber_id})
        self.subscriber_id = subscriber_id

    def begin(self) -> Any:
        """Return now, horizon, paused_at and last_id: where the audit begins, and where the inbox forgets."""
        return self.database.read(self.database.sql.inbox_begin, self._asked)[0]

    def check(self) -> None:
        tables = self.database.sql.tables
        self.database.check(tables.processed_message, tables.dead_letter, tables.message_lease, tables.inbox_horizon)

    def states(self, message_ids: Collection[str], in_flight: timedelta, retry: timedelta) -> Sequence[Any]:
        """Return what became of ids that were not found: message_id, state."""
        given = {**self._asked, "message_ids": sorted(message_ids), "in_flight": in_flight, "retry": retry}
        return self.database.read(self.database.sql.judge_missing, given) if message_ids else ()

    def first_parked(self, message_ids: Sequence[str]) -> dict[str, datetime]:
        """Return when each message was first parked, for those that were."""
        rows = self.database.read(self.database.sql.first_parked, {**self._asked, "message_ids": message_ids})
        return {message_id: known(at) for message_id, at in rows}

    def letter_faults(self) -> Iterator[tuple[str, str, int]]:
        """Yield faults of letters that wait: kind, message_id, and when it was parked in microseconds."""
        after: int | None = 0
        while after is not None:
            given = {**self._asked, "after": after, "rows": LETTERS}
            after, *found = self.database.read(self.database.sql.judge_letters, given)[0]
            yield from zip(*(column or () for column in found), strict=True)


def known(microseconds: int) -> datetime:
    """Return a time that is not null; infinity becomes the last one."""
    return moment(microseconds) or datetime.max.replace(tzinfo=UTC)


_ATTEMPTS = 5
_AGAIN = Backoff(first_seconds=1.0, longest_seconds=10.0)
_SEED = random.SystemRandom().getrandbits(63)
"""Seed of the hashes; a bigint."""
