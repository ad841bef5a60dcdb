"""Failed attempts: how often a message was tried, kept where a rollback of its handler cannot reach.

Each method is a short transaction of its own. The broker's receive count is not good enough for this: it also
counts deliveries that were handed back, or that died beside another message's fault.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import StatementError

from txbox.statements import statements
from txbox.transactions import check_table, short_transaction

__all__ = ["Attempt", "Failures"]

MAX_ERROR_CHARACTERS = 4_000
"""What is kept of an error's text; the rest is in the log."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that was counted before it was made.

    Attributes:
        message_id: of what.
        number: how many attempts there were, this one included.
        error_before: how the attempt before it ended, as far as that was counted; None if none was.
    """

    message_id: str
    number: int
    error_before: str | None


class Failures:
    """The failed attempts of one subscriber's messages."""

    def __init__(self, engine: Engine, subscriber_id: str, *, schema: str | None = None, prefix: str = "") -> None:
        """Name the subscriber and the place of the table.

        Args:
            engine: where to open the short transactions.
            subscriber_id: whose messages.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
        """
        self._engine = engine
        self._subscriber_id = subscriber_id
        self._statements = statements(schema, prefix)

    def begin_attempt(self, message_id: str) -> Attempt | None:
        """Count an attempt before it is made, for a message that may take the whole process down.

        Returns:
            The attempt; None if the message is already processed.
        """
        key = (self._subscriber_id, message_id)
        with short_transaction(self._engine) as connection:
            row = connection.exec_driver_sql(self._statements.begin_attempt, (*key, *key, NO_OUTCOME)).fetchone()
        return None if row is None else Attempt(message_id, number=int(row[0]), error_before=row[1])

    def fail(self, message_id: str, error: BaseException, *, counted: bool = False) -> int:
        """Keep a failure.

        Args:
            message_id: the message that failed.
            error: why.
            counted: ``begin_attempt`` has counted this attempt already.

        Returns:
            The number of attempts so far.
        """
        text = describe(error)
        with short_transaction(self._engine) as connection:
            attempts = None
            if counted:
                explained = (text, self._subscriber_id, message_id)
                attempts = connection.exec_driver_sql(self._statements.explain_failure, explained).scalar()
            if attempts is None:
                counts = (self._subscriber_id, message_id, text)
                attempts = connection.exec_driver_sql(self._statements.count_failure, counts).scalar_one()
        return int(attempts)

    def take_back(self, attempt: Attempt) -> None:
        """Take back an attempt that ``begin_attempt`` counted, but that was not made after all."""
        key = (self._subscriber_id, attempt.message_id)
        with short_transaction(self._engine) as connection:
            connection.exec_driver_sql(self._statements.uncount_attempt, (attempt.error_before, *key, *key))

    def attempts(self, message_id: str) -> int:
        """Return the number of attempts so far."""
        with self._engine.connect() as connection:
            row = connection.exec_driver_sql(self._statements.attempts, (self._subscriber_id, message_id)).fetchone()
        return 0 if row is None else int(row[0])

    def check(self, connection: Connection) -> None:
        """See that the table is there.

        Raises:
            SchemaMissing: it is not.
        """
        check_table(connection, self._statements.message_failure)

    def forget(self, connection: Connection, message_ids: Iterable[str]) -> None:
        """Forget the failures of messages, in the caller's transaction."""
        connection.exec_driver_sql(self._statements.forget_failures, (self._subscriber_id, sorted(message_ids)))


NO_OUTCOME = "no outcome was recorded: the process ended while it handled this message"


def describe(error: BaseException) -> str:
    """Return an error as text that Postgres can keep: its type, its message, its causes in short."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < _MAX_CAUSES:
        parts.append(f"{type(current).__name__}: {_message(current)}".strip())
        # What SQLAlchemy wraps is in its text already.
        current = None if isinstance(current, StatementError) else current.__cause__
    return storable("\ncaused by ".join(parts))[:MAX_ERROR_CHARACTERS]


def _message(error: BaseException) -> str:
    try:
        if isinstance(error, StatementError):
            # Without the statement's parameters: they are the message's content, and may be personal.
            return " ".join(
                filter(None, (str(error.orig or error.args[0]), error.statement and f"[SQL: {error.statement}]"))
            )
        return str(error)
    except Exception as broken:  # noqa: BLE001 - an error that cannot be printed has still failed its message
        return f"(str() of it raised {type(broken).__name__})"


def storable(text: str) -> str:
    """Return text without what Postgres's text and jsonb cannot hold."""
    return text.replace("\0", "�").encode("utf-8", "replace").decode()


_MAX_CAUSES = 4
