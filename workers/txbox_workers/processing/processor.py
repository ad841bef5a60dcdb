"""What becomes of deliveries: in which order they are processed, and what is not to be begun. No broker, no database.

How one delivery, or several together, are processed, subclasses say: ``InboxProcessor`` with transactions of the
database that the effects are in, ``LedgerProcessor`` with leases.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from txbox import Outcome
from txbox.backoff import Backoff
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.processing.handler_transactions import Halt
from txbox_workers.processing.outages import bookkeeping

__all__ = ["Processor"]


class Processor(ABC):
    """Runs the deliveries of one worker."""

    def __init__(self, stopping: Halt) -> None:
        """Take what says that nothing more is to be begun."""
        self._stopping = stopping
        self._owed: dict[Callable[[], object], str] = {}

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

    # --- what the database is still to be told ------------------------------------------------------------------------

    def owes(self, delivery: Delivery) -> bool:
        """Whether the database does not know yet how an attempt of this message has ended.

        Its delivery is to be kept until it does: another worker would take the silence for the end of this process.
        """
        return delivery.message.id in tuple(self._owed.values())

    def settle_owed(self) -> None:
        """Tell the database what it is still to be told.

        Raises:
            DatabaseUnavailable: it could not be told all of it.
        """
        for tell in tuple(self._owed):
            with bookkeeping():
                tell()
            self._owed.pop(tell, None)  # not before: another thread may ask what is owed

    def _owe(self, message_id: str, tell: Callable[[], object]) -> None:
        """Have the database told how an attempt has ended; telling it twice must do no harm."""
        self._owed[tell] = message_id

    def _drop_owed(self, message_id: str) -> None:
        """Owe nothing for a message any more, as what is counted of it decides nothing."""
        for tell, owed_for in tuple(self._owed.items()):
            if owed_for == message_id:
                self._owed.pop(tell, None)

    def process(self, deliveries: Sequence[Delivery]) -> Iterator[list[Settlement]]:
        """Process deliveries, and yield what is to be told to the broker as soon as it stands.

        Once it is stopping, nothing is begun any more, and the rest is handed back untouched.

        Args:
            deliveries: in the broker's order.

        Raises:
            DatabaseUnavailable: whatever was not yielded before has no known outcome.
        """
        self.settle_owed()
        blocked: set[str] = set()
        settled_before: dict[str, Settlement] = {}
        for several in _without_repeats(deliveries):
            repeats = [self._settled_like(d, settled_before.get(d.message.id)) for d in several]
            if known := [settlement for settlement in repeats if settlement is not None]:
                blocked.update(s.delivery.group for s in known if s.delivery.group and not s.outcome.acked)
                yield known
            unique = [d for d, settlement in zip(several, repeats, strict=True) if settlement is None]
            if not unique:
                continue
            # After a failure in some group, one by one: what comes next in that group is not to be run.
            alone = blocked or len(unique) == 1 or self._stopping.is_set()
            settled = None if alone else self._process_together(unique)
            rounds = self._process_singly(unique, blocked) if settled is None else [settled]
            for settlements in rounds:
                settled_before.update((settlement.delivery.message.id, settlement) for settlement in settlements)
                # What follows in the same group must not overtake it.
                blocked.update(s.delivery.group for s in settlements if s.delivery.group and not s.outcome.acked)
                yield settlements

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

    def _process_together(self, deliveries: Sequence[Delivery]) -> list[Settlement] | None:  # noqa: ARG002 - a hook
        """Process several deliveries at once; None if they have to be processed singly."""
        return None

    @abstractmethod
    def _process_one(self, delivery: Delivery) -> Settlement:
        """Process one delivery.

        Raises:
            DatabaseUnavailable: its outcome is not known.
        """

    def _process_singly(self, deliveries: Sequence[Delivery], blocked: set[str]) -> Iterator[list[Settlement]]:
        for delivery in deliveries:
            if self._stopping.is_set() or delivery.group in blocked:
                settlement = Settlement(delivery, Outcome.IN_FLIGHT)
            else:
                settlement = self._process_one(delivery)
            yield [settlement]


IN_FLIGHT_BACKOFF = Backoff(first_seconds=2.0, longest_seconds=60.0)
"""Until a delivery comes again whose message another transaction was processing."""


def _without_repeats(deliveries: Sequence[Delivery]) -> Iterator[list[Delivery]]:
    """Split deliveries so that no message comes twice in one list; later ones find the first one's outcome.

    What follows a repeat in its group waits with it, so that the order within the group stays.
    """
    rest = list(deliveries)
    while rest:
        unique: dict[str, Delivery] = {}
        waiting: list[Delivery] = []
        groups: set[str] = set()
        for delivery in rest:
            if delivery.message.id in unique or delivery.group in groups:
                waiting.append(delivery)
                if delivery.group is not None:
                    groups.add(delivery.group)
            else:
                unique[delivery.message.id] = delivery
        yield list(unique.values())
        rest = waiting
