"""The soak's audit finds each fault, and none where all is well: each test spoils one fact."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from support.soak.audit import Facts, audit
from support.soak.broker import Effect, Sent
from support.soak.journal import BEGUN, COMPLETED, ENDED, RECEIVED, Note
from support.soak.processes import BILLING, MAILING, MAX_ATTEMPTS
from txbox import Outcome

ORDERS, MAILS = "orders.fifo", "mails"


def sent(message: str, number: int, queue: str = ORDERS) -> Sent:
    return Sent(queue, message, {"key": "a", "number": number})


def delivery(process: str, message: str, outcome: Outcome | None = None) -> list[Note]:
    """What a process notes of a delivery; without an outcome: it was killed with it."""
    role = MAILING if message.startswith("mail-") else BILLING
    what = [RECEIVED, BEGUN] if outcome is None else [RECEIVED, BEGUN, outcome]
    return [Note(process, role, each, message, f"{process} {message}") for each in what]


def well() -> Facts:
    """Two orders are applied, one is poison, one is refused; the second mail is repeated by an owner who was told.

    A process is killed after the commit of the second order and after its mail; another one completes that mail, and
    is not told so.
    """
    return Facts(
        placed={"a-1": "good", "a-2": "poison", "a-3": "good", "a-4": "refused"},
        sent=[
            *(sent(f"a-{number}", number) for number in (1, 2, 1, 3)),
            *(sent(f"mail-a-{number}", number, MAILS) for number in (1, 3, 1)),
        ],
        applied=[("a", 1, "a-1"), ("a", 3, "a-3")],
        balance=2,
        letters=[(BILLING, "a-2", "failed"), ("txbox:outbox:orders", "a-4", "failed")],
        notes=[
            *delivery("lives", "a-1", Outcome.PROCESSED),
            *[Note("killed", BILLING, BEGUN, "a-2")] * (MAX_ATTEMPTS - 1),
            *delivery("lives", "a-2", Outcome.DEAD),
            *delivery("killed", "a-3"),
            *delivery("lives", "a-3", Outcome.DUPLICATE),
            *delivery("lives", "mail-a-1", Outcome.PROCESSED),
            Note("lives", MAILING, COMPLETED, "mail-a-1", "7"),
            *delivery("killed", "mail-a-3"),
            *delivery("lives", "mail-a-3", Outcome.IN_FLIGHT),
            Note("lives", BILLING, ENDED),
        ],
        effects=[
            Effect("mail-a-1", 7, 0, "one", True),
            Effect("mail-a-3", 8, 0, "one", True),
            Effect("mail-a-3", 9, 1, "two", True),
            Effect("mail-a-3", 8, 0, "one", False),
        ],
        leases={"mail-a-1": 7, "mail-a-3": 9},
    )


def noted(facts: Facts, *notes: Note) -> Facts:
    return replace(facts, notes=[*facts.notes, *notes])


def without(facts: Facts, which: Callable[[Note], bool]) -> Facts:
    return replace(facts, notes=[note for note in facts.notes if not which(note)])


Spoil = Callable[[Facts], Facts]

FAULTS: dict[str, Spoil] = {
    "lost between outbox and broker": lambda facts: replace(facts, placed={**facts.placed, "a-5": "good"}),
    "sent and never committed": lambda facts: replace(facts, sent=[*facts.sent, sent("a-9", 9)]),
    "both parked by a relay and sent": lambda facts: replace(
        facts, letters=[*facts.letters, ("txbox", "a-1", "failed")]
    ),
    "out of order at the broker": lambda facts: replace(facts, sent=[facts.sent[3], *facts.sent]),
    "mails out of order at the broker": lambda facts: replace(facts, sent=[facts.sent[5], *facts.sent]),
    "orders lost": lambda facts: replace(facts, letters=facts.letters[1:]),
    "orders applied twice": lambda facts: replace(facts, applied=[*facts.applied, ("a", 3, "a-3")]),
    "orders both parked and committed": lambda facts: replace(
        facts, letters=[*facts.letters, (BILLING, "a-1", "crashed")]
    ),
    "effects out of order": lambda facts: replace(facts, applied=facts.applied[::-1]),
    "in the accounts": lambda facts: replace(facts, balance=3),
    "poison that was applied": lambda facts: replace(facts, placed={**facts.placed, "a-3": "poison"}),
    "mails lost": lambda facts: replace(facts, effects=facts.effects[1:]),
    "mails neither completed nor parked": lambda facts: replace(facts, leases={"mail-a-1": 7}),
    "mails both completed and parked": lambda facts: replace(
        facts, letters=[*facts.letters, (MAILING, "mail-a-1", "failed")]
    ),
    "mails completed twice": lambda facts: replace(
        facts, notes=[*facts.notes, *(note for note in facts.notes if note.what == COMPLETED)]
    ),
    "completed by another fence": lambda facts: replace(facts, leases={**facts.leases, "mail-a-1": 6}),
    "fences given out twice": lambda facts: replace(
        facts, effects=[*facts.effects, Effect("mail-a-1", 7, 1, "two", True)]
    ),
    "fences completed that a later one": lambda facts: replace(facts, leases={**facts.leases, "mail-a-3": 8}),
    "effects repeated untold": lambda facts: replace(
        facts, effects=[*facts.effects[:2], replace(facts.effects[2], unknown_attempts=0)]
    ),
    "parked before their attempts": lambda facts: without(facts, lambda note: note.message == "a-2"),
    "settled and never received": lambda facts: without(facts, lambda note: note.what == RECEIVED),
    "settled twice": lambda facts: noted(facts, *delivery("lives", "a-1", Outcome.PROCESSED)),
    "never settled": lambda facts: noted(facts, *delivery("lives", "a-7")),
    "called processed twice": lambda facts: noted(facts, *delivery("other", "a-1", Outcome.PROCESSED)),
    "called processed, and not done": lambda facts: noted(facts, *delivery("other", "a-2", Outcome.PROCESSED)),
    "called duplicates, and not done": lambda facts: noted(facts, *delivery("other", "a-2", Outcome.DUPLICATE)),
    "called dead and not parked": lambda facts: noted(facts, *delivery("other", "a-3", Outcome.DEAD)),
    "done, and explained by no delivery": lambda facts: without(facts, lambda note: note.process == "killed"),
    "parked, and explained by no delivery": lambda facts: without(facts, lambda note: note.detail == "lives a-2"),
}


def test_where_all_is_well_nothing_is_found() -> None:
    assert audit(well()) == []


def test_an_attempt_without_a_note_is_one_of_a_delivery_whose_end_is_not_known() -> None:
    facts = without(well(), lambda note: note.message == "a-2" and note.process == "killed")
    lost = [Note("killed", BILLING, RECEIVED, "a-2", f"receipt {number}") for number in range(MAX_ATTEMPTS - 1)]
    assert audit(noted(facts, *lost)) == []
    assert any("parked before their attempts" in line for line in audit(noted(facts, *lost[1:])))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    assert any(fault in line for line in audit(FAULTS[fault](well())))
