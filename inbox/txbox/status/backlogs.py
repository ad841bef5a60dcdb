"""The backlogs of destinations ``inbox:SUBSCRIBER``: what waits for workers of this database, and how long it takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from txbox.messages.destinations import INBOX
from txbox.outbox.status import DestinationStatus, is_relayed
from txbox.outcome import Outcome
from txbox.status.workers import WorkerStatus

_SETTLED = frozenset(outcome.value for outcome in Outcome if outcome.acked)


@dataclass(frozen=True, slots=True)
class InboxBacklog:
    """What waits for the workers of a subscriber.

    Attributes:
        destination: ``inbox:SUBSCRIBER``.
        subscriber_id: the subscriber.
        messages: to process now, or tried before.
        exact: whether they were counted; otherwise ``messages`` and ``delayed`` are estimated.
        delayed: messages whose time has not come.
        workers: its workers at work on this destination, by their reports.
        per_second: messages that they settle; None if that is not known yet.
        drain_seconds: how long ``messages`` take at that rate; None if nothing is settled.
    """

    destination: str
    subscriber_id: str
    messages: int
    exact: bool
    delayed: int
    workers: int
    per_second: float | None
    drain_seconds: float | None


def inbox_backlogs(
    destinations: Sequence[DestinationStatus], workers: Sequence[WorkerStatus]
) -> tuple[InboxBacklog, ...]:
    """Return the backlog of each destination that no relay sends to."""
    return tuple(_backlog(one, workers) for one in destinations if not is_relayed(one.destination))


def _backlog(one: DestinationStatus, workers: Sequence[WorkerStatus]) -> InboxBacklog:
    alive = [worker for worker in workers if worker.source == one.destination and not worker.stale]
    rates = [rate for worker in alive for outcome, rate in worker.per_second.items() if outcome in _SETTLED]
    read = one.waiting + one.retrying + one.delayed
    delayed = one.delayed * max(one.estimate or 0, read) // max(read, 1)
    messages = max(one.estimate or 0, read) - delayed
    per_second = sum(rates) if rates else None
    return InboxBacklog(
        one.destination,
        one.destination.removeprefix(INBOX),
        messages,
        one.exact,
        delayed,
        len(alive),
        per_second,
        messages / per_second if per_second else None,
    )
