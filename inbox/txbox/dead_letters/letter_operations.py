"""Redrives and discards of many letters: selected once, kept on record, carried out letter by letter.

::

    select       one transaction: records who asks for what, and which letters the filter matches now
    carry out    one transaction for each selected letter, by number: send, mark the letter, record the outcome

Letters parked later are not part of it. A process that dies leaves its current letter as it was, and the rest of the
selection without an outcome: ``carry_out`` goes on with those. If a process died between sending a letter and the
commit, the letter is sent again under the same message id, which its inbox rejects.

Two processes may carry out one operation, or two whose selections overlap. No letter is sent by both::

    A locks the row of letter 5 in the selection ── locks letter 5 ── sends ── marks it, keeps the outcome ── commits
    B of the same operation                waits for that row … finds its outcome, goes on to letter 6
    C of another operation that has letter 5       waits for the letter … finds it redriven: GONE

Where workers keep order, messages that are in the queue before the copies of a key's letters are parked behind them. A
redrive *until its keys are free* goes on with those: round by round, it adds them to its selection and sends them,
until no key of its letters is held. It ends earlier, and leaves the operation unfinished, when

- every key that is still held is *stuck*: the first waiting letter has failed again or could not be sent, and needs a
  person;
- its time is over: no worker processes the copies, or messages of the key arrive so fast that another is always parked
  before the last copy is processed. No order is lost, and each message runs at its second delivery; to free such a key,
  its producer has to pause.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from txbox.dead_letters.dead_letters import DeadLetters, republish_in
from txbox.dead_letters.failures import MAX_ERROR_CHARACTERS
from txbox.dead_letters.letter import DeadLetter, DeadLetterStatements, Reason
from txbox.dead_letters.letter_filter import LetterFilter, filtered
from txbox.dead_letters.letter_operation import (
    HeldKey,
    LetterCount,
    LetterOperation,
    LetterOutcome,
    LetterResult,
    OperationKind,
    operation_from,
)
from txbox.dead_letters.order import OrderStatements
from txbox.errors import InvalidConfiguration, LetterNotFound, OperationNotFound, OutOfOrder
from txbox.messages.destinations import INBOX
from txbox.outbox.outbox import Outbox
from txbox.postgres.engines import adopt
from txbox.postgres.sql import moment
from txbox.postgres.transactions import check_table, short_transaction
from txbox.text import storable

LEAST_PER_SECOND = 0.001
"""One letter in about a quarter of an hour."""

FOLLOW_SECONDS = 0.2
"""The shortest pause between two looks at what was parked behind an operation's letters."""


class LetterOperations:
    """Redrives and discards of many dead letters of a database."""

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = "") -> None:
        """Name the engine and the tables.

        Args:
            engine: where to open the short transactions.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
        """
        self._engine = adopt(engine)
        self._letters = DeadLetters(engine, schema=schema, prefix=prefix)
        self._outbox = Outbox(schema=schema, prefix=prefix)
        self._statements = DeadLetterStatements.load(schema, prefix)
        self._order = OrderStatements.load(schema, prefix)

    def counts(self, which: LetterFilter, *, expired: bool = False) -> "list[LetterCount]":
        """Return how many letters a filter matches now, by subscriber and reason. This selects nothing.

        ``expired`` is as for ``select``: without it, letters parked as expired hold back what is behind them.
        """
        parameters = {**which.parameters(), "all": False, "expired": expired}
        with short_transaction(self._engine) as connection, filtered(connection, self._statements, which) as adapted:
            rows = connection.exec_driver_sql(adapted(self._statements.matching_counts), parameters)
            return [
                LetterCount(of, Reason(reason), count, moment(oldest), behind)
                for of, reason, count, oldest, behind in rows
            ]

    def passed_over(self, which: LetterFilter, *, redriven: bool = False) -> int:
        """Return how many letters the filter's JSON path cannot check, because Postgres cannot read their bodies.

        They are not JSON, are nested too deeply for the server, or have a ``\\u0000``. Without a JSON path, return 0.

        Args:
            which: the filter; its other conditions hold for the letters counted.
            redriven: also count those that do not wait, as in ``DeadLetters.list``.

        Raises:
            InvalidConfiguration: the filter's JSON path is not valid.
        """
        if which.json_path is None:
            return 0
        parameters = {**which.parameters(), "all": redriven}
        with short_transaction(self._engine) as connection, filtered(connection, self._statements, which):
            return int(connection.exec_driver_sql(self._statements.passed_over, parameters).scalar_one())

    def select(
        self,
        which: LetterFilter,
        kind: OperationKind,
        *,
        by: str,
        note: str | None = None,
        queue_url: str | None = None,
        per_second: float | None = None,
        expired: bool = False,
        until_free_seconds: float | None = None,
    ) -> LetterOperation | None:
        """Record which letters a filter matches now and what to do with them; ``carry_out`` does it.

        Args:
            which: the filter.
            kind: redrive or discard.
            by: who asks for it.
            note: why; required for a discard.
            queue_url: kept for ``send``: a queue other than the letters' own.
            per_second: letters per second, at most; None: no limit.
            expired: also redrive letters that were parked as expired; see ``DeadLetters.redrive``.
            until_free_seconds: go on with what is parked behind the letters in the meantime, until their keys are free,
                for at most so many seconds each time it is carried out. None: only the selection.

        Returns:
            The operation; None if no letter matches, and then nothing is recorded.

        Raises:
            InvalidConfiguration: the filter's JSON path is not valid, or a discard has no note.
        """
        if kind is OperationKind.DISCARD and not (note or "").strip():
            raise InvalidConfiguration("to discard dead letters takes a note that says why")
        options = {
            "queue_url": queue_url,
            "per_second": _at_least(LEAST_PER_SECOND, "per_second", per_second),
            "expired": expired or None,
            "until_free_seconds": _at_least(0, "until_free_seconds", until_free_seconds),
        }
        operation = {
            "kind": kind.value,
            "filter": json.dumps(which.as_dict()),
            "options": json.dumps({name: value for name, value in options.items() if value is not None}),
            "note": None if note is None else storable(note),
            "requested_by": storable(by),
        }
        with short_transaction(self._engine) as connection:
            check_table(connection, self._statements.tables.dead_letter_operation)
            operation_id = connection.exec_driver_sql(self._statements.store_operation, operation).scalar_one()
            parameters = {**which.parameters(), "all": False, "operation_id": operation_id}
            with filtered(connection, self._statements, which) as adapted:
                stored = connection.exec_driver_sql(adapted(self._statements.store_selection), parameters).rowcount
            if not stored:
                connection.rollback()
                return None
            return self._read(connection, operation_id)

    def carry_out(
        self,
        operation_id: int,
        send: Callable[[DeadLetter], None] | None = None,
        *,
        by: str | None = None,
        per_second: float | None = None,
        report: Callable[[LetterResult], object] = lambda _: None,
        pause: Callable[[float], bool | None] = time.sleep,
    ) -> LetterOperation:
        """Carry out an operation on its letters that are left or have failed, in order of their numbers.

        Letters of a relay and of ``inbox:SUBSCRIBER`` go back into the outbox. With ``ordered=True`` workers, a letter
        that waits behind another of its key is redriven after that one if the operation has both; otherwise it fails.

        Args:
            operation_id: its number.
            send: gives a letter back to its source, as for ``DeadLetters.redrive``; what it raises becomes that
                letter's outcome. Not needed for a discard, nor for letters that go back into the outbox.
            by: who carries it out; None: who asked for it.
            per_second: letters per second, at most; None: as selected. There is no burst after a pause.
            report: called with each letter's result, after its commit.
            pause: waits so many seconds, 0 if there is nothing to wait for; returns true to end here.

        Returns:
            The operation as it stands: unfinished if it was ended early or letters failed.

        Raises:
            OperationNotFound: no operation has that number.
            SQLAlchemyError: the database cannot be used. What was committed stands; the rest is left.
        """
        operation = self.get(operation_id)
        per_second = _at_least(LEAST_PER_SECOND, "per_second", per_second) or operation.options.get("per_second")
        until_free_seconds = operation.options.get("until_free_seconds")
        work = self._work_of(operation, send, by or operation.requested_by)
        wanted = {"operation_id": operation_id}
        with short_transaction(self._engine) as connection:
            connection.exec_driver_sql(self._statements.retry_failed, wanted)
        started = time.monotonic()
        due, wait, after = 0.0, 0.0, 0
        while not pause(wait):
            begun = time.monotonic()
            step = self._do_next(operation_id, after, work)
            if step is not None:
                due, after = begun + (1 / per_second if per_second else 0.0), step.after
                report(step.result)
                wait = max(0.0, due - time.monotonic()) if per_second and self._is_left(operation_id, after) else 0.0
            elif until_free_seconds is None or begun >= started + until_free_seconds or not self._follow(operation_id):
                break
            else:  # the larger the selection, the longer the pause between looks
                now = time.monotonic()
                wait, after = max(FOLLOW_SECONDS, 4 * (now - begun), due - now), 0
        if until_free_seconds is None or not self.held_keys(operation_id):
            with short_transaction(self._engine) as connection:
                connection.exec_driver_sql(self._statements.finish_operation, wanted)
        return self.get(operation_id)

    def held_keys(self, operation_id: int) -> "list[HeldKey]":
        """Return the keys of an operation's letters that are held now; empty if all are free."""
        with short_transaction(self._engine) as connection:
            return self._held_keys(connection, operation_id)

    def _held_keys(self, connection: Connection, operation_id: int) -> "list[HeldKey]":
        found = connection.exec_driver_sql(self._order.held_by_operation, {"operation_id": operation_id})
        return [HeldKey(*row) for row in found]

    def _follow(self, operation_id: int) -> bool:
        """Select what was parked behind an operation's letters since. Return whether its keys may still become free."""
        with short_transaction(self._engine) as connection:
            connection.exec_driver_sql(self._order.follow, {"operation_id": operation_id})
            return any(not held.stuck for held in self._held_keys(connection, operation_id))

    def list(self, *, unfinished: bool = False, limit: int = 100) -> "list[LetterOperation]":
        """Return the operations, newest first; ``unfinished``: only those that are not done."""
        parameters = {"operation_id": None, "unfinished": unfinished, "page": limit}
        with short_transaction(self._engine) as connection:
            check_table(connection, self._statements.tables.dead_letter_operation)
            return [
                operation_from(row)
                for row in connection.exec_driver_sql(self._statements.operations, parameters).mappings()
            ]

    def get(self, operation_id: int) -> LetterOperation:
        """Return one operation; raise ``OperationNotFound`` if no operation has that number."""
        with short_transaction(self._engine) as connection:
            check_table(connection, self._statements.tables.dead_letter_operation)
            return self._read(connection, operation_id)

    def _read(self, connection: Connection, operation_id: int) -> LetterOperation:
        parameters = {"operation_id": operation_id, "unfinished": False, "page": 1}
        row = connection.exec_driver_sql(self._statements.operations, parameters).mappings().one_or_none()
        if row is None:
            raise OperationNotFound(operation_id)
        return operation_from(row)

    def _work_of(self, operation: LetterOperation, send: Callable[[DeadLetter], None] | None, by: str) -> "_Work":
        """Return the function that handles one letter, in the transaction that records its outcome."""
        if operation.kind is OperationKind.DISCARD:
            note, named = operation.note or "", "numbers" in operation.filter

            def discard(connection: Connection, dead_letter_id: int) -> LetterResult:
                self._letters.discard_in(connection, dead_letter_id, note=note, by=by, on_its_way=named, body_bytes=0)
                return LetterResult(dead_letter_id, LetterOutcome.DISCARDED)

            return discard

        def give_back(connection: Connection, letter: DeadLetter) -> None:
            try:
                if "outbox" in letter.envelope and "queue_url" in operation.options:
                    raise InvalidConfiguration("it was never sent, so it has no queue; leave out --queue")
                target = operation.options.get("queue_url", letter.source)
                if "outbox" in letter.envelope or target.startswith(INBOX):
                    republish_in(connection, letter, self._outbox, target)
                elif send is None:
                    raise InvalidConfiguration("it came from a queue: give carry_out the function that sends it there")
                else:
                    send(letter)
            except SQLAlchemyError:
                raise
            except Exception as error:
                raise _NotSent from error

        def redrive(connection: Connection, dead_letter_id: int) -> LetterResult:
            expired = bool(operation.options.get("expired"))
            try:
                letter = self._letters.redrive_in(connection, dead_letter_id, give_back, by=by, expired=expired)
            except InvalidConfiguration as error:
                raise _NotSent from error
            return LetterResult(dead_letter_id, LetterOutcome.REDRIVEN, to_outbox="outbox" in letter.envelope)

        return redrive

    def _is_left(self, operation_id: int, after: int) -> bool:
        """Whether a letter is left, so that the pace has to wait for it."""
        with short_transaction(self._engine) as connection:
            wanted = {"operation_id": operation_id, "after": after}
            return connection.exec_driver_sql(self._statements.next_selected, wanted).first() is not None

    def _do_next(self, operation_id: int, after: int, work: "_Work") -> "_Step | None":
        wanted = {"operation_id": operation_id, "after": after}
        number, done_up_to = after, after
        try:
            with short_transaction(self._engine) as connection:
                found = connection.exec_driver_sql(self._statements.next_selected, wanted).scalar()
                if found is None:
                    return None
                number = done_up_to = int(found)
                try:
                    result = work(connection, number)
                except OutOfOrder as error:
                    ahead = {"operation_id": operation_id, "dead_letter_id": error.before}
                    if connection.exec_driver_sql(self._statements.lock_selected, ahead).first() is not None:
                        number, done_up_to = error.before, after
                    result = _try(work, connection, number)
                except LetterNotFound as error:
                    result = _refused(number, error)
                self._record(connection, operation_id, result)
                return _Step(result, done_up_to)
        except _NotSent as error:
            why = error.__cause__
            result = LetterResult(number, LetterOutcome.FAILED, f"dead letter {number} was not sent: {why}")
        # The transaction of the send was rolled back, so the outcome takes another one.
        with short_transaction(self._engine) as connection:
            self._record(connection, operation_id, result)
        return _Step(result, done_up_to)

    def _record(self, connection: Connection, operation_id: int, result: LetterResult) -> None:
        parameters = {
            "operation_id": operation_id,
            "dead_letter_id": result.dead_letter_id,
            "outcome": result.outcome.value,
            "error": None if result.error is None else storable(result.error)[:MAX_ERROR_CHARACTERS],
        }
        connection.exec_driver_sql(self._statements.record_outcome, parameters)


@dataclass(frozen=True, slots=True)
class _Step:
    """A letter's result, and the number up to which the operation's letters are done."""

    result: LetterResult
    after: int


_Work = Callable[[Connection, int], LetterResult]


class _NotSent(Exception):
    """A letter could not be sent; the cause says why."""


def _try(work: _Work, connection: Connection, number: int) -> LetterResult:
    try:
        return work(connection, number)
    except (LetterNotFound, OutOfOrder) as error:
        return _refused(number, error)


def _refused(number: int, error: LetterNotFound | OutOfOrder) -> LetterResult:
    """Return the result of a letter that was refused; nothing of it was changed."""
    if isinstance(error, OutOfOrder):
        return LetterResult(number, LetterOutcome.FAILED, str(error))
    return LetterResult(number, LetterOutcome.PROCESSED if error.processed else LetterOutcome.GONE, str(error))


def _at_least(least: float, name: str, value: float | None) -> float | None:
    if value is not None and not least <= value < float("inf"):
        raise InvalidConfiguration(f"{name} must be a number from {least:g} on, not {value!r}")
    return value
