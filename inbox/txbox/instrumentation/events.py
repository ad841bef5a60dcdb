"""Events: what happens inside txbox, for hooks.

An event is a frozen dataclass; a hook is any callable that takes one. Hooks are called in the thread where the event
happens, so they must be quick. What a hook raises is logged and goes no further.

The life of a batch::

    Received → (Retried)* → Committed → Settled for each delivery
                                 ↑            ↑
                  the database has it         the broker has the outcome

A relay emits ``Relayed`` and a maintainer ``Maintained``; both also emit the events of outages and of their end, and a
relay those of pauses. An audit emits ``Audited``, a bulk load ``BulkLoaded``. Whatever reads the runway emits
``RunwayRead`` and ``HorizonRead``.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txbox.outcome import Outcome
from txbox.text import log_failure

MAINTAINER = "txbox:maintenance"
"""The subscriber of a maintainer's events."""


@dataclass(frozen=True, slots=True)
class Event:
    """The root of all events.

    Attributes:
        subscriber_id: whose worker it is; ``txbox:outbox`` for a relay, ``txbox:maintenance`` for a maintainer.
        source: where its messages come from, such as a queue's URL. For a relay: where they go, or the outbox's table.
            For a maintainer: its task, or its table.
    """

    subscriber_id: str
    source: str


@dataclass(frozen=True, slots=True)
class Received(Event):
    """Messages were delivered; nothing has been done with them yet.

    Attributes:
        message_ids: one for each delivery, in the broker's order.
        delivery_ids: identify these deliveries, and no other deliveries of the same messages.
        oldest_seconds: how long ago the oldest was sent, by this machine's clock and never less than 0; None if that is
            not known of any.
    """

    message_ids: tuple[str, ...]
    delivery_ids: tuple[str, ...]
    oldest_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Retried(Event):
    """The database rolled back a transaction, which runs again from its start.

    Attributes:
        sqlstate: why: 40001 (serialization failure) or 40P01 (deadlock).
        attempt: which run failed, from 1.
        messages: how many messages the transaction holds.
    """

    sqlstate: str
    attempt: int
    messages: int


@dataclass(frozen=True, slots=True)
class Contended(Event):
    """The database rolls back handlers' transactions because of conflicts. Emitted at most once a minute.

    Attributes:
        conflicts: how many since the last event, by SQLSTATE (40P01: deadlock, 40001: serialization failure) and by the
            relation where they met, if the server names it.
        mode: how transactions are run now: ``batch``, ``halves`` (two for a batch), ``per_message`` (one for each
            message) or ``serial`` (one after the other, across all workers of the subscriber in this mode).
    """

    conflicts: Mapping[tuple[str, str], int]
    mode: str


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """A transaction has committed; its deliveries are not acked yet.

    Attributes:
        first: how many messages it processed.
        duplicates: how many deliveries were duplicates.
        seconds: from its begin to its commit.
    """

    first: int
    duplicates: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Settled(Event):
    """The outcome of a delivery is final and was reported to the broker.

    Attributes:
        message_id: the message.
        delivery_id: as in ``Received``.
        outcome: what became of the delivery.
        acked: whether the broker confirmed that it forgot the delivery.
        attempts: how often the message has been delivered, including this time.
        error: what went wrong; None if nothing did.
        counted: for a parked message, the attempts that counted, oldest first, as in ``DeadLetter.history``.
    """

    message_id: str
    delivery_id: str
    outcome: Outcome
    acked: bool
    attempts: int
    error: BaseException | None = None
    counted: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Relayed(Event):
    """A relay has sent a batch of messages to one destination and settled them in the database.

    Attributes:
        sent: how many messages the broker has confirmed.
        postponed: how many it refused; they are sent again.
        parked: how many it refused for the last time; they are dead letters.
        lag_seconds: the age of the oldest sent message when it was read, by the database's clock; None if none was
            sent.
        error: the text of one refusal; None if there was none.
    """

    sent: int
    postponed: int
    parked: int
    lag_seconds: float | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Maintained(Event):
    """A maintainer has removed ``removed`` rows in ``seconds``; ``source`` is the task, such as ``inbox``."""

    removed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BulkLoaded(Event):
    """A bulk load, or a batch of a stream, has ended well.

    Attributes:
        source: "bulk load", or the stream without the batch number.
        counts: rows by what became of them, named as in ``BulkLoadReport``; they add up to the rows read.
        seconds: how long its last attempt took.
        run_id: of the ledger.
        batch_id: Spark's batch number, as in the progress of the query; None: a bulk load.
    """

    counts: Mapping[str, int]
    seconds: float
    run_id: str | None = None
    batch_id: int | None = None


@dataclass(frozen=True, slots=True)
class RunwayRead(Event):
    """What is kept, and when something was last forgotten, was read from the database; ``source`` is the inbox's table.

    A maintainer emits it once a minute, and so does a ``txbox.status.RunwayReporter``, even while no maintainer runs.

    Attributes:
        seconds_ago: since a maintainer last finished a round, by the database's clock; None if none ever did.
        rotation_due_seconds: until a rotating inbox needs a new generation, negative if overdue; None: not known.
        generations: rows (by the planner's estimate) and bytes of each, the newest first; for a plain inbox, of its
            table.
    """

    seconds_ago: float | None
    rotation_due_seconds: float | None
    generations: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class HorizonRead(Event):
    """How far back a subscriber remembers, after each ``RunwayRead``; ages by the database's clock.

    Attributes:
        horizon_seconds: the age of its horizon: what was sent before it is not run any more.
        oldest_seconds: the age of its oldest id, as far as known (``txbox.status.HorizonStatus``), or None.
    """

    horizon_seconds: float
    oldest_seconds: float | None


@dataclass(frozen=True, slots=True)
class PublisherOverdue(Event):
    """A publisher that was given ``messages`` messages has not returned within the ``seconds`` it may take.

    Other relays may send its messages again, and its thread sends nothing else.
    """

    messages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HeartbeatFailed(Event):
    """The right to work on a delivery could not be extended: it may be delivered again while its handler runs.

    The right is the delivery's visibility at the broker; or, if ``why`` names it, the lease of its message.
    """

    message_id: str
    why: str


@dataclass(frozen=True, slots=True)
class BrokerLost(Event):
    """The broker cannot be reached; polling pauses for ``pause_seconds``."""

    error: BaseException
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class BrokerRestored(Event):
    """The broker answers again."""


@dataclass(frozen=True, slots=True)
class DatabaseLost(Event):
    """The database cannot be reached; polling pauses for ``pause_seconds``, and deliveries go back to the broker."""

    error: BaseException
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class DatabaseRestored(Event):
    """The database answers again."""


@dataclass(frozen=True, slots=True)
class Paused(Event):
    """The subscriber of a worker, or a destination of a relay, was found to be paused (``txbox.operations.pauses``).

    Attributes:
        paused_by: who asked for it.
        note: why; None if no reason was given.
    """

    paused_by: str
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Drained(Event):
    """After ``Paused``: nothing that was taken of what is paused is in hand any more."""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A pause has ended, and work goes on."""


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """The worker or relay has stopped; ``drained``: everything it had taken was settled first."""

    drained: bool


@dataclass(frozen=True, slots=True)
class Audited(Event):
    """An audit of a subscriber has ended; its ``source`` are the destinations, or the inbox's table.

    Attributes:
        counts: how many messages, by what became of them, named as in ``txbox.operations.audit.AuditReport``.
        balanced: whether nothing is wrong, as far as can be judged.
        seconds: how long the audit took.
    """

    counts: Mapping[str, int]
    balanced: bool
    seconds: float


Hook = Callable[[Event], None]
"""A hook gets every event."""


def emit(hooks: Iterable[Hook], event: Event) -> None:
    """Call every hook with an event; what a hook raises is logged and goes no further.

    Except ``KeyboardInterrupt`` in the main thread, which may be a Ctrl-C that came while a hook ran.
    """
    for hook in hooks:
        try:
            hook(event)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            log_failure("the hook %r failed on %s", hook, type(event).__name__)
