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

Where the inbox rotates, that row may be of an older generation, where no primary key makes A wait: then it waits for R
at the letter's row, and so does who parks the copy (``inbox.sql``, ``await_redrives``).

A discard marks the letter and leaves that row, so copies go on being acked and not run. A redrive and a discard of one
letter wait for each other at the letter's row, and the second one finds what the first one did.

A letter can be open although its message is processed: ``DeadLetter.processed_since``, and how it comes about in
``dead_letters.sql``. It does not wait for a person, and a redrive of it sends nothing.

Where a worker keeps order, letters of one key are redriven in order: see ``txbox.dead_letters.order``.

Letters of reason MISMATCH are the exception: another body came under an id that is processed, or parked. Such a letter
leaves open whether its id is processed; the body in it is not.
"""

from collections.abc import Callable
from copy import copy
from datetime import datetime

from sqlalchemy import Connection, Engine

from txbox.dead_letters.failures import WAIT_SECONDS, FailureStatements, bounded_transaction
from txbox.dead_letters.letter import DeadLetter, Reason, columns_of, key_of, letter_from
from txbox.dead_letters.letter_filter import LetterFilter, filtered
from txbox.dead_letters.order import OrderStatements, ids_of
from txbox.dead_letters.statements import DeadLetterStatements
from txbox.errors import InFlight, InvalidConfiguration, LetterNotFound, OutOfOrder
from txbox.inbox.age_judge import AgeJudge, UnknownAge
from txbox.messages.message import Message, earliest, fingerprint, time_of_id
from txbox.outbox.outbox import Outbox
from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.engines import adopt, require_server
from txbox.postgres.transactions import check_table, short_transaction
from txbox.text import storable

__all__ = ["DeadLetters"]


class DeadLetters:
    """The dead letters of a database, of every subscriber. Parking a message twice is parking it once."""

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = "") -> None:
        """Name where the tables are.

        Args:
            engine: where to open the short transactions.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
        """
        self.schema, self.prefix = schema, prefix
        self._engine = adopt(engine)
        self._statements = DeadLetterStatements.load(schema, prefix)
        self._failures = FailureStatements.load(schema, prefix)
        self._order = OrderStatements.load(schema, prefix)

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
        message: Message | None = None,
        wait_seconds: float = WAIT_SECONDS,
        lease_attempts: int | None = None,
        unknown_age: UnknownAge = "process",
    ) -> int | None:
        """Park a message and forget its failures, in one transaction.

        Args:
            letter: what is kept of the message. Another body under an id that is parked becomes another letter, of
                reason MISMATCH.
            message: as handlers see it, without envelopes. Its age is judged now: one from before the horizon may have
                been processed and forgotten, and is parked as EXPIRED. None: the body is the letter's, and no age is
                judged.
            wait_seconds: how long to wait for another transaction that is processing the message.
            lease_attempts: where there is a ledger too: as ``park_leased``.
            unknown_age: as the inbox has it; "park": a message of which no time is known is EXPIRED, too.

        Returns:
            The letter's number; None if the message is processed, and no letter is kept.

        Raises:
            InFlight: another transaction is processing the message; nothing is parked.
        """
        digest = fingerprint(letter.body if message is None else message.body)
        # A transaction that judged it before has ended, and this process may have been suspended since.
        sent_at = None if message is None else earliest(message.sent_at, time_of_id(message.id))
        judged = message is not None and (sent_at is not None or unknown_age == "park")
        try:
            with bounded_transaction(self._engine, wait_seconds, letter.subscriber_id, letter.message_id) as connection:
                return self._park(connection, letter, digest, lease_attempts, sent_at, judged=judged)
        except _OtherOutcome as other:
            with short_transaction(self._engine) as connection:
                self._forget_failures(connection, letter)
            return other.dead_letter_id

    def _park(
        self,
        connection: Connection,
        letter: DeadLetter,
        digest: bytes,
        lease_attempts: int | None,
        sent_at: datetime | None,
        *,
        judged: bool,
    ) -> int:
        """Park a message and mark it in the inbox; InFlight and _OtherOutcome mean: roll back."""
        number = self.park_in(connection, letter, lease_attempts=lease_attempts)
        if letter.reason is Reason.MISMATCH:
            return number  # the message with the other body stays as it is
        key = key_of(letter)
        marked = {**key, "fingerprint": digest, "dead_letter_id": number}
        if not connection.exec_driver_sql(self._statements.mark_parked, marked).rowcount:
            row = connection.exec_driver_sql(self._statements.find_recorded, key).fetchone()
            if row is not None and row.dead_letter_id not in (None, number):
                connection.exec_driver_sql(self._statements.await_redrive, {"dead_letter_id": row.dead_letter_id})
                row = connection.exec_driver_sql(self._statements.find_recorded, key).fetchone()
            if row is None:  # it was redriven just now
                raise InFlight(letter.subscriber_id, [letter.message_id])
            kept, parked_as = row
            if kept is not None and bytes(kept) != digest:
                connection.exec_driver_sql(
                    self._statements.mark_others_mismatch, {**key, "dead_letter_id": parked_as or 0}
                )
                self._forget_failures(connection, letter)
                return number
            if parked_as != number:
                raise _OtherOutcome(parked_as)
        elif judged:
            self._judge(connection, letter, number, sent_at)
        self._take_place(connection, letter, number)
        self._forget_failures(connection, letter)
        return number

    def _judge(self, connection: Connection, letter: DeadLetter, number: int, sent_at: datetime | None) -> None:
        """Make a letter one of an expired message if it is; asked after its row in the inbox is made."""
        ages = AgeJudge(letter.subscriber_id, schema=self.schema, prefix=self.prefix)
        if (expired := ages.judge(connection, {letter.message_id: sent_at})) is not None:
            marked = {"error": storable(f"{letter.error}; {expired}"), "dead_letter_id": number}
            connection.exec_driver_sql(self._statements.mark_expired, marked)

    def park_in(self, connection: Connection, letter: DeadLetter, *, lease_attempts: int | None = None) -> int:
        """Park a message in the caller's transaction, and return the letter's number."""
        parameters = {**columns_of(letter), "lease_attempts": lease_attempts}
        return int(connection.exec_driver_sql(self._statements.park, parameters).scalar_one())

    def _take_place(self, connection: Connection, letter: DeadLetter, number: int) -> None:
        """Give a letter its place in its key: that of an earlier letter of its message, if that one was redriven."""
        if letter.order_key is None:
            return
        place = {"message_ids": ids_of(letter.message_id, letter.headers), "dead_letter_id": number}
        if connection.exec_driver_sql(self._order.take_place, place).rowcount:
            handed_over = {**place, "subscriber_id": letter.subscriber_id}
            connection.exec_driver_sql(self._order.hand_over_place, handed_over)

    def park_leased(self, letter: DeadLetter, lease_attempts: int) -> int:
        """Park a message whose ledger decides whether it is processed, and return the letter's number.

        ``lease_attempts`` is how many attempts it has had in the ledger; those after a redrive are counted from there.
        """
        with short_transaction(self._engine) as connection:
            return self.park_in(connection, letter, lease_attempts=lease_attempts)

    def waits(self, subscriber_id: str, message_id: str, body: bytes, lease_attempts: int) -> bool:
        """Return whether a message of a ledger is parked here, or was discarded: no copy of it may run.

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
        require_server(connection)
        check_table(connection, self._statements.tables.dead_letter)

    def list(
        self,
        which: LetterFilter | str | None = None,
        *,
        redriven: bool = False,
        after: int = 0,
        limit: int = 100,
        body_bytes: int | None = None,
    ) -> "list[DeadLetter]":
        """Return a page of dead letters, oldest first.

        Args:
            which: of them; a name is that of a subscriber; None: all.
            redriven: also those that do not wait: sent through again, discarded, or processed since.
            after: the last number of the page before.
            limit: how many, at most.
            body_bytes: of each body, only so many bytes are read, the first ones; None: all.

        Raises:
            InvalidConfiguration: the filter's JSON path is none.
        """
        which = which if isinstance(which, LetterFilter) else LetterFilter(subscriber_id=which)
        parameters = {**which.parameters(), "all": redriven, "after": after, "page": limit}
        parameters |= {"body_from": 0, "body_bytes": body_bytes}
        with short_transaction(self._engine) as connection, filtered(connection, self._statements, which) as adapted:
            rows = connection.exec_driver_sql(adapted(self._statements.letters), parameters).mappings()
            return [letter_from(row) for row in rows]

    def get(self, dead_letter_id: int, *, body_from: int = 0, body_bytes: int | None = None) -> DeadLetter:
        """Return one dead letter.

        Args:
            dead_letter_id: its number.
            body_from: with ``body_bytes``: so many bytes of the body are left out at its start.
            body_bytes: of the body, only so many bytes are read; None: all. ``body_size`` is that of the whole.

        Raises:
            LetterNotFound: there is none of that number.
        """
        with self._engine.connect() as connection, own_cursors(connection):
            return self._read(connection, dead_letter_id, body_from, body_bytes)

    def redrive(
        self,
        dead_letter_id: int,
        send: Callable[[DeadLetter], None],
        *,
        by: str | None = None,
        expired: bool = False,
    ) -> DeadLetter:
        """Send a parked message through again, and return its letter.

        A crash between the send and the commit leaves the letter waiting although it was sent. Sending it once more is
        harmless: it keeps its message id, and the inbox rejects it.

        Args:
            dead_letter_id: the letter's number.
            send: gives the message back to its source, under the same message id; raises if it cannot.
            by: who has it sent; for the record.
            expired: also if it was parked as expired. Whether it was processed is forgotten, so check that before: it
                runs. From then on its message counts as sent now, as that of any letter that is redriven.

        Raises:
            LetterNotFound: there is none of that number, or it does not wait any more: it was redriven or discarded
                before, or its message was processed since.
            OutOfOrder: a letter before it holds its key, and waits.
            InvalidConfiguration: it was parked as expired.
        """
        with short_transaction(self._engine) as connection:
            return self.redrive_in(connection, dead_letter_id, lambda _, letter: send(letter), by=by, expired=expired)

    def republish(self, dead_letter_id: int, outbox: Outbox, *, by: str | None = None) -> DeadLetter:
        """Put a message that a relay has parked into the outbox again, as ``redrive`` does for workers; return it.

        It is published in the transaction that marks the letter, behind all that its key has now, under the same id.

        Args:
            dead_letter_id: the letter's number.
            outbox: where it goes; in the same database.
            by: who has it sent; for the record.

        Raises:
            LetterNotFound: as ``redrive``.
            InvalidConfiguration: a worker has parked it, not a relay.
            NotSendable: its destination cannot take it.
        """

        with short_transaction(self._engine) as connection:
            return self.redrive_in(
                connection, dead_letter_id, lambda same, letter: republish_in(same, letter, outbox), by=by
            )

    def redrive_in(
        self,
        connection: Connection,
        dead_letter_id: int,
        send: Callable[[Connection, DeadLetter], None],
        *,
        by: str | None = None,
        expired: bool = False,
    ) -> DeadLetter:
        """Send a parked message through again in the caller's transaction, and return its letter.

        If this raises, the transaction has to be rolled back.

        Args:
            connection: of the transaction, which is at READ COMMITTED.
            dead_letter_id: the letter's number.
            send: gives the message back to its source, or puts it into the outbox on the connection.
            by: who has it sent; for the record.
            expired: as for ``redrive``.

        Raises:
            LetterNotFound: there is none of that number, or it waits no more.
            OutOfOrder: a letter before it holds its key, and waits.
            InvalidConfiguration: it was parked as expired.
        """
        wanted = {"dead_letter_id": dead_letter_id}
        locked = connection.exec_driver_sql(self._statements.lock_letters, wanted).all()
        letter = self._read(connection, dead_letter_id)
        _require_open(letter)
        if letter.processed_since:
            raise LetterNotFound(dead_letter_id, "is not sent: its message was processed since", processed=True)
        if letter.reason is Reason.EXPIRED and not expired:
            raise InvalidConfiguration(
                f"dead letter {dead_letter_id} is too old to tell whether its message was processed; check that: if it "
                "was not, redrive it with --expired (expired=True); if it was, discard it"
            )
        if letter.order_key is not None:
            before = connection.exec_driver_sql(self._order.find_before, wanted).scalar_one_or_none()
            if before is not None:
                raise OutOfOrder(dead_letter_id, before, letter.order_key)
        if "outbox" not in letter.envelope:  # what a relay has parked was never received
            self._unpark(connection, letter, beside_others=len(locked) > 1)
        send(connection, letter)
        connection.exec_driver_sql(self._statements.mark_redriven, {**wanted, "redriven_by": _name(by)})
        return letter

    def discard(self, dead_letter_id: int, *, note: str, by: str | None = None) -> DeadLetter:
        """Give a parked message up, and return its letter: it is never run, and copies of it go on being acked.

        A letter that was redriven, and still holds its key because its copy is lost, can be discarded, too.

        Args:
            dead_letter_id: the letter's number.
            note: why, for the record; not empty.
            by: who gives it up.

        Raises:
            LetterNotFound: there is none of that number, or it was redriven or discarded before.
            InvalidConfiguration: the note is empty.
        """
        with short_transaction(self._engine) as connection:
            return self.discard_in(connection, dead_letter_id, note=note, by=by)

    def discard_in(
        self,
        connection: Connection,
        dead_letter_id: int,
        *,
        note: str,
        by: str | None = None,
        on_its_way: bool = True,
        body_bytes: int | None = None,
    ) -> DeadLetter:
        """Give a parked message up in the caller's transaction, as ``discard``.

        ``on_its_way``: also one that was redriven and holds its key. Not where it was chosen because it waited: its
        copy, which was sent since, would be refused. ``body_bytes``: so much of the body is returned; None: all.
        """
        if not note.strip():
            raise InvalidConfiguration("to discard a dead letter takes a note that says why")
        wanted = {"dead_letter_id": dead_letter_id}
        connection.exec_driver_sql(self._statements.lock_letters, wanted)
        letter = self._read(connection, dead_letter_id, body_bytes=body_bytes)
        holds = letter.order_position is not None and letter.discarded_at is None
        if on_its_way and holds and letter.redriven_at is not None:
            self._refuse_copy(connection, letter)
        else:
            _require_open(letter)
        marked = {**wanted, "discarded_by": _name(by), "note": storable(note)}
        connection.exec_driver_sql(self._statements.mark_discarded, marked)
        return letter

    def _refuse_copy(self, connection: Connection, letter: DeadLetter) -> None:
        """Record the message of a letter that was redriven as given up; raise if its copy was processed."""
        marked = {**key_of(letter), "fingerprint": None, "dead_letter_id": letter.dead_letter_id}
        if not connection.exec_driver_sql(self._statements.mark_parked, marked).rowcount:
            number = letter.dead_letter_id or 0
            raise LetterNotFound(number, "is not discarded: its message was processed since", processed=True)

    def _read(
        self, connection: Connection, dead_letter_id: int, body_from: int = 0, body_bytes: int | None = None
    ) -> DeadLetter:
        wanted = {"dead_letter_id": dead_letter_id, "body_from": body_from, "body_bytes": body_bytes}
        row = connection.exec_driver_sql(self._statements.letter_of, wanted).mappings().one_or_none()
        if row is None:
            raise LetterNotFound(dead_letter_id)
        return letter_from(row)

    def _unpark(self, connection: Connection, letter: DeadLetter, *, beside_others: bool) -> None:
        """Delete the message's row in the inbox before it is sent: what records the copy waits for this transaction.

        At the primary key; or at the letter's row, which is locked, where the row is of an older generation.
        """
        key = key_of(letter)
        connection.exec_driver_sql(self._statements.unmark_parked, key)
        if beside_others:
            self._take_place(connection, letter, letter.dead_letter_id or 0)  # before the others lose theirs
            connection.exec_driver_sql(
                self._statements.mark_others_mismatch, {**key, "dead_letter_id": letter.dead_letter_id}
            )
        # Its attempts count from 0 again, even if copies of it have failed meanwhile.
        self._forget_failures(connection, letter)

    def _forget_failures(self, connection: Connection, letter: DeadLetter) -> None:
        forgotten = {"subscriber_id": letter.subscriber_id, "message_ids": [letter.message_id]}
        connection.exec_driver_sql(self._failures.forget_failures, forgotten)


def republish_in(connection: Connection, letter: DeadLetter, outbox: Outbox) -> None:
    """Put a relay's letter into the outbox again, in the transaction that marks it."""
    published = letter.envelope.get("outbox")
    if published is None:
        raise InvalidConfiguration(
            f"dead letter {letter.dead_letter_id} was received by {letter.subscriber_id}; send it to its source"
        )
    outbox.publish(
        connection,
        letter.source,
        letter.body,
        key=published["key"],
        headers=letter.headers,
        message_id=letter.message_id,
    )


def _name(of: str | None) -> str | None:
    return None if of is None else storable(of)


def _require_open(letter: DeadLetter) -> None:
    for what, at in (("redriven", letter.redriven_at), ("discarded", letter.discarded_at)):
        if at is not None:
            raise LetterNotFound(letter.dead_letter_id or 0, f"was {what} before, at {at:%Y-%m-%d %H:%M:%S%z}")


class _OtherOutcome(Exception):
    """The message has another outcome: it is parked as ``dead_letter_id``, or processed if that is None."""

    def __init__(self, dead_letter_id: int | None) -> None:
        self.dead_letter_id = dead_letter_id
