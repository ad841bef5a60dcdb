"""The processor: decide in which order to process a batch of deliveries, and what not to begin. No broker, no database.

The subclasses process one delivery, or several together: ``InboxProcessor`` in transactions of the database that has
the effects, ``LedgerProcessor`` under leases.

Attempts are counted in a database. If the end of an attempt cannot be saved there, it is saved when the database can be
reached again. Until then the delivery is kept: another worker would decide by a wrong count.
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
from txbox_workers.delivery import Delivery, Settlement, SettlesInTransaction
from txbox_workers.processing.outage_errors import bookkeeping
from txbox_workers.processing.transaction_limits import TimeLimit, unlimited


class Halt(Protocol):
    """Says when nothing more may begin: a ``threading.Event`` or a deadline."""

    def is_set(self) -> bool:
        """Whether that is now."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, at most ``timeout`` seconds; return whether it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """Where a processor runs."""

    subscriber_id: str  # whose messages are processed
    source_name: str  # where deliveries come from, for events and dead letters
    hooks: Sequence[Hook]  # called with every event
    wants_details: Callable[[], bool]  # whether a hook or the log takes the events of messages that succeed
    stopping: Halt  # says when nothing more may begin
    cut_short: Halt | None = None
    """Within a batch, begin no more handlers once this is set: what was not begun is removed from the inbox again, and
    the rest commits. None means that batches are always finished."""
    ends_at: Callable[[], float | None] = lambda: None
    """The reading of ``elapsed`` at which this process ends and beyond which no lease may last; None means never."""
    spans: ConsumerSpans = NO_SPANS  # of the processed messages
    limit: TimeLimit = unlimited  # says how long a transaction may take
    settles: SettlesInTransaction | None = None  # the source, if it is in the database of the effects


class Processor(ABC):
    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._stopping = context.stopping
        self._spans: ConsumerSpans = context.spans
        self._unsaved: dict[Callable[[], object], str] = {}

    @abstractmethod
    def check(self) -> None:
        """Raise unless the stores answer and have what is needed. Called before any message is taken.

        Raises:
            DatabaseUnavailable: the database, or the store of the ledger, does not answer.
            SchemaMissing, NotInTransaction, LedgerError: it cannot be used like this.
        """

    @abstractmethod
    def check_recording(self) -> None:
        """Raise unless a message could be processed now. Called after an outage.

        Raises:
            DatabaseUnavailable, SchemaMissing, LedgerError: it could not.
        """

    # --- ends of attempts that are not saved yet ----------------------------------------------------------------------

    def has_unsaved(self, delivery: Delivery) -> bool:
        """Whether an attempt of this message has ended but is not recorded yet.

        Its delivery must be kept until then: another worker would conclude that this process has crashed.
        """
        return delivery.message.id in tuple(self._unsaved.values())

    def save_unsaved(self) -> None:
        """Save how attempts have ended.

        Raises:
            DatabaseUnavailable: not everything could be saved.
        """
        for save in tuple(self._unsaved):
            with bookkeeping():
                save()
            self._unsaved.pop(save, None)  # not earlier: another thread may ask what is unsaved

    def _save_later(self, message_id: str, save: Callable[[], object]) -> None:
        """Queue ``save`` until the database answers. It may run twice."""
        self._unsaved[save] = message_id

    def _discard_unsaved(self, message_id: str) -> None:
        """Forget a message's unsaved attempts: its count no longer matters."""
        for save, saved_for in tuple(self._unsaved.items()):
            if saved_for == message_id:
                self._unsaved.pop(save, None)

    def process(self, deliveries: Sequence[Delivery]) -> Iterator[list[Settlement]]:
        """Process deliveries, and yield settlements as soon as they are certain.

        Once the worker is stopping, nothing more begins, and the rest is handed back untouched.

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
        """Process each message once, then its repeats: in batches, and singly where a batch is not possible."""
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
            # After a failure in some group, one by one: what comes next in that group must not run.
            if not blocked and not self._stopping.is_set():
                single = [delivery for delivery in unique if self._is_single(delivery)]
                if single and any(self.group(delivery) for delivery in unique):
                    single = unique  # groups keep an order
            together = self._portions(_without(single, unique))
            batches = chain.from_iterable(self._run_batches(portion, blocked) for portion in together)
            for settlements in chain(batches, self._run_singles(single, blocked)):
                if rest:
                    settled_before.update((settlement.delivery.message.id, settlement) for settlement in settlements)
                blocked |= self.blocked_by(settlements)
                yield settlements

    def _without_repeats(self, deliveries: Sequence[Delivery]) -> tuple[Sequence[Delivery], Sequence[Delivery]]:
        """Return deliveries in which no message comes twice, and the rest.

        What follows a repeat in its group waits with it, so that the group keeps its order.
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
        """Settle a repeat of a message that was in the same batch; return None if it has to be processed.

        It is not run again at once: ten copies of a message whose handler fails would use up its attempts in a moment.
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
        """Process deliveries together; if that fails, do the same for each tenth of them, and process a few singly.

        With one failure in a thousand, the others commit in about thirty transactions instead of a thousand.
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

    def _portions(self, deliveries: Sequence[Delivery]) -> Sequence[Sequence[Delivery]]:
        """Divide deliveries that were received together into what is processed together."""
        return [deliveries]

    def _is_single(self, delivery: Delivery) -> bool:  # noqa: ARG002 - a hook
        """Whether a delivery must not be processed together with others."""
        return False

    def _run_batch(self, deliveries: Sequence[Delivery]) -> list[Settlement] | None:  # noqa: ARG002 - a hook
        """Process several deliveries at once; return None if they have to be processed singly."""
        return None

    @abstractmethod
    def _run_single(self, delivery: Delivery) -> Settlement:
        """Process one delivery.

        Raises:
            DatabaseUnavailable: its outcome is not known.
        """

    def group(self, delivery: Delivery) -> str | None:
        """Return the group that keeps a delivery's order within a batch; None if there is no order."""
        return delivery.failure_group or delivery.group

    def blocked_by(self, settlements: Sequence[Settlement]) -> dict[str, float]:
        """Return the groups in which later deliveries must not overtake, each with the delay for handing those back.

        A broker's group itself holds back what follows. Where the order is the worker's, what follows comes again after
        the same delay. A copy that is too early has a dead letter that keeps its place, so it blocks nothing: what
        follows may be the copy it waits for.
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
    if not some:
        return deliveries
    receipts = {delivery.receipt for delivery in some}
    return [delivery for delivery in deliveries if delivery.receipt not in receipts]


PARTS = 10
"""How many parts a failed batch is divided into. A batch of no more deliveries than this is processed singly."""

IN_FLIGHT_BACKOFF = Backoff(first_seconds=2.0, longest_seconds=60.0)
"""The delay of a delivery whose message another transaction was processing."""


def in_flight(delivery: Delivery, error: BaseException, *, longest_seconds: float | None = None) -> Settlement:
    """Return the settlement of a delivery that is to come again later through no fault of its message."""
    delay = IN_FLIGHT_BACKOFF.seconds(delivery.receive_count)
    return Settlement(delivery, Outcome.IN_FLIGHT, error, min(delay, longest_seconds or delay))
