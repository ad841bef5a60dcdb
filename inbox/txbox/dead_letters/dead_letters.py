"""Dead letters: whole messages parked after their last attempt, until a person decides.

Parking is a short transaction of its own, before the ack: if a worker dies in between, the message is found parked when
it is redelivered.

A message is processed or parked, never both. The transaction that parks it also records it in the inbox, marked with
the letter's number. So it meets the transaction that processes the message at the primary key, and one of them wins::

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

A redrive deletes that row before it sends, in the transaction that marks the letter::

    R locks the letter ── deletes the row ── sends ── redriven_at = now() ── R commits      A: the first
                                       A, with the copy, records … waits for R ────┘
    R locks the letter ── deletes the row ── sends ── R dies                                A: parked; the letter waits
                                       A, with the copy, records … waits for R ─┘

Where the inbox rotates, that row may be in an older generation, where no primary key makes A wait. Then A waits for R
at the letter's row, and so does whoever parks the copy (``inbox.sql``, ``await_redrives``).

A discard marks the letter and keeps that row, so copies are still acked and do not run. A redrive and a discard of one
letter wait for each other at the letter's row, and the second one sees what the first one did.

A letter can be open although its message is processed: see ``DeadLetter.processed_since``, and ``dead_letters.sql`` for
how that happens. It does not wait for a person, and a redrive of it sends nothing.

Where a worker keeps order, letters of one key are redriven in order: see ``txbox.dead_letters.order``.

Letters of reason MISMATCH are the exception: another body came under an id that is processed or parked. Such a letter
says nothing about whether its id is processed; its own body is not.
"""

from collections.abc import Callable
from copy import copy
from datetime import datetime

from sqlalchemy import Connection, Engine

from txbox.dead_letters.failures import WAIT_SECONDS, FailureStatements, bounded_transaction
from txbox.dead_letters.letter import DeadLetter, DeadLetterStatements, Reason, columns_of, key_of, letter_from
from txbox.dead_letters.letter_filter import LetterFilter, filtered
from txbox.dead_letters.order import OrderStatements, ids_of
from txbox.errors import InFlight, InvalidConfiguration, LetterNotFound, OutOfOrder
from txbox.inbox.age_judge import AgeJudge, UnknownAge
from txbox.messages.destinations import INBOX
from txbox.messages.message import HEADER_KEY, Message, earliest, fingerprint, time_of_id
from txbox.outbox.outbox import Outbox
from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.engines import adopt, require_server
from txbox.postgres.transactions import check_table, short_transaction
from txbox.text import storable


class DeadLetters:
    """The dead letters of a database, of every subscriber. Parking a message twice is the same as parking it once."""

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = "") -> None:
        """Name the engine and the tables.

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
        """The engine on which the short transactions are opened."""
        return self._engine

    def on(self, engine: Engine) -> "DeadLetters":
        """Return the same dead letters on another engine of the same database."""
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
            letter: what to keep of the message. If its id is parked with another body, it becomes another letter, of
                reason MISMATCH.
            message: the message as handlers see it, without envelopes. Its age is judged now: a message from before the
                horizon may have been processed and forgotten, and is parked as EXPIRED. None: the body is the letter's,
                and no age is judged.
            wait_seconds: how long to wait for another transaction that is processing the message.
            lease_attempts: where there is a ledger too: as for ``park_leased``.
            unknown_age: as for the inbox; "park": a message of unknown time is EXPIRED, too.

        Returns:
            The letter's number; None if the message is processed, and no letter is kept.

        Raises:
            InFlight: another transaction is processing the message; nothing is parked.
        """
        digest = fingerprint(letter.body if message is None else message.body)
        # The transaction that judged the age before has ended, and this process may have been suspended since.
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
        """Park a message and mark it in the inbox. On InFlight and _OtherOutcome, the caller must roll back."""
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
        """Mark a letter as expired if its message is. This must run after the message's row in the inbox is made."""
        ages = AgeJudge(letter.subscriber_id, schema=self.schema, prefix=self.prefix)
        if (expired := ages.judge(connection, {letter.message_id: sent_at})) is not None:
            marked = {"error": storable(f"{letter.error}; {expired}"), "dead_letter_id": number}
            connection.exec_driver_sql(self._statements.mark_expired, marked)

    def park_in(self, connection: Connection, letter: DeadLetter, *, lease_attempts: int | None = None) -> int:
        """Park a message in the caller's transaction, and return the letter's number."""
        parameters = {**columns_of(letter), "lease_attempts": lease_attempts}
        return int(connection.exec_driver_sql(self._statements.park, parameters).scalar_one())

    def _take_place(self, connection: Connection, letter: DeadLetter, number: int) -> None:
        """Give a letter its place in its key: that of the message's earlier letter, if that one was redriven."""
        if letter.order_key is None:
            return
        place = {"message_ids": ids_of(letter.message_id, letter.headers), "dead_letter_id": number}
        if connection.exec_driver_sql(self._order.take_place, place).rowcount:
            handed_over = {**place, "subscriber_id": letter.subscriber_id}
            connection.exec_driver_sql(self._order.hand_over_place, handed_over)

    def park_leased(self, letter: DeadLetter, lease_attempts: int) -> int:
        """Park a message whose ledger decides whether it is processed, and return the letter's number.

        ``lease_attempts`` is how many attempts it has had in the ledger; attempts after a redrive count from there.
        """
        with short_transaction(self._engine) as connection:
            return self.park_in(connection, letter, lease_attempts=lease_attempts)

    def waits(self, subscriber_id: str, message_id: str, body: bytes, lease_attempts: int) -> bool:
        """Return whether a message of a ledger is parked or was discarded, so that no copy of it may run.

        ``body`` is as the broker delivered it; another body is another letter. ``lease_attempts`` is as for
        ``park_leased``.
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
        """Return how many attempts a message had in its ledger when it was last parked; 0 if it never was."""
        with short_transaction(self._engine) as connection:
            key = {"subscriber_id": subscriber_id, "message_id": message_id}
            found = connection.exec_driver_sql(self._statements.lease_attempts, key)
            return found.scalar_one() or 0

    def check(self, connection: Connection) -> None:
        """Raise ``SchemaMissing`` unless the table exists."""
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
            which: a filter, or a subscriber's name; None: all.
            redriven: also those that do not wait: sent through again, discarded, or processed since.
            after: the last number of the previous page.
            limit: how many, at most.
            body_bytes: read only the first so many bytes of each body; None: all.

        Raises:
            InvalidConfiguration: the filter's JSON path is not valid.
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
            body_from: with ``body_bytes``: skip so many bytes at the start of the body.
            body_bytes: read only so many bytes of the body; None: all. ``body_size`` is always that of the whole.

        Raises:
            LetterNotFound: no letter has that number.
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

        After a crash between the send and the commit, the letter still waits although it was sent. Sending it once more
        is harmless: it keeps its message id, and the inbox rejects the duplicate.

        Args:
            dead_letter_id: the letter's number.
            send: gives the message back to its source, under the same message id; raises if it cannot.
            by: who has it sent; for the record.
            expired: redrive it even if it was parked as expired. The inbox has forgotten whether it was processed, so
                check that first: it will run. From then on its message counts as sent now, like any redriven one.

        Raises:
            LetterNotFound: no letter has that number, or it no longer waits: it was redriven or discarded before, or
                its message was processed since.
            OutOfOrder: an earlier letter holds its key, and waits.
            InvalidConfiguration: it was parked as expired.
        """
        with short_transaction(self._engine) as connection:
            return self.redrive_in(connection, dead_letter_id, lambda _, letter: send(letter), by=by, expired=expired)

    def republish(
        self, dead_letter_id: int, outbox: Outbox, *, by: str | None = None, expired: bool = False
    ) -> DeadLetter:
        """Put a message into the outbox again, and return its letter: ``redrive`` for what never left this database.

        A relay parked it, or a worker that had it from ``inbox:SUBSCRIBER``. The message is published in the
        transaction that marks the letter, under the same id, behind everything that its key has now.

        Args:
            dead_letter_id: the letter's number.
            outbox: where it goes; in the same database.
            by: who has it sent; for the record.
            expired: as for ``redrive``.

        Raises:
            LetterNotFound: as for ``redrive``.
            InvalidConfiguration: it came from a queue; or it was parked as expired.
            NotSendable: its destination cannot take it.
        """

        with short_transaction(self._engine) as connection:
            return self.redrive_in(
                connection,
                dead_letter_id,
                lambda same, letter: republish_in(same, letter, outbox),
                by=by,
                expired=expired,
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

        If this raises, roll the transaction back.

        Args:
            connection: the transaction's, at READ COMMITTED.
            dead_letter_id: the letter's number.
            send: gives the message back to its source, or puts it into the outbox on the connection.
            by: who has it sent; for the record.
            expired: as for ``redrive``.

        Raises:
            LetterNotFound: no letter has that number, or it no longer waits.
            OutOfOrder: an earlier letter holds its key, and waits.
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
        """Give a parked message up, and return its letter. The message never runs; copies of it are still acked.

        This also discards a redriven letter that still holds its key because its copy is lost.

        Args:
            dead_letter_id: the letter's number.
            note: why, for the record; not empty.
            by: who gives it up.

        Raises:
            LetterNotFound: no letter has that number, or it was redriven or discarded before.
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
        """Give a parked message up in the caller's transaction, as ``discard`` does.

        ``on_its_way``: also discard a letter that was redriven and holds its key. Pass False if the letter was selected
        because it waited: it may have been sent since, and its copy would be refused. ``body_bytes``: return only so
        much of the body; None: all.
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
        """Record a redriven letter's message as given up; raise ``LetterNotFound`` if its copy was processed."""
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
        """Delete the message's row in the inbox before the send, so that recording the copy waits for this transaction.

        It waits at the primary key or, if the row is in an older generation, at the letter's row, which is locked.
        """
        key = key_of(letter)
        connection.exec_driver_sql(self._statements.unmark_parked, key)
        if beside_others:
            self._take_place(connection, letter, letter.dead_letter_id or 0)  # before the others lose theirs
            connection.exec_driver_sql(
                self._statements.mark_others_mismatch, {**key, "dead_letter_id": letter.dead_letter_id}
            )
        # Its attempts count from 0 again, even if copies of it have failed in the meantime.
        self._forget_failures(connection, letter)

    def _forget_failures(self, connection: Connection, letter: DeadLetter) -> None:
        forgotten = {"subscriber_id": letter.subscriber_id, "message_ids": [letter.message_id]}
        connection.exec_driver_sql(self._failures.forget_failures, forgotten)


def republish_in(connection: Connection, letter: DeadLetter, outbox: Outbox, destination: str | None = None) -> None:
    """Put a letter that was in the outbox into it again, in the transaction that marks the letter.

    ``destination``: where to, for a letter of ``inbox:SUBSCRIBER``; None: where it came from.
    """
    published = letter.envelope.get("outbox") or (letter.envelope if letter.source.startswith(INBOX) else None)
    if published is None:
        raise InvalidConfiguration(
            f"dead letter {letter.dead_letter_id} was received by {letter.subscriber_id} in its broker's envelope; "
            f"send it to its source, {letter.source}"
        )
    key = published.get("key")
    added = {HEADER_KEY: key}.items()  # by the worker, to what was published
    outbox.publish(
        connection,
        destination or letter.source,
        letter.body,
        key=key,
        headers=dict(letter.headers.items() - added),
        message_id=letter.message_id,
    )


def _name(of: str | None) -> str | None:
    return None if of is None else storable(of)


def _require_open(letter: DeadLetter) -> None:
    for what, at in (("redriven", letter.redriven_at), ("discarded", letter.discarded_at)):
        if at is not None:
            raise LetterNotFound(letter.dead_letter_id or 0, f"was {what} before, at {at:%Y-%m-%d %H:%M:%S%z}")


class _OtherOutcome(Exception):
    """The message is parked as ``dead_letter_id``, or it is processed if that is None."""

    def __init__(self, dead_letter_id: int | None) -> None:
        self.dead_letter_id = dead_letter_id
