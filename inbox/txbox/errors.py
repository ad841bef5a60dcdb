"""Everything that txbox raises.

::

    TxboxError
    ├── NotInTransaction     the connection is in autocommit mode
    ├── SchemaMissing        a txbox table does not exist, or is of an older version
    ├── InvalidMessageId     an id that the inbox cannot keep
    ├── InFlight             another transaction, or the owner of a lease, is processing this message
    ├── Mismatch             the same message id came with another body
    ├── Expired              a message too old to tell whether it was processed
    ├── LeaseLost            a lease ran out, and another owner took the message over
    ├── EffectFailed         the statements of a SqlEffect failed
    ├── EffectUnknown        raised by a handler: the effect may have happened
    ├── LedgerError          a ledger's store could not be reached, or refused
    ├── ResultNotStored      a handler has done its work, but its result cannot be kept
    ├── EntityMissing        the row or item to update does not exist
    ├── MalformedMessage     a body that cannot be parsed; a ValueError too
    ├── NotSendable          a message that its destination cannot take
    │   └── MessageTooLarge      because of its size
    ├── TransactionEnded     a handler ended the transaction of the worker
    │   ├── TransactionAborted   by swallowing the error of a statement
    │   └── StatementLeftOpen    or left a statement unfinished in it
    ├── TransactionTimedOut  a handler's transaction was open for too long
    ├── RightsMissing        this user lacks a right on a table
    ├── TableLocked          another session has locked a table for longer than we wait
    ├── InvalidConfiguration an argument or a setting that cannot work
    │   └── NothingKept          an outbox keeps no sent messages to audit
    ├── ExtraMissing         a package of an extra is not installed; a ModuleNotFoundError too
    ├── LetterNotFound       no dead letter of that number waits
    ├── OperationNotFound    no redrive or discard of that number is on record
    ├── OutOfOrder           an earlier dead letter has to be redriven first
    └── BrokerError          the broker could not be reached, or refused

Other packages have ``MigrationError``, ``LocalServerError``, and Spark's ``SparkSetupError``, ``SourceError``,
``BulkLoadFailed``, ``BatchFailed``, ``ApplyFailed``, ``RunNotFound``; Celery's tasks raise ``MessageParked``; tests get
``NotSettled`` from ``txbox_testing``.

We do not wrap errors of the database itself (a lost connection, a serialization failure, a violated constraint): they
pass through as SQLAlchemy raises them. ``txbox.postgres.sqlstates`` says which of them to retry.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, ClassVar

__all__ = [
    "BrokerError",
    "EffectFailed",
    "EffectUnknown",
    "EntityMissing",
    "Expired",
    "ExtraMissing",
    "InFlight",
    "InvalidConfiguration",
    "InvalidMessageId",
    "LeaseLost",
    "LedgerError",
    "LetterNotFound",
    "MalformedMessage",
    "MessageTooLarge",
    "Mismatch",
    "NotInTransaction",
    "NotSendable",
    "NothingKept",
    "OperationNotFound",
    "OutOfOrder",
    "ResultNotStored",
    "RightsMissing",
    "SchemaMissing",
    "StatementLeftOpen",
    "TableLocked",
    "TransactionAborted",
    "TransactionEnded",
    "TransactionTimedOut",
    "TxboxError",
]


class TxboxError(Exception):
    """The root of all errors of txbox. All of them can be pickled, so they can cross processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), self.__dict__


class NotInTransaction(TxboxError):
    """The connection is in autocommit mode, so a record and its business update would not commit together."""

    def __init__(self) -> None:
        super().__init__(
            "the connection is in autocommit mode: the record would commit without the business update; "
            "use a connection or session whose isolation level is not AUTOCOMMIT; with Django, transaction.atomic()"
        )


class SchemaMissing(TxboxError):
    """The table ``table`` does not exist, or is of an older version and lacks a column.

    ``lacks`` is the database's message about that column; None if the table does not exist.
    """

    remedy: ClassVar = "`txbox db upgrade`, or in your own migrations if they make txbox's tables"
    """The command that creates and changes the tables; an adapter sets its framework's command, as Django's does."""

    def __init__(self, table: str, lacks: str | None = None) -> None:
        self.table = table
        self.lacks = lacks
        what = (
            "does not exist; create it" if lacks is None else f"is of an older version ({lacks}); bring it up to date"
        )
        super().__init__(f"table {table} {what} with {self.remedy}")


class InvalidMessageId(TxboxError):
    """A message id is empty, too long, or holds a NUL character; ``message_id`` is the whole id."""

    def __init__(self, message_id: str, why: str) -> None:
        self.message_id = message_id
        super().__init__(f"message id {message_id[:80]!r} {why}")


class InFlight(TxboxError):
    """Another transaction or owner is processing the same message, and did not finish while we waited.

    Without a lease, another transaction has recorded the id or advanced the watermark, and yours is aborted: roll back.
    With a lease, another owner holds it. Either way, hand the delivery back to the broker.

    Attributes:
        subscriber_id: the subscriber of both.
        message_ids: the ids of the statement; at least one of them is in flight.
        seconds: how much longer the other owner's lease may last, at most; None for a transaction.
    """

    def __init__(self, subscriber_id: str, message_ids: Iterable[str], *, seconds: float | None = None) -> None:
        self.subscriber_id = subscriber_id
        self.message_ids = tuple(message_ids)
        self.seconds = seconds
        what = self.message_ids[0] if len(self.message_ids) == 1 else f"one of {len(self.message_ids)} messages"
        if seconds is None:
            text = (
                f"by another transaction of subscriber {subscriber_id}; roll back and let the broker deliver it again"
            )
        else:
            text = (
                f"by another owner of subscriber {subscriber_id}, whose lease lasts {seconds:.1f} s unless it is "
                "renewed; let the broker deliver it again, or call again later, or wait for it with wait_seconds="
            )
        super().__init__(f"{what} is being processed {text}")


class Mismatch(TxboxError):
    """A message id that ``subscriber_id`` processed before came with another body; ``message_ids`` is sorted."""

    def __init__(self, subscriber_id: str, message_ids: Iterable[str]) -> None:
        self.subscriber_id = subscriber_id
        self.message_ids = tuple(sorted(message_ids))
        super().__init__(
            f"subscriber {subscriber_id} has already processed {', '.join(self.message_ids[:5])} with another body; "
            "two different messages share one id: repair the producer, or choose another id with identify"
        )


class Expired(TxboxError):
    """Messages were sent before the horizon of ``subscriber_id``, which has forgotten whether it processed them.

    They are not recorded. Roll back, park them, and let a person decide.

    Attributes:
        subscriber_id: whose horizon.
        sent_at: when each message was sent, by id; None: unknown, where the policy is to park such messages.
        message_ids: their ids, sorted.
        horizon: the subscriber has forgotten what it processed before this time.
    """

    def __init__(
        self, subscriber_id: str, sent_at: Mapping[str, datetime | None], horizon: datetime | None = None
    ) -> None:
        self.subscriber_id = subscriber_id
        self.sent_at = dict(sent_at)
        self.message_ids = tuple(sorted(sent_at))
        self.horizon = horizon
        times = {id_: f"sent at {at:%Y-%m-%d %H:%M:%S%z}" if at else "age unknown" for id_, at in sent_at.items()}
        told = ", ".join(f"{message_id} ({times[message_id]})" for message_id in self.message_ids[:5])
        before = f" ({horizon:%Y-%m-%d %H:%M:%S%z})" if horizon else ""
        super().__init__(
            f"subscriber {subscriber_id} cannot tell any more whether it has processed {told}: what it processed "
            f"before its horizon{before} is forgotten. It was not run: check what became of it, then redrive it as "
            "expired, or discard it"
        )


class LeaseLost(TxboxError):
    """A lease ran out, and another owner took the message over. Work done under the lost lease does not count.

    ``fence`` is the fencing number of the lease that ``subscriber_id`` lost on ``message_id``; a newer one exists.
    """

    def __init__(self, subscriber_id: str, message_id: str, fence: int) -> None:
        self.subscriber_id = subscriber_id
        self.message_id = message_id
        self.fence = fence
        super().__init__(
            f"the lease {fence} of {message_id} has run out, and subscriber {subscriber_id} has given it to another "
            "owner, or it was released; stop working on this message"
        )


class EffectFailed(TxboxError):
    """The statements of a ``SqlEffect`` failed (the cause says why), or what they returned cannot be published.

    Their transaction is rolled back.
    """


class EffectUnknown(TxboxError):
    """Raised by handlers under a lease: the effect may have happened, but the answer was lost.

    The message is free at once, and the attempt counts in ``Lease.unknown_attempts`` of the next lease. Any other error
    of a handler means that nothing happened, except two errors of a database, as SQLAlchemy raises them: a lost or
    refused connection, which does not count as an attempt, and a transaction that took too long.
    """


class LedgerError(TxboxError):
    """The store of a ledger could not be reached, or refused a call.

    ``permanent``: retrying cannot help (no such table, no permission).
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        self.permanent = permanent
        super().__init__(message)


class ResultNotStored(TxboxError):
    """The work on ``message_id`` is done and the message completed, but its result cannot be kept for repeats."""

    def __init__(self, subscriber_id: str, message_id: str, why: str) -> None:
        self.subscriber_id = subscriber_id
        self.message_id = message_id
        super().__init__(
            f"subscriber {subscriber_id} has completed {message_id}, but its result cannot be kept: {why}; "
            "it will not run again, and repeats get None; return something smaller or simpler, or keep no results"
        )


class EntityMissing(TxboxError):
    """No row or item has that key, so nothing was updated. The message is not a duplicate.

    ``entity`` is the table, ``key`` the key that was looked for, as text.
    """

    def __init__(self, entity: str, key: str) -> None:
        self.entity = entity
        self.key = key
        super().__init__(f"{entity} has nothing with the key {key}; create it before messages for it are applied")


class MalformedMessage(TxboxError, ValueError):
    """A body cannot be read as what it should be; a ``ValueError`` too, as from ``json.loads``."""


class NotSendable(TxboxError):
    """A message cannot be sent to its ``destination``; raised when it is published."""

    def __init__(self, destination: str, why: str) -> None:
        self.destination = destination
        super().__init__(f"{destination} {why}")


class MessageTooLarge(NotSendable):
    """A message is larger than its destination allows.

    ``size`` is what would be sent, headers included; ``limit`` is the destination's. Both are in bytes.
    """

    def __init__(self, destination: str, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(
            destination,
            f"takes at most {limit:,} bytes, and the message has {size:,} with its headers; "
            "put the content into a store, and send where it is",
        )


class RightsMissing(TxboxError):
    """This user lacks a right on one of our tables.

    ``table`` is named as in SQL, or it is ``SCHEMA`` and the name of its schema. ``rights`` are the missing ones, such
    as ``UPDATE, DELETE``.
    """

    def __init__(self, table: str, rights: str) -> None:
        self.table = table
        self.rights = rights
        super().__init__(f"the right to {rights} on {table} is lacking; GRANT {rights} ON {table} TO this user")


class TableLocked(TxboxError):
    """Another session's transaction has locked one of our tables for longer than a check waits.

    ``table`` is named as in SQL.
    """

    def __init__(self, table: str) -> None:
        self.table = table
        super().__init__(
            f"{table} is locked by another session; try again when its transaction has ended. pg_locks shows which "
            "session it is"
        )


class TransactionEnded(TxboxError):
    """A handler committed or rolled back the worker's transaction."""

    def __init__(self) -> None:
        super().__init__(
            "the handler ended the worker's transaction; leave commit and rollback to the worker, "
            "and raise an exception to have everything rolled back"
        )


class TransactionAborted(TransactionEnded):
    """A handler swallowed the error of a statement, but Postgres had already undone the whole transaction."""

    def __init__(self) -> None:
        TxboxError.__init__(
            self,
            "a statement failed and the handler went on, but Postgres has already undone everything; let the error "
            "out, or run the statement within a savepoint: session.begin_nested(), or Django's transaction.atomic()",
        )


class StatementLeftOpen(TransactionEnded):
    """A handler left a statement unfinished on the worker's connection, which now can only be closed."""

    def __init__(self) -> None:
        TxboxError.__init__(
            self,
            "the handler has left a stream, a copy or a pipeline open on the worker's connection; end it before you "
            "return or raise: with closing(cursor.stream(...)), with cursor.copy(...)",
        )


class TransactionTimedOut(TxboxError):
    """The server ended a handler's transaction that was open for too long; nothing of it is committed."""

    def __init__(self) -> None:
        super().__init__(
            "the handler's transaction was open for longer than it may, or than the server allows, and the server has "
            "ended it, to free its locks; do less in it, or allow more: the worker's transaction_seconds, the time-out "
            "of the function on Lambda, or transaction_timeout and idle_in_transaction_session_timeout of the role"
        )


class InvalidConfiguration(TxboxError):
    """An argument or a setting cannot work; the message names it and says what would work."""


class NothingKept(InvalidConfiguration):
    """An outbox keeps no sent messages, so an audit has nothing to compare."""


def install_command(extra: str) -> str:
    """Return what installs an extra, for errors. No package index has txbox yet, so that is the way from a clone."""
    return f"pip install '.[{extra}]' in a clone of txbox"


class ExtraMissing(TxboxError, ModuleNotFoundError):
    """A module that the extra ``extra`` of txbox brings is not installed; a ``ModuleNotFoundError`` too.

    ``name`` is the module's, as in every ``ImportError``.
    """

    def __init__(self, extra: str, name: str) -> None:
        self.extra = extra
        # A submodule may be missing because the package is too old, or because a file of the same name hides it.
        what = (
            f"{name} is missing" if "." not in name else f"{name} is not in the {name.partition('.')[0]} that is found"
        )
        super().__init__(f"{what}; install it: {install_command(extra)}", name=name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ExtraMissing, (self.extra, self.name), self.__dict__  # __dict__ does not have the name


class LetterNotFound(TxboxError):
    """No dead letter of the number ``dead_letter_id`` waits.

    ``processed``: true if its message was processed after it was parked.
    """

    def __init__(self, dead_letter_id: int, why: str = "does not exist", *, processed: bool = False) -> None:
        self.dead_letter_id = dead_letter_id
        self.processed = processed
        super().__init__(f"dead letter {dead_letter_id} {why}; see `txbox dead-letters list --all`")


class OperationNotFound(TxboxError):
    """No redrive or discard of the number ``operation_id`` is on record."""

    def __init__(self, operation_id: int) -> None:
        self.operation_id = operation_id
        super().__init__(f"operation {operation_id} does not exist; see `txbox dead-letters operations`")


class OutOfOrder(TxboxError):
    """The dead letter ``before`` holds the key of the dead letter ``dead_letter_id``, and waits itself."""

    def __init__(self, dead_letter_id: int, before: int, order_key: str | None) -> None:
        self.dead_letter_id = dead_letter_id
        self.before = before
        super().__init__(
            f"dead letter {dead_letter_id} waits behind {before} of its key {order_key!r}; redrive or discard {before} "
            "first"
        )


class BrokerError(TxboxError):
    """The broker could not be reached, or refused a call.

    ``permanent``: retrying cannot help (no such queue, no permission).
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        self.permanent = permanent
        super().__init__(message)


def _again(kind: type[TxboxError], arguments: tuple[Any, ...]) -> TxboxError:
    # The constructor is not called: it takes the data, but args holds the text made from them.
    return kind.__new__(kind, *arguments)
