"""The reckoning: every send and delivery accounted for, every total and every mail compared with the file."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from txbox import Outcome
from txbox_demo.journal import Diary, Sightings
from txbox_demo.notification import SENDING, SENT, UNSURE, Mail
from txbox_demo.purchases import Account, Purchase
from txbox_demo.worker_process import COMPLETED

__all__ = [
    "Comparison",
    "Deliveries",
    "Notices",
    "Sends",
    "account_for",
    "account_for_sends",
    "compare",
    "compare_mails",
]


@dataclass(frozen=True, slots=True)
class Deliveries:
    """What became of all deliveries to one subscriber.

    Attributes:
        received: deliveries that reached a worker.
        processed: messages in the inbox, or completed in the ledger: those that the database says were processed.
        duplicates: deliveries that the inbox or the ledger rejected.
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
        processed_ids: the message ids in the inbox, or completed in the ledger.
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
        contradictions.append(f"{len(missing)} messages seen processed that the database does not have")
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
    """The mails that the SMTP server has accepted, against the file and against what the workers knew.

    Attributes:
        mails: how many there are.
        refused: mails that the server has refused: their workers knew, and sent them again.
        once: purchases of which the customer was told once.
        unsure: messages that a worker took over from one that had died, or had been too slow, at a moment that nobody
            knows: the mail may have been sent or not.
        unsure_twice: purchases of which the customer was told more than once, because of that.
        unsure_once: messages that were taken over in the same way, and whose mail had not been sent before.
        missing: purchases of which the customer was not told.
        repeated: purchases of which the customer was told more than once, although somebody could have known.
        wrong: purchases that the file does not have, or with another customer or amount.
        contradictions: what cannot be, in words; empty if all is well.
    """

    mails: int
    refused: int
    once: int
    unsure: int
    unsure_twice: int
    unsure_once: int
    missing: tuple[str, ...]
    repeated: tuple[str, ...]
    wrong: tuple[str, ...]
    contradictions: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every customer was told of every purchase, and once wherever that can be known."""
        return not (self.missing or self.repeated or self.wrong)


def compare_mails(
    purchases: Iterable[Purchase],
    mails: Iterable[Mail],
    diaries: Mapping[str, Diary],
    killed: Collection[str],
    *,
    refused: int = 0,
) -> Notices:
    """Compare the mails with the file, and see which of those that came twice had to.

    A copy is excused if nobody could know of it when the next one was sent::

        worker A   acquire ── mail, 250 ── killed, or its lease is lost
        worker B                              the lease runs out ── acquire: unsure ── mail again ── complete

    So A is among the killed, or its delivery has ended without effect; A has never completed the message; B has found
    an attempt whose end is not known; each has sent one copy; and both were sent for the same message. Any other copy
    is a fault: of the ledger, of the handler, or of whoever has published twice.

    Args:
        purchases: from the file.
        mails: in the order in which the server accepted them.
        diaries: of the workers, by process.
        killed: the processes that were killed.
        refused: how many mails the server has refused.
    """
    expected = {one.event_id: one for one in purchases}
    mails = list(mails)
    copies: defaultdict[str, list[Mail]] = defaultdict(list)
    wrong = set()
    for mail in mails:
        copies[mail.purchase_id].append(mail)
        purchase = expected.get(mail.purchase_id)
        if purchase is None or (purchase.customer_id, purchase.cents) != (mail.customer_id, mail.cents):
            wrong.add(mail.purchase_id)
    several = {purchase: sent for purchase, sent in copies.items() if len(sent) > 1}
    repeated = {purchase for purchase, sent in several.items() if not _all_excused(sent, diaries, killed)}
    unsure = {message for diary in diaries.values() for message in diary.notes[UNSURE]}
    times = Counter(mail.message_id for mail in mails)
    return Notices(
        mails=len(mails),
        refused=refused,
        once=len(copies) - len(several),
        unsure=len(unsure),
        unsure_twice=len(several.keys() - repeated),
        unsure_once=sum(times[message] == 1 for message in unsure),
        missing=tuple(sorted(expected.keys() - copies.keys())),
        repeated=tuple(sorted(repeated)),
        wrong=tuple(sorted(wrong)),
        contradictions=tuple(_contradictions(mails, diaries)),
    )


def _contradictions(mails: Iterable[Mail], diaries: Mapping[str, Diary]) -> Iterator[str]:
    """Hold what the server has against what the workers have noted."""
    accepted = Counter((mail.worker, mail.message_id) for mail in mails)
    noted: dict[str, Counter[tuple[str, str]]] = {
        what: Counter(
            {(worker, name): times for worker, diary in diaries.items() for name, times in diary.notes[what].items()}
        )
        for what in (SENDING, SENT)
    }
    if unsaid := accepted - noted[SENDING]:
        yield f"{unsaid.total()} mails accepted that no worker says it sent, such as {min(unsaid)[1]}"
    if lost := noted[SENT] - accepted:
        yield f"{lost.total()} mails sent that the server does not have, such as {min(lost)[1]}"


def _all_excused(sent: Sequence[Mail], diaries: Mapping[str, Diary], killed: Collection[str]) -> bool:
    """Whether each copy of a mail but the last had to be followed by another one."""
    if len({mail.message_id for mail in sent}) > 1 or len({mail.worker for mail in sent}) < len(sent):
        return False
    return all(
        _nobody_knew(earlier, diaries.get(earlier.worker, Diary()), earlier.worker in killed)
        and later.message_id in diaries.get(later.worker, Diary()).notes[UNSURE]
        for earlier, later in pairwise(sent)
    )


def _nobody_knew(mail: Mail, diary: Diary, was_killed: bool) -> bool:
    """Whether the worker that sent a mail could not tell anybody."""
    outcomes = diary.outcomes[mail.message_id]
    lease_lost = Outcome.IN_FLIGHT in outcomes
    return (was_killed or lease_lost) and not (diary.notes[COMPLETED][mail.message_id] or outcomes[Outcome.PROCESSED])
