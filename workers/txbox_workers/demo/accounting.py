"""The reckoning: every send and delivery accounted for, every total and every notification compared with the file."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from txbox import Outcome
from txbox_workers.demo.journal import Sightings
from txbox_workers.demo.notification import Notification
from txbox_workers.demo.purchases import Account, Purchase

__all__ = [
    "Comparison",
    "Deliveries",
    "Notices",
    "Sends",
    "account_for",
    "account_for_sends",
    "compare",
    "compare_notifications",
]


@dataclass(frozen=True, slots=True)
class Deliveries:
    """What became of all deliveries to one subscriber.

    Attributes:
        received: deliveries that reached a worker.
        processed: messages in the inbox: those that the database says were processed.
        duplicates: deliveries that the inbox rejected.
        failed: deliveries whose handler failed, parked ones included.
        in_flight: deliveries that were in the hands of a killed worker, or handed back, without effect.
        contradictions: what cannot be, in words; empty if all is well.
    """

    received: int
    processed: int
    duplicates: int
    failed: int
    in_flight: int
    contradictions: tuple[str, ...]

    @property
    def adds_up(self) -> bool:
        """Whether every delivery is accounted for, once."""
        total = self.processed + self.duplicates + self.failed + self.in_flight
        return self.received == total and not self.contradictions


def account_for(sightings: Sightings, processed_ids: frozenset[str]) -> Deliveries:
    """Account for every delivery, from two sources that know nothing of each other.

    The workers' journals say what was received and which outcomes the workers saw; the database says which messages
    were processed. A worker that was killed after its commit saw no outcome: then the message is in the database,
    no journal calls it processed, and one of its deliveries without an outcome must be the one that did it.

    Args:
        sightings: from the journals.
        processed_ids: the message ids in the inbox.
    """
    contradictions = []
    outcomes = Counter(sightings.outcomes.values())
    if strays := sightings.outcomes.keys() - sightings.received.keys():
        contradictions.append(f"{len(strays)} outcomes of deliveries that nobody received")
    seen_processed = Counter(
        sightings.received.get(delivery, "")
        for delivery, outcome in sightings.outcomes.items()
        if outcome is Outcome.PROCESSED
    )
    if twice := [message for message, times in seen_processed.items() if times > 1]:
        contradictions.append(f"{len(twice)} messages processed twice, such as {twice[0]}")
    if missing := seen_processed.keys() - processed_ids:
        contradictions.append(f"{len(missing)} messages seen processed that are not in the inbox")
    silent = Counter(message for delivery, message in sightings.received.items() if delivery not in sightings.outcomes)
    committed_silently = processed_ids - seen_processed.keys()
    if unexplained := committed_silently - silent.keys():
        contradictions.append(f"{len(unexplained)} messages processed that no delivery explains")
    return Deliveries(
        received=len(sightings.received),
        processed=len(processed_ids),
        duplicates=outcomes[Outcome.DUPLICATE],
        failed=outcomes[Outcome.FAILED] + outcomes[Outcome.DEAD] + outcomes[Outcome.MISMATCH],
        in_flight=outcomes[Outcome.IN_FLIGHT] + silent.total() - len(committed_silently & silent.keys()),
        contradictions=tuple(contradictions),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The database against the file.

    Attributes:
        customers: how many the file has.
        wrong: customers whose number of purchases, CDs or cents differs.
        expected_cents: what the file adds up to.
        found_cents: what the accounts add up to.
        difference_cents: the differences of all customers added up, without their signs.
    """

    customers: int
    wrong: tuple[str, ...]
    expected_cents: int
    found_cents: int
    difference_cents: int

    @property
    def exact(self) -> bool:
        """Whether every customer is right to the cent."""
        return not self.wrong


def compare(expected: Mapping[str, Account], found: Mapping[str, Account]) -> Comparison:
    """Compare every customer's account with the file's."""
    everyone = expected.keys() | found.keys()
    nothing = Account()
    pairs = {customer: (expected.get(customer, nothing), found.get(customer, nothing)) for customer in everyone}
    return Comparison(
        customers=len(expected),
        wrong=tuple(sorted(customer for customer, (want, got) in pairs.items() if want != got)),
        expected_cents=sum(account.cents for account in expected.values()),
        found_cents=sum(account.cents for account in found.values()),
        difference_cents=sum(abs(want.cents - got.cents) for want, got in pairs.values()),
    )


@dataclass(frozen=True, slots=True)
class Sends:
    """What the relays have sent.

    Attributes:
        messages: messages that they have handed to the broker.
        handed: how often they have done so, all together.
        contradictions: what cannot be, in words; empty if all is well.
    """

    messages: int
    handed: int
    contradictions: tuple[str, ...]

    @property
    def again(self) -> int:
        """Sends of a message that had been sent before: its relay was killed, or the answer was lost."""
        return self.handed - self.messages


def account_for_sends(handed: Mapping[str, int], committed: Iterable[str], processed: Iterable[str]) -> Sends:
    """Account for every message that was handed to the broker, from three sources that know nothing of each other.

    Args:
        handed: from the relays' journals: the ids of messages, and how often each was handed over.
        committed: ids that are in the outbox of a committed transaction, by the file.
        processed: ids of the messages that billing has published, by what the next inbox has processed.
    """
    due = frozenset(committed) | frozenset(processed)
    contradictions = []
    if strays := sorted(handed.keys() - due):
        contradictions.append(
            f"{len(strays)} messages sent that were rolled back or that nobody has processed, such as {strays[0]}"
        )
    if unsent := sorted(due - handed.keys()):
        contradictions.append(f"{len(unsent)} messages that no relay has sent, such as {unsent[0]}")
    return Sends(messages=len(handed), handed=sum(handed.values()), contradictions=tuple(contradictions))


@dataclass(frozen=True, slots=True)
class Notices:
    """The notifications against the file.

    Attributes:
        found: how many there are.
        missing: purchases of which the customer was not told.
        repeated: purchases of which the customer was told more than once.
        wrong: purchases that the file does not have, or with another customer or amount.
    """

    found: int
    missing: tuple[str, ...]
    repeated: tuple[str, ...]
    wrong: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every customer was told of every purchase, once."""
        return not (self.missing or self.repeated or self.wrong)


def compare_notifications(purchases: Iterable[Purchase], found: Iterable[Notification]) -> Notices:
    """Compare the notifications with the file."""
    expected = {one.event_id: Notification(one.event_id, one.customer_id, one.cents) for one in purchases}
    times, wrong = Counter[str](), set()
    for notification in found:
        times[notification.purchase_id] += 1
        if expected.get(notification.purchase_id) != notification:
            wrong.add(notification.purchase_id)
    return Notices(
        found=times.total(),
        missing=tuple(sorted(expected.keys() - times.keys())),
        repeated=tuple(sorted(purchase for purchase, number in times.items() if number > 1)),
        wrong=tuple(sorted(wrong)),
    )
