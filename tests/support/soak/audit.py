"""The audit: of the business's tables, the broker's log and what the processes noted. Pure, but for ``read``.

What is read of txbox's own tables are the dead letters, as a person would, and which fence has completed a lease.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Engine

from support.soak.broker import Broker, Effect, Sent
from support.soak.journal import BEGUN, COMPLETED, ENDED, RECEIVED, Note, read_journals
from support.soak.processes import BILLING, MAILING, MAX_ATTEMPTS, Setting
from txbox import Outcome, Reason

MOST_NAMED = 5


@dataclass
class Facts:
    """What is known when everything has ended.

    Attributes:
        placed: the kind of each order that was committed.
        sent: what the broker took, in order.
        applied: key, number and message id of the effects of billing, in order.
        balance: of all accounts together.
        letters: subscriber (a relay's is its destination), message and reason.
        notes: of the journals.
        effects: the receiver's log, in order.
        leases: the fence that has completed each message, by the ledger's table.
    """

    placed: dict[str, str]
    sent: Sequence[Sent]
    applied: Sequence[tuple[str, int, str]]
    balance: int
    letters: Sequence[tuple[str, str, str]]
    notes: Sequence[Note]
    effects: Sequence[Effect]
    leases: dict[str, int]


def read(engine: Engine, broker: Broker, setting: Setting) -> Facts:
    """Collect the facts."""
    with engine.connect() as connection:

        def rows(sql: str) -> list[tuple]:
            return [tuple(row) for row in connection.exec_driver_sql(sql)]

        placed, sent = rows("SELECT message_id, kind, key, number FROM placed ORDER BY number"), list(broker.sent)
        applied = rows("SELECT key, number, message_id FROM effect ORDER BY position")
        if setting.has_no_broker:  # what was published has arrived, and nothing refuses it
            placed = [(id_, "good" if kind == "refused" else kind, key, number) for id_, kind, key, number in placed]
            sent = [Sent(setting.orders, id_, {"key": key, "number": number}) for id_, _, key, number in placed]
            sent += [Sent(setting.mails, f"mail-{id_}", {"key": key, "number": number}) for key, number, id_ in applied]
        return Facts(
            placed={id_: kind for id_, kind, *_ in placed},
            sent=sent,
            applied=applied,
            balance=int(rows("SELECT sum(balance) FROM account")[0][0]),
            letters=rows("SELECT subscriber_id, message_id, reason FROM dead_letter"),
            notes=read_journals(setting.directory),
            effects=list(broker.effects),
            leases=dict(rows("SELECT message_id, fence FROM message_lease WHERE completed_at IS NOT NULL")),
        )


def audit(facts: Facts) -> list[str]:
    """Return what is wrong, a line for each kind of fault; empty if all is well."""
    wrong = [*_relays(facts), *_billing(facts), *_mailing(facts), *_parked(facts), *_deliveries(facts)]
    return [f"{len(which)} {what}: {', '.join(map(str, which[:MOST_NAMED]))}" for what, which in wrong if which]


def _relays(facts: Facts) -> Iterable[tuple[str, list]]:
    """What was committed has arrived, in order; what was not, has not."""
    arrived = {sent.message_id for sent in facts.sent}
    refused = {message for message, kind in facts.placed.items() if kind == "refused"}
    parked = {message for subscriber, message, _ in facts.letters if subscriber not in (BILLING, MAILING)}
    mails = {f"mail-{message}" for _, _, message in facts.applied}
    owed = facts.placed.keys() | mails
    yield "lost between outbox and broker", sorted(owed - arrived - parked)
    yield "sent and never committed", sorted(arrived - owed)
    yield "both parked by a relay and sent", sorted(arrived & parked)
    yield "parked by a relay and not refused", sorted(parked - refused)
    yield "refused and sent", sorted(refused & arrived)
    orders = [
        (sent.body["key"], sent.body["number"], sent.message_id) for sent in facts.sent if sent.message_id not in mails
    ]
    yield "out of order at the broker", _disorder(_first(orders))
    # Mails are published in the order of the effects, which FIFO has made that of the numbers.
    sent_mails = [
        (sent.body["key"], sent.body["number"], sent.message_id) for sent in facts.sent if sent.message_id in mails
    ]
    yield "mails out of order at the broker", _disorder(_first(sent_mails))


def _billing(facts: Facts) -> Iterable[tuple[str, list]]:
    """Of each order that has arrived: one effect, or one letter."""
    arrived = {sent.message_id for sent in facts.sent} & facts.placed.keys()
    applied = Counter(message for _, _, message in facts.applied)
    parked = Counter(message for subscriber, message, _ in facts.letters if subscriber == BILLING)
    yield "orders lost", sorted(arrived - applied.keys() - parked.keys())
    yield "orders applied twice", sorted(message for message, times in applied.items() if times > 1)
    yield "orders both parked and committed", sorted(applied.keys() & parked.keys())
    yield "orders parked twice", sorted(message for message, times in parked.items() if times > 1)
    yield "applied and never sent", sorted(applied.keys() - arrived)
    yield "poison that was applied", sorted(message for message in applied if facts.placed.get(message) == "poison")
    yield "effects out of order", _disorder(facts.applied)
    if facts.balance != len(facts.applied):
        yield f"in the accounts for {len(facts.applied)} effects", [facts.balance]


def _mailing(facts: Facts) -> Iterable[tuple[str, list]]:
    """Of each mail: an effect at the receiver and a completion, or a letter; and no owner after a later one."""
    arrived = {sent.message_id for sent in facts.sent if sent.message_id.startswith("mail-")}
    parked = {message for subscriber, message, _ in facts.letters if subscriber == MAILING}
    accepted: defaultdict[str, list[Effect]] = defaultdict(list)
    for effect in facts.effects:
        if effect.accepted:
            accepted[effect.message_id].append(effect)
    yield "mails lost", sorted(arrived - accepted.keys() - parked)
    yield "mails neither completed nor parked", sorted(arrived - facts.leases.keys() - parked)
    yield "mails both completed and parked", sorted(facts.leases.keys() & parked)
    completed = [(note.message, int(note.detail)) for note in facts.notes if note.what == COMPLETED]
    completions = Counter(message for message, _ in completed)
    yield "mails completed twice", sorted(message for message, times in completions.items() if times > 1)
    yield (
        "completed by another fence than the table says",
        [(message, fence) for message, fence in completed if facts.leases.get(message) != fence],
    )
    owners: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for effect in facts.effects:
        owners[effect.message_id, effect.fence].add(effect.owner)
    yield "fences given out twice", [lease for lease, several in owners.items() if len(several) > 1]
    yield (
        "fences completed that a later one has overtaken",
        [
            (message, fence)
            for message, fence in facts.leases.items()
            if accepted[message] and fence != accepted[message][-1].fence
        ],
    )
    yield (
        "effects repeated untold",
        [each for effects in accepted.values() for each in effects[1:] if not each.unknown_attempts],
    )


def _parked(facts: Facts) -> Iterable[tuple[str, list]]:
    """What was parked has had its attempts: an outage is none, nor is a delivery that never came to its handler.

    An attempt is counted, or its lease taken, before its handler notes the run. So one that lacks its note must be that
    of a delivery whose end is not known: its process was killed, or stopped until another owner had the message, or
    the server went down with its answer.
    """
    runs = Counter((note.role, note.message) for note in facts.notes if note.what == BEGUN)
    unknown = _unknown_ends(facts)
    yield (
        "parked before their attempts",
        [
            (subscriber, message, reason, runs[subscriber, message], unknown[subscriber, message])
            for subscriber, message, reason in facts.letters
            if subscriber in (BILLING, MAILING)
            and reason != Reason.BEHIND
            and runs[subscriber, message] + unknown[subscriber, message] < MAX_ATTEMPTS
        ],
    )


def _unknown_ends(facts: Facts) -> Counter[tuple[str, str]]:
    """Count the deliveries of each message that were in the hands of a killed process, or were called in flight."""
    settled = [note for note in facts.notes if note.what in set(Outcome)]
    told = {note.detail for note in settled}
    silent = [note for note in facts.notes if note.what == RECEIVED and note.detail not in told]
    in_flight = [note for note in settled if note.what == Outcome.IN_FLIGHT]
    return Counter((note.role, note.message) for note in [*silent, *in_flight])


def _deliveries(facts: Facts) -> Iterable[tuple[str, list]]:
    """Each delivery has one outcome, unless it was in the hands of a killed process; and the outcomes are true.

    A worker that was killed, or whose commit was not answered, does not know what it has done. So what is done must be
    explained by a delivery that was called so, or by one whose end is not known.
    """
    received = {note.detail: note for note in facts.notes if note.what == RECEIVED}
    settled = [note for note in facts.notes if note.what in set(Outcome)]
    ended = {note.process for note in facts.notes if note.what == ENDED}
    outcomes = Counter(note.detail for note in settled)
    silent = [note for receipt, note in received.items() if receipt not in outcomes]
    yield "settled and never received", [note.message for note in settled if note.detail not in received]
    yield "settled twice", [note.message for note in settled if outcomes[note.detail] > 1]
    yield "never settled by a process that was not killed", [note.message for note in silent if note.process in ended]

    called = {
        outcome: Counter((note.role, note.message) for note in settled if note.what == outcome) for outcome in Outcome
    }
    unknown = _unknown_ends(facts).keys()
    done = {(BILLING, message) for _, _, message in facts.applied} | {(MAILING, message) for message in facts.leases}
    parked = {(who, message) for who, message, _ in facts.letters if who in (BILLING, MAILING)}
    processed, dead = called[Outcome.PROCESSED], called[Outcome.DEAD]
    yield "called processed twice", [message for message, times in processed.items() if times > 1]
    yield "called processed, and not done", sorted(processed.keys() - done)
    yield "called duplicates, and not done", sorted(called[Outcome.DUPLICATE].keys() - done)
    yield "called dead and not parked", sorted(dead.keys() - parked)
    yield "done, and explained by no delivery", sorted(done - processed.keys() - unknown)
    yield "parked, and explained by no delivery", sorted(parked - dead.keys() - unknown)


def _first(messages: Iterable[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Return the first arrival of each message."""
    first: dict[str, tuple[str, int, str]] = {}
    for key, number, message in messages:
        first.setdefault(message, (key, number, message))
    return list(first.values())


def _disorder(messages: Iterable[tuple[str, int, str]]) -> list[str]:
    """Return those that came after one of their key with a greater number."""
    highest: dict[str, int] = {}
    late = []
    for key, number, message in messages:
        if number < highest.get(key, 0):
            late.append(f"{message} after {highest[key]}")
        highest[key] = max(number, highest.get(key, 0))
    return late
