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

Letters of reason MISMATCH are the exception: another body came under an id that is processed, or parked. Such a letter
leaves open whether its id is processed; the body in it is not.
"""

from collections.abc import Callable
from copy import copy

from sqlalchemy import Connection, Engine

from txbox.dead_letters.failures import WAIT_SECONDS, FailureStatements, bounded_transaction
from txbox.dead_letters.letter import DeadLetter, Reason, columns_of, key_of, letter_from
from txbox.errors import InFlight, InvalidConfiguration, LetterNotFound
from txbox.message import fingerprint
from txbox.outbox.outbox import Outbox
from txbox.postgres.engines import adopt, refuse_other_encodings
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table, short_transaction

__all__ = ["DeadLetters"]


class DeadLetterStatements(SqlFile, file="dead_letters.sql"):
    """The statements of ``dead_letters.sql``."""

    park: str
    mark_parked: str
    find_recorded: str
    unmark_parked: str
    mark_others_mismatch: str
    waits_parked: str
    lease_attempts: str
    letters: str
    letter_of: str
    lock_letters: str
    mark_redriven: str


class DeadLetters:
    """The dead letters of a database, of every subscriber. Parking a message twice is parking it once."""

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = "") -> None:
        """Name where the tables are.

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
        """Park a message and forget its failures, in one transaction.

        Args:
            letter: the message.
            body: as handlers see it, without envelopes; None: as the letter has it. Another body under an id that is
                parked becomes another letter, of reason MISMATCH.
            wait_seconds: how long to wait for another transaction that is processing the message.
            lease_attempts: where there is a ledger too: as ``park_leased``.

        Returns:
            The letter's number; None if the message is processed, and no letter is kept.

        Raises:
            InFlight: another transaction is processing the message; nothing is parked.
        """
        digest = fingerprint(letter.body if body is None else body)
        try:
            with bounded_transaction(self._engine, wait_seconds, letter.subscriber_id, letter.message_id) as connection:
                return self._park(connection, letter, digest, lease_attempts)
        except _OtherOutcome as other:
            with short_transaction(self._engine) as connection:
                self._forget_failures(connection, letter)
            return other.dead_letter_id

    def _park(self, connection: Connection, letter: DeadLetter, digest: bytes, lease_attempts: int | None) -> int:
        """Park a message and mark it in the inbox; InFlight and _OtherOutcome mean: roll back."""
        number = self.park_in(connection, letter, lease_attempts=lease_attempts)
        if letter.reason is Reason.MISMATCH:
            return number  # the message with the other body stays as it is
        key = key_of(letter)
        marked = {**key, "fingerprint": digest, "dead_letter_id": number}
        if not connection.exec_driver_sql(self._statements.mark_parked, marked).rowcount:
            row = connection.exec_driver_sql(self._statements.find_recorded, key).fetchone()
            if row is None:  # it was redriven just now
                raise InFlight(letter.subscriber_id, [letter.message_id])
            kept, parked_as = row
            if kept is not None and bytes(kept) != digest:
                connection.exec_driver_sql(
                    self._statements.mark_others_mismatch, {**key, "dead_letter_id": parked_as or 0}
                )
            elif parked_as != number:
                raise _OtherOutcome(parked_as)
        self._forget_failures(connection, letter)
        return number

    def park_in(self, connection: Connection, letter: DeadLetter, *, lease_attempts: int | None = None) -> int:
        """Park a message in the caller's transaction, and return the letter's number."""
        parameters = {**columns_of(letter), "lease_attempts": lease_attempts}
        return int(connection.exec_driver_sql(self._statements.park, parameters).scalar_one())

    def park_leased(self, letter: DeadLetter, lease_attempts: int) -> int:
        """Park a message whose ledger decides whether it is processed, and return the letter's number.

        ``lease_attempts`` is how many attempts it has had in the ledger; those after a redrive are counted from there.
        """
        with short_transaction(self._engine) as connection:
            return self.park_in(connection, letter, lease_attempts=lease_attempts)

    def waits(self, subscriber_id: str, message_id: str, body: bytes, lease_attempts: int) -> bool:
        """Return whether a message of a ledger waits here: it was parked, and neither redriven nor acked in time.

        ``body`` is as the broker delivered it: another one is another letter. ``lease_attempts``: as ``park_leased``.
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
        """Return how many attempts a message had in its ledger when it was parked last; 0 if it never was."""
        with short_transaction(self._engine) as connection:
            key = {"subscriber_id": subscriber_id, "message_id": message_id}
            found = connection.exec_driver_sql(self._statements.lease_attempts, key)
            return found.scalar_one() or 0

    def check(self, connection: Connection) -> None:
        """Check that the table is there; raises ``SchemaMissing`` if it is not."""
        refuse_other_encodings(connection)
        check_table(connection, self._statements.tables.dead_letter)

    def list(
        self, subscriber_id: str | None = None, *, redriven: bool = False, after: int = 0, limit: int = 100
    ) -> list[DeadLetter]:
        """Return a page of dead letters, oldest first.

        Args:
            subscriber_id: only this subscriber's; None for all.
            redriven: also those that were sent through again.
            after: the last number of the page before.
            limit: how many, at most.
        """
        parameters = {"subscriber_id": subscriber_id, "with_redriven": redriven, "after": after, "page": limit}
        with self._engine.connect() as connection:
            rows = connection.exec_driver_sql(self._statements.letters, parameters).mappings()
            return [letter_from(row) for row in rows]

    def get(self, dead_letter_id: int) -> DeadLetter:
        """Return one dead letter; raises ``LetterNotFound`` if there is none of that number."""
        with self._engine.connect() as connection:
            wanted = {"dead_letter_id": dead_letter_id}
            row = connection.exec_driver_sql(self._statements.letter_of, wanted).mappings().one_or_none()
        if row is None:
            raise LetterNotFound(dead_letter_id)
        return letter_from(row)

    def redrive(self, dead_letter_id: int, send: Callable[[DeadLetter], None]) -> DeadLetter:
        """Send a parked message through again, and return its letter.

        A crash between the send and the commit leaves the letter waiting although it was sent. Sending it once more is
        harmless: it keeps its message id, and the inbox rejects it.

        Args:
            dead_letter_id: the letter's number.
            send: gives the message back to its source, under the same message id; raises if it cannot.

        Raises:
            LetterNotFound: there is none of that number, or it was redriven before.
        """
        return self._redrive(dead_letter_id, lambda _, letter: send(letter))

    def republish(self, dead_letter_id: int, outbox: Outbox) -> DeadLetter:
        """Put a message that a relay has parked into the outbox again, as ``redrive`` does for workers; return it.

        It is published in the transaction that marks the letter, behind all that its key has now, under the same id.

        Args:
            dead_letter_id: the letter's number.
            outbox: where it goes; in the same database.

        Raises:
            LetterNotFound: as ``redrive``.
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
            letter = next((letter_from(row) for row in rows if row["dead_letter_id"] == dead_letter_id), None)
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
        """Delete the message's row in the inbox before it is sent: what records the copy waits for this transaction."""
        key = key_of(letter)
        connection.exec_driver_sql(self._statements.unmark_parked, key)
        if beside_others:
            connection.exec_driver_sql(
                self._statements.mark_others_mismatch, {**key, "dead_letter_id": letter.dead_letter_id}
            )
        # Its attempts count from 0 again, even if copies of it have failed meanwhile.
        self._forget_failures(connection, letter)

    def _forget_failures(self, connection: Connection, letter: DeadLetter) -> None:
        forgotten = {"subscriber_id": letter.subscriber_id, "message_ids": [letter.message_id]}
        connection.exec_driver_sql(self._failures.forget_failures, forgotten)


class _OtherOutcome(Exception):
    """The message has another outcome: it is parked as ``dead_letter_id``, or processed if that is None."""

    def __init__(self, dead_letter_id: int | None) -> None:
        self.dead_letter_id = dead_letter_id
