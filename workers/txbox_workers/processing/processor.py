"""The processor: in which order a batch of deliveries is processed, and what is not begun. No broker, no database.

How one delivery, or several together, are processed, is in the subclasses: ``InboxProcessor`` works with transactions
of the database that the effects are in, ``LedgerProcessor`` with leases.

Attempts are counted in a database, and how one has ended may have to be saved there later, when the database can be
reached again. Until then its delivery is kept: another worker would decide by a count that is wrong.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from txbox import Outcome
from txbox.backoff import Backoff
from txbox.dead_letters.order import KeyHeld
from txbox.instrumentation import Hook
from txbox.instrumentation.log_context import in_hand
from txbox_workers.consumer_spans import NO_SPANS, ConsumerSpans
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.processing.outage_errors import bookkeeping
from txbox_workers.processing.transaction_limits import TimeLimit, unlimited


class Halt(Protocol):
    """Says when nothing more is to be begun: a ``threading.Event``, or a deadline."""

    def is_set(self) -> bool:
        """Whether that is now."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, so many seconds at most; return whether it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """Where a processor runs."""

    subscriber_id: str  # whose messages are processed
    source_name: str  # where deliveries come from, for events and dead letters
    hooks: Sequence[Hook]  # called with every event
    wants_details: Callable[[], bool]  # whether a hook or the log takes the events of messages that succeed
    stopping: Halt  # says when nothing more is to be begun
    cut_short: Halt | None = None
    """Within a batch, begin no more handlers once this is set: what was not begun is taken out of the inbox again, and
    the rest commits. None: batches are always finished.
    """
    ends_at: Callable[[], float | None] = lambda: None
    """A reading of ``elapsed`` at which this process ends, and no lease may last longer; None: never."""
    spans: ConsumerSpans = NO_SPANS  # of the messages that are processed
    limit: TimeLimit = unlimited  # says how long a transaction may take


class Processor(ABC):
    """Processes the deliveries of one worker."""

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._stopping = context.stopping
        self._spans: ConsumerSpans = context.spans
        self._unsaved: dict[Callable[[], object], str] = {}

    @abstractmethod
    def check(self) -> None:
        """See that everything is there, before any message is taken.

        Raises:
            DatabaseUnavailable: the database, or the store of the ledger, does not answer.
            SchemaMissing, NotInTransaction, LedgerError: it cannot be used like this.
        """

    @abstractmethod
    def check_recording(self) -> None:
        """See that a message could be processed now, after there was trouble.

        Raises:
            DatabaseUnavailable, SchemaMissing, LedgerError: it could not.
        """

    # --- how attempts have ended, where that is not saved yet ---------------------------------------------------------

    def has_unsaved(self, delivery: Delivery) -> bool:
        """Whether the database does not have yet how an attempt of this message has ended.

        Its delivery is to be kept until then: another worker would conclude that this process has ended.
        """
        return delivery.message.id in tuple(self._unsaved.values())

    def save_unsaved(self) -> None:
        """Save how attempts have ended.

        Raises:
            DatabaseUnavailable: not all of it could be saved.
        """
        for save in tuple(self._unsaved):
            with bookkeeping():
                save()
            self._unsaved.pop(save, None)  # not before: another thread may ask what is unsaved

    def _save_later(self, message_id: str, save: Callable[[], object]) -> None:
        """Have it saved how an attempt has ended; saving it twice must do no harm."""
        self._unsaved[save] = message_id

    def _discard_unsaved(self, message_id: str) -> None:
        """Save nothing of a message any more, as what is counted of it decides nothing."""
        for save, saved_for in tuple(self._unsaved.items()):
            if saved_for == message_id:
                self._unsaved.pop(save, None)

    def process(self, deliveries: Sequence[Delivery]) -> Iterator[list[Settlement]]:
        """Process deliveries, and yield settlements as soon as they are certain.

        Once it is stopping, nothing is begun any more, and the rest is handed back untouched.

        Args:
            deliveries: in the broker's order.

        Raises:
            DatabaseUnavailable: the outcome of what was not yielded before is not known.
        """
        with self._spans.batch():
            for settlements in self._run_rounds(deliveries):
                self._spans.settled(settlements)
                yield settlements

    def _run_rounds(self, deliveries: Sequence[Delivery]) -> Iterator[list[Settlement]]:
        """Process each message once, then its repeats; in batches, and singly what cannot be in one."""
        self.save_unsaved()
        blocked: dict[str, float] = {}
        settled_before: dict[str, Settlement] = {}
        rest = deliveries
        while rest:
            # A later delivery of the same message finds the outcome of the first.
            unique, rest = self._without_repeats(rest)
            if settled_before:
                repeats = [self._settled_like(d, settled_before.get(d.message.id)) for d in unique]
                if settled_already := [settlement for settlement in repeats if settlement is not None]:
                    blocked |= self.blocked_by(settled_already)
                    yield settled_already
                unique = [d for d, settlement in zip(unique, repeats, strict=True) if settlement is None]
                if not unique:
                    continue
            single: Sequence[Delivery] = unique
            # After a failure in some group, one by one: what comes next in that group is not to be run.
            if not blocked and not self._stopping.is_set():
                single = [delivery for delivery in unique if self._is_single(delivery)]
                if single and any(self.group(delivery) for delivery in unique):
                    single = unique  # groups keep an order
            batches = self._run_batches(_without(single, unique), blocked)
            for settlements in chain(batches, self._run_singles(single, blocked)):
                if rest:
                    settled_before.update((settlement.delivery.message.id, settlement) for settlement in settlements)
                blocked |= self.blocked_by(settlements)
                yield settlements

    def _without_repeats(self, deliveries: Sequence[Delivery]) -> tuple[Sequence[Delivery], Sequence[Delivery]]:
        """Return deliveries of which no message comes twice, and the rest.

        What follows a repeat in its group waits with it, so that the order within the group stays.
        """
        if len({delivery.message.id for delivery in deliveries}) == len(deliveries):
            return deliveries, ()
        unique: dict[str, Delivery] = {}
        waiting: list[Delivery] = []
        groups: set[str] = set()
        for delivery in deliveries:
            group = self.group(delivery)
            if delivery.message.id in unique or group in groups:
                waiting.append(delivery)
                if group is not None:
                    groups.add(group)
            else:
                unique[delivery.message.id] = delivery
        return list(unique.values()), waiting

    def _settled_like(self, delivery: Delivery, before: Settlement | None) -> Settlement | None:
        """Settle a repeat of a message that was met in the same batch; None if it has to be processed.

        Not run again at once: ten copies of a message whose handler fails would use up its attempts in a moment.
        """
        if before is None:
            return None
        if before.outcome in (Outcome.FAILED, Outcome.IN_FLIGHT):
            return Settlement(delivery, Outcome.IN_FLIGHT, before.error, before.delay_seconds)
        if delivery.message.body != before.delivery.message.body or delivery.body != before.delivery.body:
            return None
        outcome = Outcome.DUPLICATE if before.outcome is Outcome.PROCESSED else before.outcome
        return Settlement(delivery, outcome, before.error)

    def _run_batches(self, deliveries: Sequence[Delivery], blocked: Mapping[str, float]) -> Iterator[list[Settlement]]:
        """Process deliveries together; if that fails, each tenth of them in the same way, and a few of them singly.

        One that fails in a thousand has the others committed in about thirty transactions, and not in a thousand.
        """
        held = [delivery for delivery in deliveries if (self.group(delivery) or "") in blocked] if blocked else []
        free = _without(held, deliveries)
        together = len(free) > 1 and not self._stopping.is_set()
        if together and (settled := self._run_batch(free)) is not None:
            yield settled
            yield from self._run_singles(held, blocked)
        elif len(deliveries) <= PARTS:
            yield from self._run_singles(deliveries, blocked)
        else:
            size = -(-len(deliveries) // PARTS)
            for first in range(0, len(deliveries), size):
                yield from self._run_batches(deliveries[first : first + size], blocked)

    def _is_single(self, delivery: Delivery) -> bool:  # noqa: ARG002 - a hook
        """Whether a delivery is not to be processed together with others."""
        return False

    def _run_batch(self, deliveries: Sequence[Delivery]) -> list[Settlement] | None:  # noqa: ARG002 - a hook
        """Process several deliveries at once; None if they have to be processed singly."""
        return None

    @abstractmethod
    def _run_single(self, delivery: Delivery) -> Settlement:
        """Process one delivery.

        Raises:
            DatabaseUnavailable: its outcome is not known.
        """

    def group(self, delivery: Delivery) -> str | None:
        """Return what keeps its order within a batch; None where there is no order."""
        return delivery.failure_group or delivery.group

    def blocked_by(self, settlements: Sequence[Settlement]) -> dict[str, float]:
        """Return the groups in which what follows must not overtake, each with the delay of what is handed back.

        A broker's group keeps what follows by itself. Where the order is the worker's, it comes again after as long. A
        copy that is too early has a dead letter, which keeps its place: what follows may be the copy it waits for.
        """
        return {
            group: 0.0 if settlement.delivery.group else settlement.delay_seconds
            for settlement in settlements
            if not settlement.outcome.acked
            and not isinstance(settlement.error, KeyHeld)
            and (group := self.group(settlement.delivery))
        }

    def _run_singles(self, deliveries: Sequence[Delivery], blocked: Mapping[str, float]) -> Iterator[list[Settlement]]:
        for delivery in deliveries:
            delay = blocked.get(self.group(delivery) or "")
            if self._stopping.is_set() or delay is not None:
                settlement = Settlement(delivery, Outcome.IN_FLIGHT, delay_seconds=delay or 0.0)
            else:
                with in_hand(self._context.subscriber_id, (delivery.message.id,)), self._spans.handled(delivery):
                    settlement = self._run_single(delivery)
            yield [settlement]


def _without(some: Sequence[Delivery], deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
    """Return those deliveries that are not among some of them."""
    if not some:
        return deliveries
    receipts = {delivery.receipt for delivery in some}
    return [delivery for delivery in deliveries if delivery.receipt not in receipts]


PARTS = 10
"""Into how many parts a batch is divided that has failed as a whole; one of no more deliveries is processed singly."""

IN_FLIGHT_BACKOFF = Backoff(first_seconds=2.0, longest_seconds=60.0)
"""Until a delivery comes again whose message another transaction was processing."""


def in_flight(delivery: Delivery, error: BaseException, *, longest_seconds: float | None = None) -> Settlement:
    """Return the settlement of a delivery that is to come again later, without a fault of its message."""
    delay = IN_FLIGHT_BACKOFF.seconds(delivery.receive_count)
    return Settlement(delivery, Outcome.IN_FLIGHT, error, min(delay, longest_seconds or delay))
