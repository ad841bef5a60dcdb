"""Dead letters: messages parked after their last attempt, whole, until a person decides.

Parking is a short transaction of its own, and it comes before the ack: a worker that dies in between finds the message
parked after the redelivery.

Processed or parked, never both. The transaction that parks a message records it in the inbox, marked with the letter's
number; so it meets the one that processes the message at the primary key, and one of the two wins::

    A records ── its handler runs ── A commits       P: it is processed, and no letter is kept
         P parks … waits for A ──────────┘
    A records ── its handler runs ── A rolls back    P: parked
         P parks … waits for A ──────────┘
    A records ── its handler runs ─────────────…     P: InFlight, after ``wait_seconds``; no letter is kept
         P parks … waits for A ┘
    P parks ── P commits                             A: a duplicate that is parked; its handler does not run
         A records … waits ┘                            (at REPEATABLE READ and SERIALIZABLE 40001: it is run again)
    P parks ── P commits                             Q: parked, by one letter
         Q parks … waits ┘

A redrive takes that row away before it sends, in the transaction that marks the letter::

    R locks the letter ── deletes the row ── sends ── redriven_at = now() ── R commits      A: the first
                                       A, with the copy, records … waits for R ────┘
    R locks the letter ── deletes the row ── sends ── R dies                                A: parked; the letter waits
                                       A, with the copy, records … waits for R ─┘

The one exception are letters of reason MISMATCH: another body came under an id that is processed, or parked. Such a
letter leaves open whether its id is processed; the body in it is not.
"""

import json
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping
from sqlalchemy.exc import DBAPIError

from txbox.dead_letters.failures import MAX_ERROR_CHARACTERS, WAIT_SECONDS, FailureStatements, History, storable
from txbox.errors import InFlight, InvalidConfiguration, LetterNotFound
from txbox.message import fingerprint
from txbox.outbox.outbox import Outbox
from txbox.postgres.engines import adopt, refuse_other_encodings
from txbox.postgres.server import SERVER
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import LOCK_NOT_AVAILABLE, sqlstate
from txbox.postgres.transactions import check_table, short_transaction

__all__ = ["DeadLetter", "DeadLetters", "Reason"]


class Reason(StrEnum):
    """Why a message was parked."""

    FAILED = "failed"
    """Its handler raised, ``max_attempts`` times."""
    MISMATCH = "mismatch"
    """Its id was processed, or is parked or goes on, with another body."""
    MALFORMED = "malformed"
    """It could not be read as what its envelope promises."""
    CRASHED = "crashed"
    """The process ended in its last attempt; ``history`` has all of them."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A parked message.

    Attributes:
        subscriber_id: whose attempts failed.
        message_id: the message's id.
        reason: why it was parked.
        error: the last error, as text.
        attempts: how many attempts counted: its handler failed, or the process died in it.
        source: where it came from, such as a queue's URL; a redrive sends it there.
        body: as the broker delivered it, envelopes and all.
        headers: the message's headers.
        envelope: what the broker needs to send it again, such as attributes and the FIFO group.
        dead_letter_id: its number; None before it is parked.
        parked_at: by the database's clock.
        redriven_at: when it was sent through again; None while it waits.
        history: the last attempts that counted, oldest first. Each has ``at``, by the database's clock, at which
            ``delivery`` (the broker's receive count), and the ``error``.
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
    history: History = ()


class DeadLetterStatements(SqlFile, file="dead_letters.sql"):
    """The statements of ``dead_letters.sql``."""

    park: str
    mark_parked: str
    find_recorded: str
    unmark_parked: str
    call_mismatch: str
    waits_parked: str
    lease_attempts: str
    letters: str
    letter_of: str
    lock_letters: str
    mark_redriven: str


class DeadLetters:
    """The dead letters of a database, of every subscriber."""

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = "") -> None:
        """Name where the table is.

        Args:
            engine: where to open the short transactions.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
        """
        self._engine = adopt(engine)
        self._statements = DeadLetterStatements.load(schema, prefix)
        self._failures = FailureStatements.load(schema, prefix)

    @property
    def engine(self) -> Engine:
        """Where the short transactions are opened."""
        return self._engine

    def on(self, engine: Engine) -> "DeadLetters":
        """Return the same dead letters, over another engine of the same database."""
        other = copy(self)
        other._engine = adopt(engine)  # noqa: SLF001 - its own
        return other

    def park(
        self,
        letter: DeadLetter,
        *,
        body: bytes | None = None,
        wait_seconds: float = WAIT_SECONDS,
        lease_attempts: int | None = None,
    ) -> int | None:
        """Park a message and forget its failures, in one transaction. Parking it twice is parking it once.

        Args:
            letter: the message.
            body: as handlers see it, without envelopes; None: as the letter has it. Another body under an id that is
                parked becomes another letter, of reason MISMATCH.
            wait_seconds: how long to wait for another transaction that is processing the message.
            lease_attempts: where there is a ledger too: as ``park_leased``.

        Returns:
            The number of the letter that stands for the message; None if the message is processed, and no letter is
            kept.

        Raises:
            InFlight: another transaction is processing the message; nothing is parked.
        """
        try:
            with short_transaction(self._engine) as connection:
                connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": f"{round(wait_seconds * 1000)}ms"})
                digest = fingerprint(letter.body if body is None else body)
                return self._park(connection, letter, digest, lease_attempts)
        except _Stands as stands:
            with short_transaction(self._engine) as connection:
                self._forget_failures(connection, letter)
            return stands.dead_letter_id
        except DBAPIError as error:
            if sqlstate(error) == LOCK_NOT_AVAILABLE:
                raise InFlight(letter.subscriber_id, [letter.message_id]) from error
            raise

    def _park(self, connection: Connection, letter: DeadLetter, digest: bytes, lease_attempts: int | None) -> int:
        """Park a message, and have the inbox know it.

        Raises:
            InFlight, _Stands: another outcome of the message stands; roll back.
        """
        number = self.park_in(connection, letter, lease_attempts=lease_attempts)
        if letter.reason is Reason.MISMATCH:
            return number  # the message with the other body is, or goes on, as it was
        key = _key(letter)
        marked = {**key, "fingerprint": digest, "dead_letter_id": number}
        if not connection.exec_driver_sql(self._statements.mark_parked, marked).rowcount:
            row = connection.exec_driver_sql(self._statements.find_recorded, key).fetchone()
            if row is None:  # it was redriven just now
                raise InFlight(letter.subscriber_id, [letter.message_id])
            kept, parked_as = row
            if kept is not None and bytes(kept) != digest:
                connection.exec_driver_sql(self._statements.call_mismatch, {**key, "dead_letter_id": parked_as or 0})
            elif parked_as != number:
                raise _Stands(parked_as)
        self._forget_failures(connection, letter)
        return number

    def park_in(self, connection: Connection, letter: DeadLetter, *, lease_attempts: int | None = None) -> int:
        """Park a message in the caller's transaction. Parking it twice is parking it once.

        Returns:
            The letter's number.
        """
        parameters = {
            **_key(letter),
            "reason": letter.reason.value,
            "error": storable(letter.error)[:MAX_ERROR_CHARACTERS],
            "attempts": letter.attempts,
            "source": letter.source,
            "body": letter.body,
            "body_hash": fingerprint(letter.body),
            "headers": _json(letter.headers),
            "envelope": _json(letter.envelope),
            "history": json.dumps(list(letter.history)),
            "lease_attempts": lease_attempts,
        }
        return int(connection.exec_driver_sql(self._statements.park, parameters).scalar_one())

    def park_leased(self, letter: DeadLetter, lease_attempts: int) -> int:
        """Park a message whose ledger decides whether it is processed. Parking it twice is parking it once.

        Args:
            letter: the message.
            lease_attempts: how many attempts it has had in the ledger; those after a redrive are counted from there.

        Returns:
            The letter's number.
        """
        with short_transaction(self._engine) as connection:
            return self.park_in(connection, letter, lease_attempts=lease_attempts)

    def waits(self, subscriber_id: str, message_id: str, body: bytes, lease_attempts: int) -> bool:
        """Whether a message of a ledger waits here: it was parked, and neither redriven nor acked in time.

        Args:
            subscriber_id: whose.
            message_id: its id.
            body: as the broker delivered it; another body under the same id is another letter.
            lease_attempts: as ``park_leased``.
        """
        parameters = {
            "lease_attempts": lease_attempts,
            "subscriber_id": subscriber_id,
            "message_id": message_id,
            "body_hash": fingerprint(body),
        }
        with short_transaction(self._engine) as connection:
            return connection.exec_driver_sql(self._statements.waits_parked, parameters).rowcount > 0

    def lease_attempts(self, subscriber_id: str, message_id: str) -> int:
        """How many attempts a message had in its ledger when it was parked last; 0 if it never was."""
        with short_transaction(self._engine) as connection:
            key = {"subscriber_id": subscriber_id, "message_id": message_id}
            found = connection.exec_driver_sql(self._statements.lease_attempts, key)
            return found.scalar_one() or 0

    def check(self, connection: Connection) -> None:
        """See that the table is there.

        Raises:
            SchemaMissing: it is not.
        """
        refuse_other_encodings(connection)
        check_table(connection, self._statements.tables.dead_letter)

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
        parameters = {"subscriber_id": subscriber_id, "with_redriven": redriven, "after": after, "page": limit}
        with self._engine.connect() as connection:
            rows = connection.exec_driver_sql(self._statements.letters, parameters).mappings()
            return [_letter(row) for row in rows]

    def get(self, dead_letter_id: int) -> DeadLetter:
        """Return one dead letter.

        Raises:
            LetterNotFound: there is none of that number.
        """
        with self._engine.connect() as connection:
            wanted = {"dead_letter_id": dead_letter_id}
            row = connection.exec_driver_sql(self._statements.letter_of, wanted).mappings().one_or_none()
        if row is None:
            raise LetterNotFound(dead_letter_id)
        return _letter(row)

    def redrive(self, dead_letter_id: int, send: Callable[[DeadLetter], None]) -> DeadLetter:
        """Send a parked message through again.

        A crash between the send and the commit leaves the letter waiting although it was sent. Sending it once more
        is harmless: it keeps its message id, and the inbox rejects it.

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
            published = letter.envelope.get("outbox")
            if published is None:
                raise InvalidConfiguration(
                    f"dead letter {dead_letter_id} was received by {letter.subscriber_id}; send it to its source"
                )
            outbox.publish(
                connection,
                letter.source,
                letter.body,
                key=published["key"],
                headers=letter.headers,
                message_id=letter.message_id,
            )

        return self._redrive(dead_letter_id, publish)

    def _redrive(self, dead_letter_id: int, send: Callable[[Connection, DeadLetter], None]) -> DeadLetter:
        with short_transaction(self._engine) as connection:
            wanted = {"dead_letter_id": dead_letter_id}
            rows = connection.exec_driver_sql(self._statements.lock_letters, wanted).mappings().all()
            letter = next((_letter(row) for row in rows if row["dead_letter_id"] == dead_letter_id), None)
            if letter is None:
                raise LetterNotFound(dead_letter_id)
            if letter.redriven_at is not None:
                raise LetterNotFound(
                    dead_letter_id, f"was redriven before, at {letter.redriven_at:%Y-%m-%d %H:%M:%S%z}"
                )
            if "outbox" not in letter.envelope:  # what a relay has parked was never received
                self._unpark(connection, letter, beside_others=len(rows) > 1)
            send(connection, letter)
            connection.exec_driver_sql(self._statements.mark_redriven, wanted)
        return letter

    def _unpark(self, connection: Connection, letter: DeadLetter, *, beside_others: bool) -> None:
        """Have the inbox take the message again, before it is sent: what records the copy waits for this."""
        key = _key(letter)
        connection.exec_driver_sql(self._statements.unmark_parked, key)
        if beside_others:
            connection.exec_driver_sql(self._statements.call_mismatch, {**key, "dead_letter_id": letter.dead_letter_id})
        # It starts afresh, even if copies of it have failed meanwhile.
        self._forget_failures(connection, letter)

    def _forget_failures(self, connection: Connection, letter: DeadLetter) -> None:
        forgotten = {"subscriber_id": letter.subscriber_id, "message_ids": [letter.message_id]}
        connection.exec_driver_sql(self._failures.forget_failures, forgotten)


def _key(letter: DeadLetter) -> dict[str, Any]:
    return {"subscriber_id": letter.subscriber_id, "message_id": letter.message_id}


class _Stands(Exception):
    """Another outcome of the message stands: it is processed, or parked by another letter.

    Attributes:
        dead_letter_id: that letter; None: it is processed.
    """

    def __init__(self, dead_letter_id: int | None) -> None:
        self.dead_letter_id = dead_letter_id


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
    changed = {"reason": Reason(row["reason"]), "body": bytes(row["body"]), "history": tuple(row["history"])}
    return DeadLetter(**{**with_moments(row, "parked_at", "redriven_at"), **changed})
