"""Dead letters: messages parked after their last attempt, whole, until a person decides.

Parking is a short transaction of its own, and it comes before the ack: a worker that dies in between parks the
same letter again after the redelivery, and finds it there.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping

from txbox.connections import adopt, refuse_other_encodings
from txbox.errors import InvalidConfiguration, LetterNotFound
from txbox.failures import MAX_ERROR_CHARACTERS, storable
from txbox.message import fingerprint
from txbox.outbox import Outbox
from txbox.statements import Statements, statements
from txbox.transactions import check_table, short_transaction

__all__ = ["DeadLetter", "DeadLetters", "Reason"]


class Reason(StrEnum):
    """Why a message was parked."""

    FAILED = "failed"
    """Its handler raised, ``max_attempts`` times."""
    MISMATCH = "mismatch"
    """Its id had been processed with another body."""
    MALFORMED = "malformed"
    """It could not be read as what its envelope promises."""
    CRASHED = "crashed"
    """The process ended each time that it handled this message."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A parked message.

    Attributes:
        subscriber_id: whose attempts failed.
        message_id: the message's id.
        reason: why it was parked.
        error: the last error, as text.
        attempts: how often it was tried.
        source: where it came from, such as a queue's URL; a redrive sends it there.
        body: as the broker delivered it, envelopes and all.
        headers: the message's headers.
        envelope: what the broker needs to send it again, such as attributes and the FIFO group.
        dead_letter_id: its number; None before it is parked.
        parked_at: by the database's clock.
        redriven_at: when it was sent through again; None while it waits.
    """

    subscriber_id: str
    message_id: str
    reason: Reason
    error: str
    attempts: int
    source: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    envelope: Mapping[str, Any] = field(default_factory=dict)
    dead_letter_id: int | None = None
    parked_at: datetime | None = None
    redriven_at: datetime | None = None


class DeadLetters:
    """The dead letters of a database, of every subscriber."""

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = "") -> None:
        """Name the place of the table.

        Args:
            engine: where to open the short transactions.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
        """
        self._engine = adopt(engine)
        self._statements: Statements = statements(schema, prefix)

    def park(self, letter: DeadLetter) -> int:
        """Park a message and forget its failures, in one transaction. Parking it twice is parking it once.

        Returns:
            The letter's number.
        """
        with short_transaction(self._engine) as connection:
            number = self.park_in(connection, letter)
            connection.exec_driver_sql(self._statements.forget_failures, (letter.subscriber_id, [letter.message_id]))
        return number

    def park_in(self, connection: Connection, letter: DeadLetter) -> int:
        """Park a message in the caller's transaction. Parking it twice is parking it once.

        Returns:
            The letter's number.
        """
        parameters = (
            letter.subscriber_id,
            letter.message_id,
            letter.reason.value,
            storable(letter.error)[:MAX_ERROR_CHARACTERS],
            letter.attempts,
            letter.source,
            letter.body,
            fingerprint(letter.body),
            _json(letter.headers),
            _json(letter.envelope),
        )
        return int(connection.exec_driver_sql(self._statements.park, parameters).scalar_one())

    def is_parked(self, subscriber_id: str, message_id: str, body: bytes) -> bool:
        """Whether a message waits here: it was parked, and neither redriven nor acked in time.

        Args:
            subscriber_id: whose.
            message_id: its id.
            body: as the broker delivered it; another body under the same id is another letter.
        """
        parameters = (subscriber_id, message_id, fingerprint(body))
        with short_transaction(self._engine) as connection:
            return connection.exec_driver_sql(self._statements.is_parked, parameters).fetchone() is not None

    def check(self, connection: Connection) -> None:
        """See that the table is there.

        Raises:
            SchemaMissing: it is not.
        """
        refuse_other_encodings(connection)
        check_table(connection, self._statements.dead_letter)

    def list(
        self, subscriber_id: str | None = None, *, redriven: bool = False, after: int = 0, limit: int = 100
    ) -> list[DeadLetter]:
        """Return a page of dead letters, oldest first.

        Args:
            subscriber_id: only this subscriber's; None for all.
            redriven: also those that were sent through again.
            after: only numbers greater than this; the last one of the page before.
            limit: how many, at most.
        """
        parameters = (subscriber_id, subscriber_id, redriven, after, limit)
        with self._engine.connect() as connection:
            rows = connection.exec_driver_sql(self._statements.letters, parameters).mappings()
            return [_letter(row) for row in rows]

    def get(self, dead_letter_id: int) -> DeadLetter:
        """Return one dead letter.

        Raises:
            LetterNotFound: there is none of that number.
        """
        with self._engine.connect() as connection:
            row = connection.exec_driver_sql(self._statements.letter, (dead_letter_id,)).mappings().one_or_none()
        if row is None:
            raise LetterNotFound(dead_letter_id)
        return _letter(row)

    def redrive(self, dead_letter_id: int, send: Callable[[DeadLetter], None]) -> DeadLetter:
        """Send a parked message through again.

        A crash between the send and the commit leaves the letter waiting although it was sent. Sending it once more
        is harmless: it keeps its message id, and the inbox knows it.

        Args:
            dead_letter_id: the letter's number.
            send: gives the message back to its source, under the same message id; raises if it cannot.

        Returns:
            The letter that was sent.

        Raises:
            LetterNotFound: there is none of that number, or it was redriven before.
        """
        return self._redrive(dead_letter_id, lambda _, letter: send(letter))

    def republish(self, dead_letter_id: int, outbox: Outbox) -> DeadLetter:
        """Put a message that a relay has parked into the outbox again, in the transaction that marks it as redriven.

        It is published behind all that its key has now, under the same id.

        Args:
            dead_letter_id: the letter's number.
            outbox: where it goes; in the same database.

        Returns:
            The letter that was published.

        Raises:
            LetterNotFound: there is none of that number, or it was redriven before.
            InvalidConfiguration: a worker has parked it, not a relay.
            NotSendable: its destination cannot take it.
        """

        def publish(connection: Connection, letter: DeadLetter) -> None:
            place = letter.envelope.get("outbox")
            if place is None:
                raise InvalidConfiguration(
                    f"dead letter {dead_letter_id} was received by {letter.subscriber_id}; send it to its source"
                )
            outbox.publish(
                connection,
                letter.source,
                letter.body,
                key=place["key"],
                headers=letter.headers,
                message_id=letter.message_id,
            )

        return self._redrive(dead_letter_id, publish)

    def _redrive(self, dead_letter_id: int, send: Callable[[Connection, DeadLetter], None]) -> DeadLetter:
        with short_transaction(self._engine) as connection:
            row = connection.exec_driver_sql(self._statements.lock_letter, (dead_letter_id,)).mappings().one_or_none()
            if row is None:
                raise LetterNotFound(dead_letter_id)
            letter = _letter(row)
            if letter.redriven_at is not None:
                raise LetterNotFound(
                    dead_letter_id, f"was redriven before, at {letter.redriven_at:%Y-%m-%d %H:%M:%S%z}"
                )
            send(connection, letter)
            connection.exec_driver_sql(self._statements.mark_redriven, (dead_letter_id,))
            # It starts afresh, whatever copies of it have failed meanwhile.
            connection.exec_driver_sql(self._statements.forget_failures, (letter.subscriber_id, [letter.message_id]))
        return letter


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(_storable(value))


def _storable(value: Any) -> Any:
    """Return a JSON value without what jsonb cannot hold."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable(name): _storable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(inner) for inner in value]
    return value


def _letter(row: RowMapping) -> DeadLetter:
    # The statements' columns are named as the attributes.
    return DeadLetter(**{**row, "reason": Reason(row["reason"]), "body": bytes(row["body"])})
