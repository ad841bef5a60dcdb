"""The inbox: record a message in the transaction that applies it, and the primary key rejects duplicates.

The pattern is Idempotent Consumer (C. Richardson, "Microservices Patterns", 2018, section 3.3.6): insert
(subscriber, message id) into PROCESSED_MESSAGE in the same transaction as the business update. However often a message
is redelivered, only one transaction can commit that row.

What happens when two transactions, A and B, record the same id::

    A records ──────────────── A commits       B: duplicate     (at READ COMMITTED)
         B records … waits for A ┘             B: 40001, retry  (at REPEATABLE READ and SERIALIZABLE,
                                                                 if B's snapshot is older than A's commit)
    A records ──────────────── A rolls back    B: first
         B records … waits for A ┘
    A records ─────────────────────────────…   B: InFlight, after ``wait_seconds``
         B records … waits ┘

A serialization failure is never taken for "duplicate": it passes through, and the caller runs the transaction again. A
transaction at REPEATABLE READ or SERIALIZABLE also gets one if it records in a generation of a rotating inbox that is
younger than its snapshot, because it does not see everything recorded in the older ones (``inbox.sql``).

A message that is parked as a dead letter has a row here, too, with the letter's number (see ``txbox.dead_letters``). A
redrive deletes that row, so a copy that arrives meanwhile waits for it as B waits for A above, whatever generation the
row is in.

Rows that a maintainer has deleted are forgotten. A message that was sent before the subscriber's horizon and has no row
is too old to judge: ``Expired`` (see ``txbox.inbox.age_judge``). Where nothing is forgotten, there is no horizon.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection

from txbox.errors import Expired, InFlight, Mismatch
from txbox.inbox.age_judge import AgeJudge, UnknownAge
from txbox.messages.message import fingerprint, valid_message_id, valid_subscriber_id
from txbox.postgres.driver_cursor import fetch_one, run
from txbox.postgres.engines import note_server, require_server
from txbox.postgres.round_trip import Reply, Statement, Step, StepFailed, row_of, rows_of, run_steps
from txbox.postgres.sql import array_literal
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import DATABASE_ERRORS, LOCK_NOT_AVAILABLE, UNDEFINED_TABLE, sqlstate
from txbox.postgres.transactions import (
    ConnectionOrSession,
    check_table,
    in_transaction,
    missing_schema,
    valid_lock_timeout,
)

WAIT_SECONDS = 1.0
"""How long to wait for another transaction that is processing the same message."""


NOTHING_KNOWN: Mapping[str, datetime | None] = MappingProxyType({})
"""By id, when messages were sent: unknown for all."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The result of recording a batch. An id in no set is a duplicate, or parked.

    Attributes:
        first: ids recorded now, for the first time: process these.
        mismatched: ids processed before with another body: never run these.
        expired: ids that are too old to judge, and are not recorded: park these.
        error: the error that names the expired ids; None if there are none.
    """

    first: frozenset[str]
    mismatched: frozenset[str]
    expired: frozenset[str] = frozenset()
    error: Expired | None = None


@dataclass(frozen=True, slots=True)
class ParkedIds:
    """Which of several duplicates are parked."""

    same: frozenset[str]  # parked with the same body: their letters cover them
    mismatched: frozenset[str]  # parked with another body: these have no letters yet


@dataclass(frozen=True, slots=True)
class Recording:
    """The statement that records a batch, and what it was made from.

    Attributes:
        ids: the ids, each once, sorted.
        digests: the fingerprints of the bodies, by id; empty where none are kept.
        sent_at: when the messages were sent, by id.
        values: the statement's parameters.
        step: the statement with its values.
    """

    ids: Sequence[str]
    digests: Mapping[str, bytes]
    sent_at: Mapping[str, datetime | None]
    values: Mapping[str, Any]
    step: Step


class InboxStatements(SqlFile, file="inbox.sql"):
    record_one: str
    record_many: str
    require_generation: str
    refuse_snapshot: str
    fingerprints: str
    find_parked: str
    find_earlier: str
    await_redrives: str
    unrecord: str


class Inbox:
    """What one subscriber has already processed.

    Methods that take a connection or session work in the caller's transaction, and never begin, commit or roll it back.
    Do the business update on the same one, then commit: both or neither.
    """

    def __init__(
        self,
        subscriber_id: str,
        *,
        schema: str | None = None,
        prefix: str = "",
        fingerprint: bool = False,
        wait_seconds: float = WAIT_SECONDS,
        unknown_age: UnknownAge = "process",
    ) -> None:
        """Name the subscriber and its tables; this connects to nothing.

        Args:
            subscriber_id: the consumer's name; each subscriber processes a message once.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            fingerprint: keep the SHA-256 of each body, and refuse an id that comes again with another body.
            wait_seconds: how long to wait for another transaction that is processing the same message; 0.001 to 3600.
            unknown_age: what to do, once the subscriber forgets, with a message of unknown age that comes for the first
                time. "process": run it; if it was processed before the horizon, it runs twice. "park": it is expired,
                as if it was sent before the horizon.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        self._lock_timeout = valid_lock_timeout(wait_seconds, "Inbox.wait_seconds")
        self.subscriber_id = valid_subscriber_id(subscriber_id, "Inbox.subscriber_id")
        self.schema = schema
        self.prefix = prefix
        self.fingerprint = fingerprint
        self.wait_seconds = wait_seconds
        self.unknown_age: UnknownAge = unknown_age
        self._ages = AgeJudge(
            self.subscriber_id, schema=schema, prefix=prefix, unknown_age=unknown_age, of=type(self).__name__
        )
        self._statements = InboxStatements.load(schema, prefix)
        self._record_many = Statement.of(self._statements.record_many)
        self._find_parked = Statement.of(self._statements.find_parked)
        self._table = self._statements.name_of("processed_message")
        self._view = self._statements.name_of("processed_earlier")

    def __repr__(self) -> str:
        where = f", schema={self.schema!r}" if self.schema else ""
        return f"Inbox({self.subscriber_id!r}{where})"

    def record(
        self,
        connection_or_session: ConnectionOrSession,
        message_id: str,
        body: bytes | str | None = None,
        *,
        sent_at: datetime | None = None,
    ) -> bool:
        """Record one message in the caller's transaction; one INSERT, one round trip.

        Args:
            connection_or_session: where the business update happens too.
            message_id: the id of the message.
            body: its payload; needed if the inbox keeps fingerprints, otherwise ignored.
            sent_at: when it was sent, with a time zone, as in ``Message.sent_at``; None: unknown, unless its id says.

        Returns:
            True: the message is first; process it. False: its effects have committed before, or it is a dead letter.
            Either way, ack it.

        Raises:
            NotInTransaction: the connection is in autocommit mode.
            InFlight: another transaction is processing the message; roll back, and retry later.
            Mismatch: the id was processed before with another body.
            Expired: it is too old to tell whether it was processed; roll back, and park it.
            InvalidMessageId: the id cannot be kept.
            SchemaMissing: the inbox's table does not exist.
            sqlalchemy.exc.OperationalError: among others a serialization failure (40001): run the transaction again.
        """
        digest = self._digest(message_id, body) if self.fingerprint else None
        connection = in_transaction(connection_or_session)
        parameters = {
            "lock_timeout": self._lock_timeout,
            "subscriber_id": self.subscriber_id,
            "message_id": valid_message_id(message_id),
            "fingerprint": digest,
        }
        with self._translated(connection, (message_id,)):
            row = fetch_one(connection, self._statements.record_one, parameters)
        self._check_server(connection, row)
        digests = {} if digest is None else {message_id: digest}
        if row[0] == 1 or (row[1] and self._record_redriven(connection, row[1], digests)):
            if old := self._ages.old({message_id: sent_at}, row[-2]):
                expired = self._ages.judge(connection, old)
                if expired is not None:
                    self._ages.take_back(connection, old, ends=True)
                    raise expired
            return True
        if digests and self._differing(connection, digests):
            raise Mismatch(self.subscriber_id, (message_id,))
        return False

    def record_many(
        self,
        connection_or_session: ConnectionOrSession,
        ids: Iterable[str] | Mapping[str, bytes | str],
        *,
        sent_at: Mapping[str, datetime | None] = NOTHING_KNOWN,
    ) -> set[str]:
        """Record many messages in the caller's transaction, in one round trip; return the ids that are first.

        Args:
            connection_or_session: where the business updates happen too.
            ids: the ids, in any order; for an inbox that keeps fingerprints, a mapping from id to body.
            sent_at: when they were sent, by id, as in ``Message.sent_at``; for the others, only their ids may say.

        Raises:
            Mismatch: some ids were processed before with other bodies. The others are recorded nevertheless; roll
                back, or use ``sort_out``, which returns them separately.
            Expired: some are too old to tell whether they were processed; do the same.
            TypeError: one id was given instead of many, or a body is missing where fingerprints are kept.
            NotInTransaction, InFlight, InvalidMessageId, SchemaMissing: as for ``record``.
        """
        recorded = self.sort_out(connection_or_session, ids, sent_at=sent_at)
        if recorded.mismatched:
            raise Mismatch(self.subscriber_id, recorded.mismatched)
        if recorded.error is not None:
            raise recorded.error
        return set(recorded.first)

    def sort_out(
        self,
        connection_or_session: ConnectionOrSession,
        ids: Iterable[str] | Mapping[str, bytes | str],
        *,
        sent_at: Mapping[str, datetime | None] = NOTHING_KNOWN,
    ) -> Recorded:
        """Record many messages as ``record_many`` does, but return mismatched and expired ones instead of raising."""
        recording = self.recording(ids, sent_at=sent_at)
        connection = in_transaction(connection_or_session)
        if not recording.ids:
            return Recorded(frozenset(), frozenset())
        with self._translated(connection, recording.ids):
            row = fetch_one(connection, self._statements.record_many, recording.values)
        return self._sort_out(connection, recording, row)

    def recording(
        self,
        ids: Iterable[str] | Mapping[str, bytes | str],
        *,
        sent_at: Mapping[str, datetime | None] = NOTHING_KNOWN,
    ) -> Recording:
        """Return the step that records many messages; it may go out with others. Pass its answer to ``recorded``."""
        if isinstance(ids, str):
            raise TypeError(f"many ids are needed, not the characters of one: {ids!r}; record takes a single id")
        bodies = ids if isinstance(ids, Mapping) else {}
        # Sorted, so that overlapping batches wait for each other in one order and cannot deadlock. Python compares code
        # points, Postgres the bytes of this column (COLLATE "C"); in UTF-8 the two orders are the same.
        ordered = sorted({valid_message_id(message_id) for message_id in ids})
        # Without fingerprints the array is empty: unnest fills up the shorter array with nulls.
        hashed = ordered if self.fingerprint else ()
        digests = {message_id: self._digest(message_id, bodies.get(message_id)) for message_id in hashed}
        values = self._values(ordered, digests)
        return Recording(ordered, digests, sent_at, values, self._record_many.with_values(**values))

    def _values(self, ordered: Sequence[str], digests: Mapping[str, bytes]) -> dict[str, str]:
        """Return the parameters of ``record_many``; ``digests`` covers all these ids, or none."""
        return {
            "lock_timeout": self._lock_timeout,
            "subscriber_id": self.subscriber_id,
            "message_ids": array_literal(ordered),
            "fingerprints": array_literal([f"\\x{digests[id_].hex()}" for id_ in ordered if id_ in digests]),
        }

    def recorded(self, connection: Connection, recording: Recording, answer: Reply, *, ends: bool = False) -> Recorded:
        """Read the answer to a recording's step. Raise as ``record_many`` does, except for what ``Recorded`` reports.

        ``ends``: the caller rolls the transaction back anyway if a message is expired.
        """
        with self._translated(connection, recording.ids):
            row = row_of(in_transaction(connection), answer.result())
        return self._sort_out(connection, recording, row, ends=ends)

    def _sort_out(self, connection: Connection, recording: Recording, row: Any, *, ends: bool = False) -> Recorded:
        self._check_server(connection, row)
        ids = recording.ids
        first = frozenset(ids if row[0] == len(ids) else row[1] or ())
        if row[2]:
            first |= self._record_redriven(connection, row[2], recording.digests)
        duplicates = {id_: digest for id_, digest in recording.digests.items() if id_ not in first}
        mismatched = self._differing(connection, duplicates) if duplicates else frozenset()
        sent_at = recording.sent_at
        old = self._ages.old({message_id: sent_at.get(message_id) for message_id in first}, row[-2])
        error = self._ages.judge(connection, old) if old else None
        if error is None:
            return Recorded(first, mismatched)
        self._ages.take_back(connection, error.message_ids, ends=ends)
        expired = frozenset(error.message_ids)
        return Recorded(first - expired, mismatched, expired, error)

    def _record_redriven(
        self, connection: Connection, earlier: Collection[str], digests: Mapping[str, bytes]
    ) -> frozenset[str]:
        """Record those duplicates of an older generation that were redriven meanwhile, and return them.

        The statement saw their rows in a snapshot, which does not wait for the redrive that deletes them. This waits
        for it: either it has committed, or its letter stays as it is until this transaction ends.
        """
        rows = run(connection, self._statements.find_earlier, self._of(sorted(earlier))).fetchall()
        redriven = set(earlier) - {message_id for message_id, _ in rows}
        parked = {letter: message_id for message_id, letter in rows if letter is not None}
        if parked:
            with self._translated(connection, parked.values()):
                values = {"lock_timeout": self._lock_timeout, "letters": sorted(parked)}
                sent, _ = fetch_one(connection, self._statements.await_redrives, values)
            redriven |= {parked[letter] for letter in sent or ()}
        if not redriven:
            return frozenset()
        ids = sorted(redriven)
        with self._translated(connection, ids):
            row = fetch_one(connection, self._statements.record_many, self._values(ids, digests))
        self._check_server(connection, row)
        return frozenset(ids if row[0] == len(ids) else row[1] or ())

    def still_expired(self, connection: Connection, expired: Expired) -> bool:
        """Whether messages that were too old to judge still are, as none was redriven meanwhile.

        A transaction at REPEATABLE READ or SERIALIZABLE does not see a redrive that committed after its snapshot, so
        ``connection`` must be in a newer transaction.
        """
        return self._ages.judge(connection, expired.sent_at) is not None

    def find_parked(self, connection_or_session: ConnectionOrSession, bodies: Mapping[str, bytes | str]) -> ParkedIds:
        """Return which of the duplicates found in this transaction, given as bodies by id, are parked."""
        connection = in_transaction(connection_or_session)
        try:
            (answer,) = run_steps(connection, [self.finding_parked(bodies)])
        except StepFailed as failure:
            raise failure.error from None
        return self.parked(bodies, rows_of(connection, answer))

    def finding_parked(self, message_ids: Iterable[str]) -> Step:
        """Return the step that finds parked messages; it may go out with others. Pass its rows to ``parked``."""
        ids = array_literal(list(message_ids))
        return self._find_parked.with_values(subscriber_id=self.subscriber_id, message_ids=ids)

    @staticmethod
    def parked(bodies: Mapping[str, bytes | str], rows: Iterable[tuple[Any, ...]]) -> ParkedIds:
        """Read the rows of the step that ``finding_parked`` made for the ids of these bodies."""
        # A letter from before such rows existed has no fingerprint.
        same = {id_ for id_, kept in rows if kept is None or bytes(kept) == fingerprint(bodies[id_])}
        return ParkedIds(frozenset(same), frozenset(id_ for id_, _ in rows if id_ not in same))

    def unrecord(self, connection_or_session: ConnectionOrSession, ids: Iterable[str]) -> int:
        """Take back what this very transaction recorded, for messages that it will not apply after all.

        Ids that other transactions recorded are left alone. Return how many ids were taken back.
        """
        connection = in_transaction(connection_or_session)
        return int(run(connection, self._statements.unrecord, self._of(sorted(ids))).rowcount)

    def check(self, connection_or_session: ConnectionOrSession) -> None:
        """Raise unless the inbox can be used over this connection.

        Raises:
            NotInTransaction: the connection is in autocommit mode.
            SchemaMissing: a table does not exist.
            InvalidConfiguration: the database is not UTF-8, or row-level security may hide rows of a table.
        """
        connection = in_transaction(connection_or_session)
        require_server(connection)
        check_table(connection, self._statements.tables.processed_message)
        check_table(connection, self._statements.tables.processed_earlier)
        self._ages.check(connection)

    def _of(self, message_ids: list[str]) -> dict[str, Any]:
        return {"subscriber_id": self.subscriber_id, "message_ids": message_ids}

    def _digest(self, message_id: str, body: bytes | str | None) -> bytes:
        if body is None:
            raise TypeError(f"this inbox keeps fingerprints: the body of message {message_id!r} is needed too")
        return fingerprint(body)

    @contextmanager
    def _translated(self, connection: Connection, ids: Collection[str]) -> Iterator[None]:
        """Raise the error of ours that a recording statement's error stands for."""
        try:
            yield
        except UnicodeEncodeError:
            require_server(connection)
            raise
        except DATABASE_ERRORS as error:
            if sqlstate(error) == LOCK_NOT_AVAILABLE:
                raise InFlight(self.subscriber_id, ids) from error
            # An inbox of an older version does not have the view.
            of_view = sqlstate(error) == UNDEFINED_TABLE and self._view in str(getattr(error, "orig", error))
            if (missing := missing_schema(error, self._view if of_view else self._table)) is not None:
                raise missing from error
            raise

    def _check_server(self, connection: Connection, row: Any) -> None:
        """Check what each recording statement returns at its end: generation, time, process id."""
        note_server(connection, row[-1])
        if (generation := row[-3]) is not None:
            self._require_generation(connection, generation)

    def _require_generation(self, connection: Connection, generation: int) -> None:
        """Raise a serialization failure if the inbox was rotated after the snapshot of this transaction."""
        found = run(connection, self._statements.require_generation, {"generation": generation}).fetchone()
        if found is None:
            run(connection, self._statements.refuse_snapshot)

    def _differing(self, connection: Connection, digests: Mapping[str, bytes]) -> frozenset[str]:
        # A second statement, for duplicates only: at READ COMMITTED the first one's snapshot may be older than the
        # commit that it ran into. A row without a fingerprint was recorded without one: there is nothing to compare.
        rows = run(connection, self._statements.fingerprints, self._of(list(digests))).fetchall()
        return frozenset(
            message_id for message_id, kept in rows if kept is not None and bytes(kept) != digests[message_id]
        )
