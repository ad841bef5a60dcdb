"""Sent messages that are kept: looks them up, and puts them into the outbox again.

With ``Relay(keep_sent=…)``, a relay keeps what it has sent in the table outbox_sent. A replay publishes copies under
their original ids. So it is for receivers that have lost messages: an inbox that has processed an id treats the copy as
the duplicate it is.

::

    plan      once: which messages, in which chunks, in the order in which they were published
    chunk     one transaction: read, publish
    chunk     …

Whatever is sent after the plan was made is not part of it, including the replay's own copies. If messages were sent to
one destination under one id several times, by earlier replays for example, only the first is published again. Messages
that are forgotten in the meantime, because their time is over, are left out.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping

from txbox.errors import InvalidConfiguration
from txbox.outbox.outbox import Outbox, Outgoing
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table, short_transaction

__all__ = ["CHUNK_MESSAGES", "ReplayChunk", "SentFilter", "SentMessage", "SentMessages"]

CHUNK_MESSAGES = 1_000
"""How many messages a replay publishes in one transaction."""

PURGE_ROWS = 5_000
"""How many kept messages are deleted in one transaction."""

Moment = datetime | timedelta
"""A time with its zone; or how long ago, by the database's clock."""


@dataclass(frozen=True, slots=True)
class SentFilter:
    """Selects sent messages; all given conditions must hold.

    Attributes:
        destination: sent there.
        key: of this key.
        message_id: with this id; it may have been sent several times.
        since: sent then or later.
        until: sent before then.
        after: published behind this position.
    """

    destination: str | None = None
    key: str | None = None
    message_id: str | None = None
    since: Moment | None = None
    until: Moment | None = None
    after: int = -1

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            moment = getattr(self, name)
            if isinstance(moment, datetime) and moment.tzinfo is None:
                raise InvalidConfiguration(
                    f"SentFilter.{name} needs a zone: {moment} is another moment in each of them"
                )


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that was sent.

    Attributes:
        message_id: the id under which it was sent.
        position: its place among everything published.
        destination: where it was sent.
        key: whose order was kept; None if there was none.
        headers: what travelled beside the body.
        published_at: by the database's clock.
        sent_at: about when the broker confirmed it: when the transaction that settled it began.
        size: of the body, in bytes.
        body: as it was published; None if it was not asked for.
    """

    message_id: str
    position: int
    destination: str
    key: str | None
    headers: Mapping[str, str]
    published_at: datetime
    sent_at: datetime
    size: int
    body: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ReplayChunk:
    """A part of a replay: messages that follow each other.

    Attributes:
        messages: how many there are.
        copies: how many later ones, with the same ids to the same destinations, are left out.
        first, last: the range of their positions, both ends included.
        sent_from, sent_to: the range of times at which they were sent, both ends included.
        since, until: the range of times at which everything was sent that the plan looked at, both ends included.
    """

    messages: int
    copies: int
    first: int
    last: int
    sent_from: datetime
    sent_to: datetime
    since: datetime
    until: datetime


class SentMessagesStatements(SqlFile, file="sent_messages.sql"):
    sent: str
    is_any_kept: str
    plan_by_values: str
    replay_plan: str
    replay_chunk: str
    purge_sent: str
    count_old_sent: str


def purge_sent(
    connection: Connection, statements: SentMessagesStatements, keep_sent: timedelta, *, rows: int = PURGE_ROWS
) -> int:
    """Delete messages that were sent longer ago than ``keep_sent``, oldest first, at most ``rows``; return how many."""
    return connection.exec_driver_sql(statements.purge_sent, {"keep_sent": keep_sent, "limit": rows}).rowcount


class SentMessages:
    """The sent messages that are kept. Every method raises ``SchemaMissing`` if the table does not exist."""

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = "") -> None:
        """Name the database and the tables; this connects to nothing.

        Args:
            engine: the database.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
        """
        self._engine = engine
        self._statements = SentMessagesStatements.load(schema, prefix)
        self._outbox = Outbox(schema=schema, prefix=prefix)

    def find(
        self,
        which: SentFilter | None = None,
        *,
        limit: int = 100,
        bodies: bool = False,
        before: tuple[datetime, int] | None = None,
    ) -> list[SentMessage]:
        """Return sent messages, newest first.

        Args:
            which: the filter; None: all.
            limit: how many, at most.
            bodies: whether to read their bodies.
            before: time and position of the last message of the previous page.
        """
        which = which or SentFilter()
        before_at, before_position = before or (None, None)
        parameters = {
            **_filter(which),
            "after": which.after,
            "bodies": bodies,
            "before_at": before_at,
            "before": before_position,
            "limit": limit,
        }
        with self._transaction() as connection:
            rows = connection.exec_driver_sql(self._statements.sent, parameters).mappings()
            return [_message(row) for row in rows]

    def is_empty(self) -> bool:
        """Return whether nothing is kept at all: no relay keeps what it sends, or the time of everything is over."""
        with self._transaction() as connection:
            return not connection.exec_driver_sql(self._statements.is_any_kept).scalar_one()

    def plan_replay(
        self, which: SentFilter | None = None, *, chunk_messages: int = CHUNK_MESSAGES
    ) -> list[ReplayChunk]:
        """Return what a replay would put into the outbox, in order, in chunks of so many messages.

        This reads the whole table once.
        """
        if chunk_messages < 1:
            raise InvalidConfiguration(f"chunk_messages must be at least 1, not {chunk_messages!r}")
        with self._transaction() as connection:
            which = which or SentFilter()
            parameters = {**_filter(which), "after": which.after, "chunk_messages": chunk_messages}
            rows = connection.exec_driver_sql(self._statements.replay_plan, parameters).mappings()
            return [ReplayChunk(**with_moments(row, "sent_from", "sent_to", "since", "until")) for row in rows]

    def replay(self, chunk: ReplayChunk, which: SentFilter | None = None) -> int:
        """Put copies of a chunk's messages into the outbox, in their order, in one transaction; return how many.

        They are published behind everything that their keys have now, with their original ids, keys and headers. There
        are fewer than planned if some were forgotten in the meantime.

        Args:
            chunk: from ``plan_replay``.
            which: the filter of the plan.

        Raises:
            NotSendable: the destination no longer takes one of them; none was published.
        """
        # The chunk has the plan's times; "an hour ago" is later by now.
        same = replace(which or SentFilter(), since=None, until=None)
        parameters = {
            **_filter(same),
            "sent_from": chunk.sent_from,
            "sent_to": chunk.sent_to,
            "first": chunk.first,
            "last": chunk.last,
            "plan_since": chunk.since,
            "plan_until": chunk.until,
        }
        with self._transaction() as connection:
            rows = connection.exec_driver_sql(self._statements.replay_chunk, parameters).all()
            copies = [Outgoing(row.destination, bytes(row.body), row.key, row.headers, row.message_id) for row in rows]
            self._outbox.publish_many(connection, copies)
        return len(copies)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with short_transaction(self._engine) as connection:
            check_table(connection, self._statements.tables.outbox_sent)
            connection.exec_driver_sql(self._statements.plan_by_values)
            yield connection


def _filter(which: SentFilter) -> dict[str, Any]:
    since_ago, since = _span_and_moment(which.since)
    until_ago, until = _span_and_moment(which.until)
    return {
        "destination": which.destination,
        "key": which.key,
        "message_id": which.message_id,
        "since_ago": since_ago,
        "since": since,
        "until_ago": until_ago,
        "until": until,
    }


def _span_and_moment(moment: Moment | None) -> tuple[timedelta | None, datetime | None]:
    return (moment, None) if isinstance(moment, timedelta) else (None, moment)


def _message(row: RowMapping) -> SentMessage:
    # The statement's columns are named as the attributes.
    body = None if row["body"] is None else bytes(row["body"])
    return SentMessage(**{**with_moments(row, "published_at", "sent_at"), "body": body})
