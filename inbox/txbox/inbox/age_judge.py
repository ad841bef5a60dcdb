"""The horizon: the time before which a subscriber has forgotten what it processed.

A message that was sent before the horizon and has no row in the inbox cannot be judged: it may have been processed and
then forgotten. It is ``Expired``: it does not run and is not dropped, but parked. A message that has a row is a
duplicate or parked, whatever its age.

A maintainer forgets in this order, which makes the answer certain::

    1  move the horizon forward, and commit;
    2  wait until every transaction has ended that was running then (``pg_locks``, locktype virtualxid);
    3  delete rows whose processed_at is earlier than the horizon less ``PRODUCER_SLACK``.

So whenever a transaction records a message because its row was forgotten, a later statement of the same transaction
sees the horizon. R is the transaction that records, M the maintainer; these are all the ways they can meet::

    R begins ── records: a duplicate ── ends         R began before 1 was committed. M waits for R in step 2, so
         M moves ── waits for R ────────┘ deletes    R finds the row, at every isolation level.

    M moves ── waits ─────── deletes                 R finds the row, or M is deleting it: then R waits for M's
         R begins ── records: a duplicate            transaction, and continues as below.

    M moves ── waits ── deletes                      R is first, as the row is gone. R began after 1 was committed, or
         R begins ─────── records: first ── reads    M would have waited for R. So R's snapshot has the horizon: at READ
                                                     COMMITTED that of the second statement, at REPEATABLE READ and
                                                     SERIALIZABLE that of the whole transaction.

It must be a later statement: at READ COMMITTED, the snapshot of the recording statement itself may be older than the
deletion that it waited for.

Only a message that is first and old needs the horizon, so other messages pay nothing. A message is old if it was sent
``OLD_AFTER`` before the transaction began, by the database's clock. No window is shorter than ``MIN_WINDOW``, so a
message behind a horizon that R must see was sent ``MIN_WINDOW`` before R began. The difference allows for a clock that
a fail-over sets back.

The times of messages come from the clocks of producers and brokers. They are compared only with the horizon, and
``PRODUCER_SLACK`` is how far such a clock may be ahead: a message that was sent after the horizon by its own clock, and
processed, has a processed_at after the horizon less the slack, so its row is there.

A message is known not to be processed while it is parked. A redrive re-dates it: it is judged as if it was sent when it
was redriven. That lapses by itself: the message is recorded at most a slack before that time (its transaction may have
begun before the redrive that it waits for), so its row is there as long as the horizon is not after the redrive.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal

from sqlalchemy import Connection

from txbox.errors import Expired, InvalidConfiguration
from txbox.messages.message import earliest, time_of_id
from txbox.postgres.driver_cursor import run
from txbox.postgres.sql import moment
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import DATABASE_ERRORS, INSUFFICIENT_PRIVILEGE, sqlstate
from txbox.postgres.transactions import check_table, missing_schema

__all__ = ["MIN_WINDOW", "PRODUCER_SLACK", "AgeJudge", "UnknownAge"]


MIN_WINDOW = timedelta(hours=1)
"""The shortest time for which the inbox keeps what was processed."""

PRODUCER_SLACK = timedelta(hours=1)
"""How far a producer's or broker's clock may be ahead of the database's; rows are kept that much longer."""

OLD_AFTER = MIN_WINDOW / 2
"""A message sent longer ago than this is old, and has to be judged."""

UnknownAge = Literal["process", "park"]
"""What to do with a message of unknown age: process it, or treat it as sent before the horizon."""


class HorizonStatements(SqlFile, file="horizon.sql"):
    behind_horizon: str
    take_back: str


class AgeJudge:
    """Judges by their age messages that come for the first time."""

    def __init__(
        self, subscriber_id: str, *, schema: str | None, prefix: str, unknown_age: UnknownAge = "process", of: str = ""
    ) -> None:
        """Name the subscriber and its tables; ``of`` names the owner of the arguments in errors."""
        if unknown_age not in ("process", "park"):
            raise InvalidConfiguration(f"{of}.unknown_age must be 'process' or 'park', not {unknown_age!r}")
        self._subscriber_id = subscriber_id
        self._statements = HorizonStatements.load(schema, prefix)
        self._parks_unknown = unknown_age == "park"

    def check(self, connection: Connection) -> None:
        """Raise ``SchemaMissing`` unless the table exists."""
        check_table(connection, self._statements.tables.inbox_horizon)

    def old(self, sent_at: Mapping[str, datetime | None], now_microseconds: int) -> dict[str, datetime | None]:
        """Return the messages that have to be judged; for most batches, none.

        Args:
            sent_at: when they were sent, by id, as far as known. Times in ids that are UUIDs of version 7 are read
                here, and count too.
            now_microseconds: since 1970, by the database's clock.
        """
        now = _EPOCH + timedelta(microseconds=now_microseconds)
        old_before, unknown_after = now - OLD_AFTER, now + _FUTURE
        found: dict[str, datetime | None] = {}
        for message_id, told in sent_at.items():
            made_at = time_of_id(message_id)
            at = told if made_at is None else earliest(told, made_at)
            if at is None or at > unknown_after:
                if self._parks_unknown:
                    found[message_id] = None
            elif at < old_before:
                found[message_id] = at
        return found

    def judge(self, connection: Connection, sent_at: Mapping[str, datetime | None]) -> Expired | None:
        """Return the error that names the messages that cannot be judged; None if all can.

        Call this in a later statement than the one that found the messages to be first; the module's docstring says
        why.

        Args:
            connection: in the transaction that recorded them.
            sent_at: what ``old`` returned.
        """
        times = [None if at is None else (at - _EPOCH) // _MICROSECOND for at in sent_at.values()]
        parameters = {"subscriber_id": self._subscriber_id, "message_ids": list(sent_at), "sent_at": times}
        try:
            rows = run(connection, self._statements.behind_horizon, parameters).fetchall()
        except DATABASE_ERRORS as error:
            if (missing := missing_schema(error, self._statements.name_of("inbox_horizon"))) is not None:
                raise missing from error
            raise
        if not rows:
            return None
        return Expired(self._subscriber_id, {row[0]: sent_at[row[0]] for row in rows}, moment(rows[0][1]))

    def take_back(self, connection: Connection, message_ids: Iterable[str], *, ends: bool = False) -> None:
        """Take back what the caller's transaction, or a savepoint in it, has just recorded.

        Args:
            connection: in that transaction.
            message_ids: ids that were first in it, and in no other transaction.
            ends: the caller rolls the transaction back anyway, so it may be aborted for lack of a right to DELETE.
        """
        parameters = {"subscriber_id": self._subscriber_id, "message_ids": sorted(message_ids)}
        try:
            run(connection, self._statements.take_back, parameters)
        except DATABASE_ERRORS as error:
            if not ends or sqlstate(error) != INSUFFICIENT_PRIVILEGE:
                raise


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FUTURE = timedelta(days=1)
"""A time further in the future than this is a mistake, and the age unknown."""
