"""Failed attempts: how often a message was tried, kept where rolling back its handler cannot undo it.

An attempt counts if the handler failed, or if the process died in it. To catch the second case, the attempt of a
redelivered message is counted before it is made. The process then records the outcome, or takes the attempt back if it
was none (the connection was lost, or the message was in flight). An attempt without an outcome is one whose process
died, or lost the database and never recorded it::

    begin_attempt ─┬─ fail ──────── counts: what the handler raised
                   ├─ take_back ─── no longer counts; until then, nothing may decide on the message by its count
                   ├─ (processed) ─ deleted in the transaction that processes the message
                   └─ (nothing) ─── counts: the process died in it

Each method is a short transaction of its own. The broker's receive count does not suffice: it also counts deliveries
that were handed back, or whose process another message killed.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, StatementError

from txbox.errors import InFlight
from txbox.messages.message import valid_subscriber_id
from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.server import SERVER
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import LOCK_NOT_AVAILABLE, sqlstate
from txbox.postgres.transactions import check_table, short_transaction
from txbox.text import storable

MAX_ERROR_CHARACTERS = 4_000
"""How much of an error is kept; the rest is in the log."""

HISTORY_ERROR_CHARACTERS = 500
"""How much of each attempt's error the history keeps."""

WAIT_SECONDS = 1.0
"""How long to wait for another transaction that has locked the same message's row."""

MAX_HISTORY = 20
"""How many attempts are kept in detail: the last ones that counted."""

History = Sequence[Mapping[str, Any]]
"""Attempts that counted: ``at`` (when, by the database's clock), ``delivery`` (the receive count), ``error`` (why)."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that was counted before it was made."""

    message_id: str
    attempt_id: str
    number: int  # of attempts so far, this one included
    before: History  # earlier attempts, oldest first, as far as they are kept
    error_before: str | None  # how the previous attempt ended; None if there was none
    seconds_before: float | None  # since the previous attempt began; None if there was none


@dataclass(frozen=True, slots=True)
class Failed:
    """How many attempts of a message have counted, and those that are kept, oldest first."""

    attempts: int
    history: History


class FailureStatements(SqlFile, file="failures.sql", constants={"max_history": MAX_HISTORY}):
    begin_attempt: str
    count_failure: str
    lock_failure: str
    write_failure: str
    attempts: str
    forget_failures: str


class Failures:
    """The failed attempts of one subscriber's messages."""

    def __init__(
        self,
        engine: Engine,
        subscriber_id: str,
        *,
        schema: str | None = None,
        prefix: str = "",
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Name the subscriber and the table.

        Args:
            engine: where to open the short transactions.
            subscriber_id: whose messages.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            wait_seconds: how long to wait for another transaction that is processing the same message.
        """
        self._engine = engine
        self._subscriber_id = valid_subscriber_id(subscriber_id, "subscriber_id")
        self._statements = FailureStatements.load(schema, prefix)
        self._wait_seconds = wait_seconds

    @property
    def subscriber_id(self) -> str:
        """The subscriber whose failures these are."""
        return self._subscriber_id

    def begin_attempt(
        self, message_id: str, *, receive_count: int = 1, counting: Callable[[Attempt], object] = lambda _: None
    ) -> Attempt | None:
        """Count an attempt before it is made, for a message that may kill the whole process.

        Args:
            message_id: the message to try.
            receive_count: that of its delivery.
            counting: called with the attempt before the commit; after an error later on, it may or may not be counted.

        Returns:
            The attempt; None if the message is already processed or parked.

        Raises:
            InFlight: another transaction is processing the message, and the message has failed before.
        """
        attempt_id = uuid.uuid4().hex
        entry = _entry(NO_OUTCOME, receive_count, attempt_id)
        with bounded_transaction(self._engine, self._wait_seconds, self._subscriber_id, message_id) as connection:
            row = connection.exec_driver_sql(
                self._statements.begin_attempt, {**self._key(message_id), "error": NO_OUTCOME, "attempt": entry}
            ).fetchone()
            if row is None:
                return None
            number, history, seconds = row
            before = _oldest_first(history[1:])
            last = before[-1]["error"] if before else None
            attempt = Attempt(message_id, attempt_id, number, before, last, seconds)
            counting(attempt)
        return attempt

    def fail(
        self, message_id: str, error: BaseException, *, attempt: Attempt | None = None, receive_count: int = 1
    ) -> Failed:
        """Record a failure, and return the attempts so far.

        Args:
            message_id: the message that failed.
            error: why.
            attempt: the attempt that ``begin_attempt`` has already counted; None: count one now.
            receive_count: that of the delivery.
        """
        text = describe(error)
        entry = _entry(text, receive_count, None if attempt is None else attempt.attempt_id)
        key = self._key(message_id)
        with short_transaction(self._engine) as connection:
            row = None if attempt is None else connection.exec_driver_sql(self._statements.lock_failure, key).fetchone()
            position = None if row is None or attempt is None else _position(row.history, attempt)
            if row is None or position is None:
                row = connection.exec_driver_sql(
                    self._statements.count_failure, {**key, "error": text, "attempt": entry}
                ).one()
                return Failed(row.attempts, _oldest_first(row.history))
            history = list(row.history)
            history[position] = {**history[position], **json.loads(entry)}
            last = text if position == 0 else row.error
            self._write(connection, row.attempts, last, history, key)
        return Failed(row.attempts, _oldest_first(history))

    def take_back(self, attempt: Attempt) -> None:
        """Take back an attempt that ``begin_attempt`` counted but that was not made. A second call changes nothing."""
        key = self._key(attempt.message_id)
        with short_transaction(self._engine) as connection:
            row = connection.exec_driver_sql(self._statements.lock_failure, key).fetchone()
            position = None if row is None else _position(row.history, attempt)
            if row is None or position is None:
                return
            history = [entry for number, entry in enumerate(row.history) if number != position]
            if row.attempts <= 1:
                self.forget(connection, [attempt.message_id])
                return
            last = row.error if position or not history else history[0]["error"]
            self._write(connection, row.attempts - 1, last, history, key)

    def attempts(self, message_id: str) -> int:
        """Return the number of attempts so far."""
        return self.find(message_id).attempts

    def find(self, message_id: str) -> Failed:
        """Return how many attempts have counted so far, and those that are kept."""
        with self._engine.connect() as connection, own_cursors(connection):
            row = connection.exec_driver_sql(self._statements.attempts, self._key(message_id)).fetchone()
        return Failed(0, ()) if row is None else Failed(row.attempts, _oldest_first(row.history))

    def check(self, connection: Connection) -> None:
        """Raise ``SchemaMissing`` unless the table exists."""
        check_table(connection, self._statements.tables.message_failure)

    def forget(self, connection: Connection, message_ids: Iterable[str]) -> None:
        """Forget the failures of messages, in the caller's transaction."""
        forgotten = {"subscriber_id": self._subscriber_id, "message_ids": sorted(message_ids)}
        connection.exec_driver_sql(self._statements.forget_failures, forgotten)

    def _write(self, connection: Connection, attempts: int, error: str, history: History, key: dict[str, str]) -> None:
        written = {**key, "attempts": attempts, "error": error, "history": json.dumps(list(history))}
        connection.exec_driver_sql(self._statements.write_failure, written)

    def _key(self, message_id: str) -> dict[str, str]:
        return {"subscriber_id": self._subscriber_id, "message_id": message_id}


@contextmanager
def bounded_transaction(
    engine: Engine, wait_seconds: float, subscriber_id: str, message_id: str
) -> Iterator[Connection]:
    """Open a transaction that waits so long for another that processes the message, then raises ``InFlight``."""
    try:
        with short_transaction(engine) as connection:
            connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": f"{round(wait_seconds * 1000)}ms"})
            yield connection
    except DBAPIError as error:
        if sqlstate(error) == LOCK_NOT_AVAILABLE:
            raise InFlight(subscriber_id, [message_id]) from error
        raise


def _entry(error: str, receive_count: int, attempt_id: str | None) -> str:
    named = {} if attempt_id is None else {"attempt": attempt_id}
    return json.dumps({**named, "delivery": receive_count, "error": error[:HISTORY_ERROR_CHARACTERS]})


def _position(history: History, attempt: Attempt) -> int | None:
    return next((n for n, entry in enumerate(history) if entry.get("attempt") == attempt.attempt_id), None)


def _oldest_first(history: History) -> History:
    """Return the attempts oldest first, without their internal ids."""
    return tuple({name: value for name, value in entry.items() if name != "attempt"} for entry in reversed(history))


NO_OUTCOME = "no outcome was recorded: the process ended while it handled this message, or lost the database for good"


def describe(error: BaseException) -> str:
    """Return an error as text that Postgres can store: its type, its message, and its causes in short."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < _MAX_CAUSES:
        parts.append(f"{type(current).__name__}: {_message(current)}".strip())
        # The text of SQLAlchemy's wrapper already contains the wrapped error.
        current = None if isinstance(current, StatementError) else current.__cause__
    return storable("\ncaused by ".join(parts))[:MAX_ERROR_CHARACTERS]


def _message(error: BaseException) -> str:
    try:
        if isinstance(error, StatementError):
            # Without the statement's parameters: they hold the message's content, and may be personal data.
            return " ".join(
                filter(None, (str(error.orig or error.args[0]), error.statement and f"[SQL: {error.statement}]"))
            )
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - an error that cannot be printed has still failed its message
        return f"(str() of it raised {type(broken).__name__})"


_MAX_CAUSES = 4
