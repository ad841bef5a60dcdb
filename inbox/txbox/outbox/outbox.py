"""The outbox: publish a message in the transaction of the business update; a relay sends it after the commit.

The pattern is Transactional Outbox (C. Richardson, "Microservices Patterns", 2018, section 3.3.7)::

    BEGIN
      UPDATE account …
      INSERT INTO outbox_message …        publish: one statement, in the transaction that was there anyway
    COMMIT
                                          a relay, in transactions of its own: claim, send, delete

A message to ``topic:NAME`` becomes one to ``inbox:SUBSCRIBER`` for each subscription of the topic that the statement
sees, all with its id::

    INSERT INTO outbox_message … SELECT … FROM subscription WHERE topic = NAME

A message gets its id once, here, and every send carries it as ``message-id``, so that the receiver's inbox recognises
a repeated one.
"""

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg
from sqlalchemy.exc import DBAPIError

from txbox.errors import InvalidConfiguration, NotSendable
from txbox.messages.body import Body, written
from txbox.messages.destinations import INBOX, TOPIC, require_sendable
from txbox.messages.message import HEADER_MESSAGE_ID, valid_message_id
from txbox.outbox.lanes import lane_of, spread_of
from txbox.outbox.message_ids import new_message_id
from txbox.outbox.notifier import notify_when_returned
from txbox.postgres.driver_cursor import fetch_one
from txbox.postgres.engines import note_server, require_server
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import DATABASE_ERRORS
from txbox.postgres.transactions import ConnectionOrSession, check_table, in_transaction, missing_schema
from txbox.tracing import NO_TRACING, Operation, Span, Tracing, error_type

RELAY_SUBSCRIBER = "txbox:outbox"
"""The subscriber_id of relays in events; followed by ``:`` and the destination, that of their dead letters."""

MAX_NAME_BYTES = 1_024
"""For a destination and for a key: both are parts of indexes."""

MAX_DELAY = timedelta(days=36_500)
"""A longer delay is a mistaken unit."""

Delay = float | timedelta | datetime
"""Seconds, a time span, or a time with its zone."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish.

    Attributes:
        destination: a queue's URL, a topic's or an event bus's ARN, ``inbox:SUBSCRIBER``, ``topic:NAME``, or
            ``scheme:rest``; see ``txbox.messages``.
        body: the payload: bytes; text, which is sent as UTF-8; or an object of a pydantic model or a dataclass, which
            is sent as JSON (needs pydantic, from ``txbox[typed]``).
        key: messages of one key and destination are sent in the order in which they were published.
        headers: what travels beside the payload.
        message_id: what makes it the same message when it is sent again; None: make one.
        delay: do not send it before: seconds or a time span from now, by the database's clock, or a time with its zone.
            A delayed message takes its place in its key's order when its time has come.
    """

    destination: str
    body: Body
    key: str | None = None
    headers: Mapping[str, str] | None = None
    message_id: str | None = None
    delay: Delay | None = None


class OutboxStatements(SqlFile, file="outbox.sql", constants={"inbox": INBOX, "topic": TOPIC}):
    publish_one: str
    publish_many: str
    publish_to_topic: str
    publish_many_to_topics: str


class Outbox:
    """What this service still has to send.

    Methods work in the caller's transaction, and never begin, commit or roll it back.
    """

    def __init__(
        self, *, schema: str | None = None, prefix: str = "", notify: bool = True, tracing: Tracing | None = None
    ) -> None:
        """Name the outbox's tables; this connects to nothing.

        Args:
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            notify: wake idle relays by a NOTIFY after the business transaction, when the connection returns to its
                pool, at most four times a second. Without it, or on a connection of psycopg's own, an idle relay finds
                the message within a second.
            tracing: makes a span for each message; see ``txbox.instrumentation.opentelemetry_tracing``.
        """
        self.schema = schema
        self.prefix = prefix
        self._notify = notify
        self._tracing = tracing or NO_TRACING
        self._statements = OutboxStatements.load(schema, prefix)

    def __repr__(self) -> str:
        return f"Outbox(schema={self.schema!r})" if self.schema else "Outbox()"

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled for other processes, such as Spark's executors: all but the statements."""
        return {name: value for name, value in vars(self).items() if name != "_statements"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._statements = OutboxStatements.load(self.schema, self.prefix)

    def publish(
        self,
        connection_or_session: ConnectionOrSession,
        destination: str,
        body: Body,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        delay: Delay | None = None,
    ) -> str:
        """Publish one message in the caller's transaction, and return its id; one INSERT, one round trip.

        Args:
            connection_or_session: where the business update happens too.
            destination: where to send it; this and everything below is as in ``Outgoing``.
            body: the payload.
            key: whose order to keep.
            headers: what travels beside the payload.
            message_id: None: make one.
            delay: do not send it before.

        Raises:
            NotInTransaction: the connection is in autocommit mode.
            NotSendable: the destination cannot take this message, or is a topic without subscriptions.
                ``MessageTooLarge``: it has too many bytes.
            TypeError: the body is of another type; or its type cannot read back what would travel, or would read
                something else. The text names the field.
            InvalidMessageId: the id cannot be kept.
            SchemaMissing: the outbox's table does not exist.
        """
        sql = self._statements
        with _ended_together() as spans:
            row = _row(Outgoing(destination, body, key, headers, message_id, delay), self._tracing, spans)
            statement = sql.publish_to_topic if destination.startswith(TOPIC) else sql.publish_one
            self._insert(connection_or_session, statement, row)
        return str(row["message_id"])

    def publish_many(self, connection_or_session: ConnectionOrSession, messages: Iterable[Outgoing]) -> list[str]:
        """Publish many messages in the caller's transaction, in their order, in one round trip; return their ids.

        Args:
            connection_or_session: where the business updates happen too.
            messages: what to send.

        Raises:
            NotInTransaction, NotSendable, TypeError, InvalidMessageId, SchemaMissing: as for ``publish``; nothing was
                published.
        """
        with _ended_together() as spans:
            rows = [_row(message, self._tracing, spans) for message in messages]
            if rows:
                columns = {name: [row[name] for row in rows] for name in rows[0]}
                has_topics = any(name.startswith(TOPIC) for name in columns["destination"])
                sql = self._statements
                statement = sql.publish_many_to_topics if has_topics else sql.publish_many
                self._insert(connection_or_session, statement, columns)
            else:
                in_transaction(connection_or_session)
        return [str(row["message_id"]) for row in rows]

    def check(self, connection_or_session: ConnectionOrSession) -> None:
        """Raise unless the outbox can be used over this connection.

        Raises:
            NotInTransaction: the connection is in autocommit mode.
            SchemaMissing: the table does not exist.
            InvalidConfiguration: the database is not UTF-8, or row-level security may hide rows of the table.
        """
        connection = in_transaction(connection_or_session)
        require_server(connection)
        check_table(connection, self._statements.tables.outbox_message)

    def _insert(self, connection_or_session: ConnectionOrSession, statement: str, parameters: dict[str, Any]) -> None:
        connection = in_transaction(connection_or_session)
        try:
            answer = fetch_one(connection, statement, parameters)
        except UnicodeEncodeError:
            require_server(connection)
            raise
        except DATABASE_ERRORS as error:
            if (missing := missing_schema(error, self._missing_table(error))) is not None:
                raise missing from error
            raise
        note_server(connection, answer[0])
        if len(answer) > 1 and (topic := answer[1]) is not None:
            remedy = f"txbox subscriptions add {shlex.quote(topic)} SUBSCRIBER"
            raise NotSendable(topic, f"has no subscribers, so nothing was published; `{remedy}` adds one")
        if self._notify:
            notify_when_returned(connection)

    def _missing_table(self, error: DBAPIError | psycopg.Error) -> str:
        """Return the table that an error is about: tables of the version before have no subscriptions."""
        told = str(getattr(error, "orig", error)).partition("\n")[0]
        of_topics = self._statements.tables.subscription.name in told
        return self._statements.name_of("subscription" if of_topics else "outbox_message")


@contextmanager
def _ended_together() -> Iterator[list[Span]]:
    """Yield a list, and end the spans in it at the end of the block, with the error if there is one."""
    spans: list[Span] = []
    try:
        yield spans
    except BaseException as error:
        for span in spans:
            span.end(error_type(error))
        raise
    for span in spans:
        span.end()


@dataclass(frozen=True, slots=True)
class _Created:
    """What a span needs of a message that is being published."""

    id: str
    headers: Mapping[str, str]


def _row(message: Outgoing, tracing: Tracing, spans: list[Span]) -> dict[str, Any]:
    """Return the row of a message; add the span of its creation to ``spans``."""
    if not isinstance(message, Outgoing):
        raise TypeError(f"a message to publish is an Outgoing, not {type(message).__name__}")
    destination, key = message.destination, message.key
    if not isinstance(destination, str):
        raise TypeError(f"a destination is text, not {type(destination).__name__}")
    if key is not None and not isinstance(key, str):
        raise TypeError(f"a key is text, not {type(key).__name__}: {key!r}")
    body = written(message.body)
    if not isinstance(message.headers, Mapping | None):
        raise TypeError(f"headers are text by name, not {type(message.headers).__name__}")
    message_id = new_message_id() if message.message_id is None else valid_message_id(message.message_id)
    headers = message.headers or {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"headers are text: {name!r}: {value!r}")
        if not name or "\0" in name or "\0" in value:
            raise NotSendable(destination, f"cannot be sent a header that is empty or holds a NUL character: {name!r}")
        if name.lower() == HEADER_MESSAGE_ID:
            raise NotSendable(destination, f"cannot be sent a header {name!r}: it carries our id; give message_id")
    if key is not None and (not key or "\0" in key):
        raise NotSendable(destination, "takes no key that is empty or holds a NUL character; None is no key")
    for what, name in (("a destination", destination), ("a key", key or "")):
        if len(name.encode()) > MAX_NAME_BYTES:
            raise NotSendable(f"{destination[:80]}…", f"cannot be used: {what} has at most {MAX_NAME_BYTES:,} bytes")
    require_sendable(destination, body, key=key, headers=headers, message_id=message_id)
    if context := _trace_context(destination, message_id, headers, tracing, spans):
        headers = _with_context(headers, context, destination, body, key, message_id)
    seconds, moment = _delay(message.delay)
    # The statement adds the first lane of each subscriber.
    is_topic = destination.startswith(TOPIC)
    return {
        "lane": spread_of(key, message_id) if is_topic else lane_of(destination, key, message_id),
        "message_id": message_id,
        "destination": destination,
        "key": key,
        "headers": json.dumps(headers),
        "body": body,
        "delay": seconds,
        "due_at": moment,
    }


def _trace_context(
    destination: str, message_id: str, headers: Mapping[str, str], tracing: Tracing, spans: list[Span]
) -> Mapping[str, str]:
    """Return ``traceparent`` and ``tracestate`` of the message's creation; empty if its headers have a ``traceparent``.

    https://www.w3.org/TR/trace-context/
    """
    if not tracing.enabled and "opentelemetry.trace" not in sys.modules:
        return {}
    if any(name.lower() == "traceparent" for name in headers):
        return {}
    if tracing.enabled:
        span = tracing.messaging(
            Operation.CREATE, destination, [_Created(message_id, headers)], name="publish", batch=False
        )
        spans.append(span)
        return span.headers
    # If there is a current span, OpenTelemetry is imported already; services without it must not pay for the import.
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def _with_context(
    headers: Mapping[str, str],
    context: Mapping[str, str],
    destination: str,
    body: bytes,
    key: str | None,
    message_id: str,
) -> Mapping[str, str]:
    """Return the headers with the context, or as much of it as the destination takes beside the caller's own."""
    for left_out in ((), ("tracestate",)):
        more = {**headers, **{name: value for name, value in context.items() if name not in left_out}}
        try:
            require_sendable(destination, body, key=key, headers=more, message_id=message_id)
        except NotSendable:
            continue
        return more
    return headers


def _delay(delay: object) -> tuple[timedelta | None, datetime | None]:
    match delay:
        case None:
            return None, None
        case datetime():
            if delay.tzinfo is None:
                raise InvalidConfiguration(f"delay needs a zone: {delay!r} is a different moment in each of them")
            return None, delay
        case timedelta():
            seconds = delay.total_seconds()
        case int() | float() if not isinstance(delay, bool):
            seconds = float(delay)
        case _:
            raise TypeError(f"delay is seconds, a timedelta or a datetime, not {delay!r}")
    if not 0 <= seconds <= MAX_DELAY.total_seconds():
        raise InvalidConfiguration(f"delay must be 0 seconds to {MAX_DELAY.days:,} days, not {delay!r}")
    return timedelta(seconds=seconds), None
