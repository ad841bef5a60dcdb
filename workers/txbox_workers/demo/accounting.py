"""The reckoning: every delivery accounted for, every customer's total compared with the file."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from txbox import Outcome
from txbox_workers.demo.journal import Sightings
from txbox_workers.demo.purchases import Account

__all__ = ["Comparison", "Deliveries", "account_for", "compare"]


@dataclass(frozen=True, slots=True)
class Deliveries:
    """What became of all deliveries.

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
