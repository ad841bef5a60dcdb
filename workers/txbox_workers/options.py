"""The options of ``Worker``, ``SqsWorker`` and Lambda's ``sqs_handler``: listed, documented and validated once.

The first two classes type the keyword arguments. The third holds their defaults and ranges and their texts for the
command line, and refuses what cannot work. A test compares them.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, TypeVar, get_args

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from txbox import DeadLetters, Inbox, InvalidConfiguration
from txbox.backoff import Backoff
from txbox.effects import SqlEffect
from txbox.instrumentation import Hook
from txbox.leases import LEASE_SECONDS, Ledger
from txbox.leases.lease import valid_lease_seconds
from txbox.leases.ledger import require_ledger
from txbox.postgres.engines import adopt
from txbox.postgres.guards.session_binds import refuse_other_schemas, refuse_two_phases
from txbox.tracing import NO_TRACING, Tracing
from txbox_workers.handlers import (
    BatchHandler,
    Handler,
    MessageArguments,
    SessionFactory,
    driver_kind,
    message_arguments,
    refuse_unfit,
    refuse_with_driver,
    takes_both,
)
from txbox_workers.reporter import ReportPlace

__all__ = ["MAX_ATTEMPTS", "ProcessingOptions", "WorkerOptions"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

MAX_ATTEMPTS = 10
"""With the default backoff, a message becomes a dead letter 4 to 9 minutes after its first failure."""

BATCH_SIZE = 10
"""Messages per transaction: as many as SQS gives in one call."""

MAX_BATCH_SIZE = 1_000
MAX_PREFETCH = 10_000
"""Half of what SQS allows in flight in a FIFO queue."""

MAX_GATHER_SECONDS = 10


class ProcessingOptions(TypedDict, total=False):
    """How messages are processed: keyword arguments of ``Worker``, ``SqsWorker`` and ``sqs_handler``.

    Attributes:
        inbox: records what the subscriber has processed; its tables are in the engine's database. Dead letters are kept
            in the same schema.
        ledger: instead of an inbox, for a handler whose effects no transaction covers: it works under leases. Beside an
            inbox, for a handler with both kinds of effects: its transactions are recorded in the inbox, and no two
            workers run it at the same time.
        engine: the database of the inbox and of the handler's effects.
        dead_letters: with a ledger alone: where dead letters are kept. None leaves them to the broker's own redrive
            policy.
        handler: ``handler(session, message)``, called for each message that is first. It works in the transaction that
            records the message, leaves commit and rollback alone, and raises to fail. With a ledger alone, it is
            ``handler(message)``. With a ledger, a parameter named ``lease`` receives the lease. If the message's
            parameter is annotated with a message type, such as ``purchase: Purchase``, it receives the body as that
            type, and a further parameter annotated with ``Message`` receives the message. A first parameter annotated
            with ``psycopg.Connection`` or ``psycopg.Cursor`` receives that in place of a session.
        batch_handler: ``batch_handler(session, messages)``, instead of a handler: one call for all messages of a batch
            that are first. Much faster where the effect is one set-based statement. It may also take
            ``purchases: Sequence[Purchase]``.
        effect: instead of a handler: SQL statements over the messages that are first, as a ``txbox.SqlEffect``, which a
            bulk load also takes. The fastest way.
        transactions: "batch" (the default) uses one transaction for a batch, and one for each message only when
            something in the batch fails. "message" always uses one for each message. In Lambda, that is better for
            handlers that take many seconds: a time-out undoes only one of them.
        max_attempts: failed attempts after which a message is parked as a dead letter; ``MAX_ATTEMPTS`` by default.
            None leaves that to the broker's own redrive policy; otherwise its maxReceiveCount should be greater. With 1
            there are no batches: each attempt is counted before it is made.
        ordered: keep the order of each key, even past dead letters: a message is parked and not run if an earlier
            message with the same FIFO group, or else the same ``key`` header, is a dead letter. Needs an inbox and no
            ledger.
        locks: ``locks(message)`` names the rows that a message will lock, such as
            ``lambda message: message.json()["account"]``: what can be compared, or a tuple or list of several. It is
            called with what the handler is given of the message. A batch is handled in the order of its locks, so two
            batches wait for each other and do not deadlock; a batch handler receives the messages in that order.
        session_factory: makes the handler's session: ``Session`` (the default), a subclass, or a ``sessionmaker``. The
            session works on the worker's connection, whatever its own bind; a bind other than ``engine`` is refused.
        lease_seconds: how long the ledger keeps a message for a process that has died, ``LEASE_SECONDS`` by default. A
            living process renews its lease. In Lambda, a lease never outlasts the invocation.
        fingerprint: make the ledger refuse an id that comes again with another body.
        hooks: called with every event; events are logged in any case.
        tracing: makes spans, such as ``txbox.instrumentation.opentelemetry_tracing.OpenTelemetryTracing()``; none by
            default.
    """

    inbox: Inbox | None
    ledger: Ledger | None
    engine: Engine | None
    dead_letters: DeadLetters | None
    handler: Handler | None
    batch_handler: BatchHandler | None
    effect: SqlEffect | None
    transactions: Literal["batch", "message"]
    max_attempts: int | None
    ordered: bool
    locks: Callable[[Any], object] | None
    session_factory: SessionFactory
    lease_seconds: float
    fingerprint: bool
    hooks: Sequence[Hook]
    tracing: Tracing


class WorkerOptions(ProcessingOptions, total=False):
    """The further options of a ``Worker``.

    Attributes:
        threads: polling threads, 1 by default. Each needs a connection of the engine's pool; a ledger in Postgres with
            the same engine needs one more, for renewals.
        prefetch: how many deliveries are received ahead and not settled yet, at most: 10 to 10,000. With 0, the
            default, each thread receives, processes and settles in turn. With prefetch, up to 8 calls of the source
            receive and 8 settle at the same time, which a broker needs that answers after 10 ms or more. The limit is
            lower if fewer deliveries are settled in a quarter of the visibility.
        batch_size: messages per transaction, 10 by default; 1 to 1,000 with ``prefetch``. Without it, a batch is what
            one receive brings.
        gather_seconds: with ``prefetch``: how long a batch that is not full waits for more messages. By default 0: a
            free thread takes what is there.
        backoff: the delay before a failed message is delivered again, by attempt; ``Backoff()`` by default.
        transaction_seconds: how long a handler's transaction may take. After that the server ends it, so that its locks
            do not outlast a worker that is stopped in it, and the message has failed. By default four times the
            source's visibility, and at least a minute. ``math.inf`` means no limit.
    """

    threads: int
    prefetch: int
    batch_size: int
    gather_seconds: float
    backoff: Backoff | None
    transaction_seconds: float | None


def _ranged(default: Any, text: str, least: float, most: float | None = None) -> Any:
    """Return a field with its range and its text for the command line."""
    return field(default=default, metadata={"text": text, "least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidOptions:
    """Options that can work, with their defaults. The fields are those of ``WorkerOptions``.

    Raises:
        InvalidConfiguration: when made, if something cannot work.
    """

    of: str  # what was given the options, for errors
    inbox: Inbox | None = None
    ledger: Ledger | None = None
    engine: Engine | None = None
    dead_letters: DeadLetters | None = None
    handler: Handler | None = None
    batch_handler: BatchHandler | None = None
    effect: SqlEffect | None = None
    transactions: Literal["batch", "message"] = "batch"
    max_attempts: int | None = _ranged(MAX_ATTEMPTS, "failures until a message is parked as a dead letter", 1)
    ordered: bool = False
    locks: Callable[[Any], object] | None = None
    session_factory: SessionFactory = Session
    lease_seconds: float = LEASE_SECONDS
    fingerprint: bool = False
    hooks: Sequence[Hook] = ()
    tracing: Tracing = NO_TRACING
    threads: int = _ranged(1, "threads, each with a connection", 1)
    prefetch: int = _ranged(0, "messages received ahead, at most", 0, MAX_PREFETCH)
    batch_size: int = _ranged(BATCH_SIZE, "messages of a transaction", 1, MAX_BATCH_SIZE)
    gather_seconds: float = _ranged(0.0, "how long fewer messages wait for others", 0, MAX_GATHER_SECONDS)
    backoff: Backoff | None = None
    transaction_seconds: float | None = None
    subscriber_id: str = field(init=False)
    arguments: MessageArguments = field(init=False)  # what the handler is given of a message
    driver_kind: type | None = field(init=False)  # which of psycopg's classes it works with; None: a session

    def __post_init__(self) -> None:
        inbox, ledger = self.inbox, self.ledger
        for name, kind, article in (
            ("inbox", Inbox, "an"),
            ("engine", Engine, "an"),
            ("dead_letters", DeadLetters, "a"),
        ):
            value = getattr(self, name)
            fits = value is None or isinstance(value, kind)
            self._require(fits, f".{name} must be {article} {kind.__name__}, not {type(value).__name__}")
        if ledger is not None:
            require_ledger(ledger, f"{self.of}.ledger")
        owner = inbox or ledger
        if owner is None:
            raise InvalidConfiguration(f"{self.of} needs an inbox, or a ledger, or both")
        object.__setattr__(self, "subscriber_id", owner.subscriber_id)
        self._require(
            inbox is None or ledger is None or inbox.subscriber_id == ledger.subscriber_id,
            f" has an inbox of {inbox and inbox.subscriber_id} and a ledger of {ledger and ledger.subscriber_id}; they "
            "have to be of one subscriber",
        )
        self._require(inbox is None or self.engine is not None, " needs the engine of its inbox")
        self._require(
            inbox is not None or self.engine is None,
            ".engine is the inbox's; to keep dead letters with a ledger alone, give dead_letters=DeadLetters(engine)",
        )
        self._require(
            inbox is None or self.dead_letters is None,
            ".dead_letters is for a ledger alone; with an inbox, dead letters are kept in the inbox's schema",
        )
        refuse_two_phases(self.session_factory, f"{self.of}.session_factory")
        if self.engine is not None:
            refuse_other_schemas(self.session_factory, self.engine, f"{self.of}.session_factory")
        given_effects = [one for one in (self.handler, self.batch_handler, self.effect) if one is not None]
        self._require(len(given_effects) == 1, " needs one of handler, batch_handler and effect")
        self._require(
            ledger is None or self.handler is not None,
            " with a ledger needs handler: each message has a lease of its own",
        )
        arguments = MessageArguments()
        if self.effect is not None:
            given_as = type(self.effect).__name__
            self._require(isinstance(self.effect, SqlEffect), f".effect must be a SqlEffect, not {given_as}")
        elif self.batch_handler is not None:
            name = f"{self.of}.batch_handler"
            wanted = (
                "session, values, messages"
                if takes_both(self.batch_handler, after=1, batches=True)
                else "session, messages"
            )
            refuse_unfit(self.batch_handler, name, wanted, ledger=False)
            arguments = message_arguments(self.batch_handler, name, after=1, batches=True)
        else:
            name, after = f"{self.of}.handler", 0 if inbox is None else 1
            wanted = "session, " * after + ("value, message" if takes_both(self.handler, after=after) else "message")
            refuse_unfit(self.handler, name, wanted, ledger=ledger is not None)
            arguments = message_arguments(self.handler, name, after=after)
        object.__setattr__(self, "arguments", arguments)
        self._require(
            self.locks is None or (callable(self.locks) and inbox is not None and self.effect is None),
            ".locks is a function for a handler or batch_handler over an inbox; an effect has ORDER BY",
        )
        object.__setattr__(self, "driver_kind", None)
        if inbox is not None and self.engine is not None and self.effect is None:
            given_handler, name = self.handler or self.batch_handler, "handler" if self.handler else "batch_handler"
            is_async = self.engine.dialect.is_async
            works_with = driver_kind(given_handler, f"{self.of}.{name}", is_async=is_async)
            if not is_async and self.session_factory is not Session:
                refuse_with_driver(works_with, f"{self.of}.session_factory")
            object.__setattr__(self, "driver_kind", works_with)
        self._require(
            ledger is not None or not self.fingerprint,
            ".fingerprint is the ledger's; for an inbox: Inbox(…, fingerprint=True)",
        )
        self._require(
            self.transactions in ("batch", "message"),
            f".transactions must be 'batch' or 'message', not {self.transactions!r}",
        )
        self._require(
            not self.ordered or (inbox is not None and ledger is None),
            ".ordered needs an inbox and no ledger: one transaction decides whether a message is run or waits",
        )
        self._require(
            not self.ordered or self.max_attempts is not None,
            ".ordered needs max_attempts: of what the broker's own redrive policy takes away, no letter is kept",
        )
        self._require_ranges()
        self._require(
            bool(self.prefetch) or self.batch_size <= BATCH_SIZE,
            f".batch_size of more than {BATCH_SIZE} needs prefetch: one receive brings no more",
        )
        self._require(
            self.prefetch == 0 or max(BATCH_SIZE, self.batch_size) <= self.prefetch <= MAX_PREFETCH,
            f".prefetch must be 0, or from {BATCH_SIZE} to {MAX_PREFETCH:,} and not less than batch_size, not "
            f"{self.prefetch!r}",
        )
        self._require(
            bool(self.prefetch) or not self.gather_seconds, ".gather_seconds needs prefetch: nothing waits without it"
        )
        self._require(
            self.transaction_seconds is None or self.transaction_seconds > 0,
            f".transaction_seconds must be more than 0, not {self.transaction_seconds!r}",
        )
        valid_lease_seconds(self.lease_seconds, f"{self.of}.lease_seconds")
        given = type(self.tracing).__name__
        self._require(isinstance(self.tracing, Tracing), f".tracing must be an OpenTelemetryTracing(), not {given}")
        if self.engine is not None:
            adopt(self.engine)

    def _require_ranges(self) -> None:
        for each in fields(self):
            value, least, most = getattr(self, each.name), each.metadata.get("least"), each.metadata.get("most")
            or_none = type(None) in get_args(each.type)
            if least is not None and not (value is None and or_none) and not least <= value <= (most or math.inf):
                wanted = f"at least {least}{', or None' * or_none}" if most is None else f"from {least} to {most:,g}"
                raise InvalidConfiguration(f"{self.of}.{each.name} must be {wanted}, not {value!r}")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise InvalidConfiguration(f"{self.of}{otherwise}")

    @property
    def report_place(self) -> ReportPlace | None:
        """Where a worker reports: beside its inbox, or else beside its dead letters; None if there is no such place."""
        if self.inbox is not None and self.engine is not None:
            return ReportPlace(self.engine, self.inbox.schema, self.inbox.prefix)
        letters = self.dead_letters
        return None if letters is None else ReportPlace(letters.engine, letters.schema, letters.prefix)

    def limit_seconds(self, visibility_seconds: float | None) -> float | None:
        """Return how long a transaction may take, given the source's visibility; None means no limit."""
        seconds = self.transaction_seconds
        if seconds is None:
            return max(TRANSACTION_VISIBILITIES * (visibility_seconds or 0.0), TRANSACTION_SECONDS)
        return None if seconds == math.inf else seconds


def valid_options(of: str, options_type: type, options: Mapping[str, Any]) -> ValidOptions:
    """Return validated keyword arguments of ``of``, a function or class; ``options_type`` is the class that types them.

    Raises:
        TypeError: there is no such option.
        InvalidConfiguration: something cannot work.
    """
    for name in options:
        if name not in options_type.__annotations__:
            near = get_close_matches(name, options_type.__annotations__, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{of}() got an unexpected keyword argument {name!r}{hint}")
    return ValidOptions(of=of, **options)


def lists_options(options_type: type, **others: Any) -> Callable[[_Function], _Function]:
    """Make ``help`` and ``inspect.signature`` list a function's ``**options`` one by one, with their defaults.

    ``others`` are the defaults that differ from ``ValidOptions``.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *own, _options = signature.parameters.values()
        defaults = {each.name: each.default for each in fields(ValidOptions)} | others
        listed = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
            for name, annotation in options_type.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
        return function

    return decorate


TRANSACTION_VISIBILITIES = 4
TRANSACTION_SECONDS = 60.0
"""The default limit of a handler's transaction: this many times its source's visibility, and at least this long."""
