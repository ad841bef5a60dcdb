"""The reckoning finds what cannot be: it is what the demo's exit status rests on."""

from dataclasses import replace

import pytest

from txbox import Outcome
from txbox_demo.accounting import account_for, account_for_sends, compare, compare_mails
from txbox_demo.journal import Diary, Sightings
from txbox_demo.notification import SENDING, SENT, UNSURE, Mail
from txbox_demo.purchases import Account, Purchase
from txbox_demo.worker_process import COMPLETED

HONEST = Sightings(
    received={"d1": "a", "d2": "a", "d3": "b", "d4": "c", "d5": "c", "d6": "d"},
    outcomes={
        "d1": Outcome.PROCESSED,
        "d2": Outcome.DUPLICATE,
        "d3": Outcome.FAILED,
        # d4: killed before its commit; d6: killed after it
        "d5": Outcome.PROCESSED,
    },
)


def test_every_delivery_is_accounted_for() -> None:
    deliveries = account_for(HONEST, frozenset("acd"))
    assert deliveries.adds_up
    assert deliveries.contradictions == ()
    assert (deliveries.received, deliveries.processed, deliveries.duplicates) == (6, 3, 1)
    assert (deliveries.failed, deliveries.in_flight) == (1, 1)


def test_a_delivery_that_was_handed_back_is_in_flight() -> None:
    deliveries = account_for(Sightings({"d1": "a"}, {"d1": Outcome.IN_FLIGHT}), frozenset())
    assert deliveries.adds_up
    assert deliveries.in_flight == 1


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DEAD, Outcome.MISMATCH])
def test_what_was_not_processed_has_failed(outcome: Outcome) -> None:
    assert account_for(Sightings({"d1": "a"}, {"d1": outcome}), frozenset()).failed == 1


@pytest.mark.parametrize(
    ("sightings", "inbox", "contradiction"),
    [
        (
            Sightings({"d1": "a", "d2": "a"}, {"d1": Outcome.PROCESSED, "d2": Outcome.PROCESSED}),
            {"a"},
            "1 messages processed twice, such as a",
        ),
        (
            Sightings({"d1": "a"}, {"d1": Outcome.PROCESSED}),
            set(),
            "1 messages seen processed that the database does not have",
        ),
        (Sightings(), {"a"}, "1 messages processed that no delivery explains"),
        (Sightings({"d1": "a"}, {"d1": Outcome.DUPLICATE}), {"a"}, "1 messages processed that no delivery explains"),
        (Sightings({}, {"d1": Outcome.DUPLICATE}), set(), "1 outcomes of deliveries that nobody received"),
    ],
    ids=["processed twice", "not in the inbox", "no delivery", "only duplicates", "not received"],
)
def test_a_contradiction_is_found(sightings: Sightings, inbox: set[str], contradiction: str) -> None:
    deliveries = account_for(sightings, frozenset(inbox))
    assert not deliveries.adds_up
    assert any(found.startswith(contradiction) for found in deliveries.contradictions)


RIGHT = {"1": Account(2, 3, 1000), "2": Account(1, 1, 500)}


def test_accounts_that_are_right_are_exact() -> None:
    comparison = compare(RIGHT, dict(RIGHT))
    assert comparison.exact
    assert (comparison.customers, comparison.difference_cents) == (2, 0)
    assert comparison.expected_cents == comparison.found_cents == 1500


@pytest.mark.parametrize(
    ("found", "wrong", "difference"),
    [
        ({**RIGHT, "1": Account(3, 3, 1000)}, ("1",), 0),
        ({**RIGHT, "1": Account(2, 4, 1000)}, ("1",), 0),
        ({**RIGHT, "1": Account(2, 3, 1001)}, ("1",), 1),
        ({"1": RIGHT["1"]}, ("2",), 500),
        ({**RIGHT, "3": Account(1, 1, 7)}, ("3",), 7),
        ({"1": Account(2, 3, 1100), "2": Account(1, 1, 400)}, ("1", "2"), 200),
        ({}, ("1", "2"), 1500),
    ],
    ids=["a purchase", "a CD", "a cent", "a customer missing", "a customer too many", "errors that cancel", "nothing"],
)
def test_accounts_that_are_wrong_are_named(found: dict[str, Account], wrong: tuple[str, ...], difference: int) -> None:
    comparison = compare(RIGHT, found)
    assert not comparison.exact
    assert comparison.wrong == wrong
    assert comparison.difference_cents == difference


def test_every_send_is_accounted_for() -> None:
    sends = account_for_sends({"p-1": 1, "p-2": 3, "n-1": 1, "n-2": 2}, ["p-1", "p-2"], ["n-1", "n-2"])
    assert (sends.messages, sends.handed, sends.again, sends.contradictions) == (4, 7, 3, ())


@pytest.mark.parametrize(
    ("handed", "contradiction"),
    [
        ({"p-1": 1, "n-1": 1, "p-1-declined": 1}, "1 messages sent that were rolled back or that nobody has processed"),
        ({"p-1": 1}, "1 messages that no relay has sent, such as n-1"),
        ({"n-1": 1}, "1 messages that no relay has sent, such as p-1"),
    ],
)
def test_a_send_that_should_not_be_and_one_that_should_are_seen(handed: dict[str, int], contradiction: str) -> None:
    (found,) = account_for_sends(handed, ["p-1"], ["n-1"]).contradictions
    assert found.startswith(contradiction)


PURCHASES = [Purchase("p-1", "1", "19970101", 1, 100), Purchase("p-2", "2", "19970101", 1, 250)]
FIRST, OTHER = "notification-001", "notification-002"
MAIL = Mail("m-1", "p-1", "1", 100, FIRST)
MAILS = [MAIL, Mail("m-2", "p-2", "2", 250, FIRST)]


def diary(*notes: tuple[str, str], outcomes: dict[str, Outcome] | None = None) -> Diary:
    written = Diary()
    for what, message in notes:
        written.notes[what][message] += 1
    for message, outcome in (outcomes or {}).items():
        written.outcomes[message][outcome] += 1
    return written


def mailed(message: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [(SENDING, message), (SENT, message), *more]


TOLD = {FIRST: diary(*mailed("m-1", (COMPLETED, "m-1")), *mailed("m-2", (COMPLETED, "m-2")))}


def test_one_mail_for_each_purchase_is_exact() -> None:
    notices = compare_mails(PURCHASES, MAILS, TOLD, set(), refused=3)
    assert notices.exact
    assert (notices.mails, notices.once, notices.refused) == (2, 2, 3)
    assert (notices.unsure, notices.unsure_twice, notices.unsure_once) == (0, 0, 0)
    assert notices.contradictions == ()


@pytest.mark.parametrize(
    ("found", "missing", "repeated", "wrong"),
    [
        (MAILS[:1], ("p-2",), (), ()),
        ([*MAILS, MAIL], (), ("p-1",), ()),
        ([*MAILS, Mail("m-3", "p-3", "1", 100, FIRST)], (), (), ("p-3",)),
        ([MAIL, Mail("m-2", "p-2", "2", 251, FIRST)], (), (), ("p-2",)),
        ([MAIL, Mail("m-2", "p-2", "1", 250, FIRST)], (), (), ("p-2",)),
        ([MAIL, Mail("m-2", "p-2", "2 1", 250, FIRST)], (), (), ("p-2",)),
    ],
    ids=["missing", "twice", "of nothing", "another amount", "another customer", "another customer too"],
)
def test_mails_that_are_not_exact_are_named(
    found: list[Mail], missing: tuple[str, ...], repeated: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    notices = compare_mails(PURCHASES, found, TOLD, set())
    assert not notices.exact
    assert (notices.missing, notices.repeated, notices.wrong) == (missing, repeated, wrong)


AGAIN = replace(MAIL, worker=OTHER)
DIED = diary(*mailed("m-1"))
TOOK_OVER = diary((UNSURE, "m-1"), *mailed("m-1", (COMPLETED, "m-1")))
FAILED_TOO = diary(*mailed("m-1"), outcomes={"m-1": Outcome.FAILED})
TOO_SLOW = diary(*mailed("m-1"), outcomes={"m-1": Outcome.IN_FLIGHT})
SENDING_ONLY = diary((SENDING, "m-1"))


@pytest.mark.parametrize(
    ("died", "killed"),
    [(DIED, {FIRST}), (SENDING_ONLY, {FIRST}), (TOO_SLOW, set())],
    ids=["after the answer", "before the answer", "lease lost"],
)
def test_a_mail_that_came_twice_because_nobody_could_know_is_counted_and_exact(died: Diary, killed: set[str]) -> None:
    notices = compare_mails(PURCHASES[:1], [MAIL, AGAIN], {FIRST: died, OTHER: TOOK_OVER}, killed)
    assert notices.exact
    assert (notices.mails, notices.once) == (2, 0)
    assert (notices.unsure, notices.unsure_twice, notices.unsure_once) == (1, 1, 0)
    assert notices.contradictions == ()


@pytest.mark.parametrize("died", [diary(), SENDING_ONLY], ids=["before the mail", "while it was sent"])
def test_a_mail_that_was_not_sent_before_is_counted_as_one_that_looked_the_same(died: Diary) -> None:
    notices = compare_mails(PURCHASES[:1], [AGAIN], {FIRST: died, OTHER: TOOK_OVER}, {FIRST})
    assert notices.exact
    assert (notices.mails, notices.once) == (1, 1)
    assert (notices.unsure, notices.unsure_twice, notices.unsure_once) == (1, 0, 1)


@pytest.mark.parametrize(
    ("first", "other", "killed", "mails"),
    [
        (DIED, TOOK_OVER, set(), [MAIL, AGAIN]),
        (DIED, TOOK_OVER, {OTHER}, [MAIL, AGAIN]),
        (FAILED_TOO, TOOK_OVER, set(), [MAIL, AGAIN]),
        (diary(*mailed("m-1", (COMPLETED, "m-1"))), TOOK_OVER, {FIRST}, [MAIL, AGAIN]),
        (diary(*mailed("m-1"), outcomes={"m-1": Outcome.PROCESSED}), TOOK_OVER, {FIRST}, [MAIL, AGAIN]),
        (DIED, diary(*mailed("m-1", (COMPLETED, "m-1"))), {FIRST}, [MAIL, AGAIN]),
        (DIED, diary((UNSURE, "m-9"), *mailed("m-1")), {FIRST}, [MAIL, AGAIN]),
        (DIED, TOOK_OVER, {FIRST}, [MAIL, MAIL, AGAIN]),
        (DIED, TOOK_OVER, {FIRST}, [MAIL, AGAIN, AGAIN]),
        (diary(*mailed("m-1"), (UNSURE, "m-1")), diary(), {FIRST}, [MAIL, MAIL]),
        (DIED, diary((UNSURE, "m-9"), *mailed("m-9")), {FIRST}, [MAIL, replace(AGAIN, message_id="m-9")]),
    ],
    ids=[
        "nobody was killed",
        "the wrong one was killed",
        "the handler raised",
        "it was completed",
        "it was processed",
        "the ledger thought it was new",
        "unsure of another one",
        "by the first one twice",
        "by the other one twice",
        "by one alone",
        "published twice",
    ],
)
def test_a_mail_that_came_twice_although_somebody_could_know_is_a_fault(
    first: Diary, other: Diary, killed: set[str], mails: list[Mail]
) -> None:
    notices = compare_mails(PURCHASES[:1], mails, {FIRST: first, OTHER: other}, killed)
    assert not notices.exact
    assert notices.repeated == ("p-1",)
    assert notices.unsure_twice == 0


def test_each_copy_but_the_last_needs_its_own_excuse() -> None:
    third = "notification-003"
    mails = [MAIL, AGAIN, replace(MAIL, worker=third)]
    died_too = diary((UNSURE, "m-1"), *mailed("m-1"))
    diaries = {FIRST: DIED, OTHER: died_too, third: TOOK_OVER}
    assert compare_mails(PURCHASES[:1], mails, diaries, {FIRST, OTHER}).exact
    assert not compare_mails(PURCHASES[:1], mails, diaries, {FIRST}).exact
    assert not compare_mails(PURCHASES[:1], mails, diaries, {OTHER}).exact


@pytest.mark.parametrize(
    ("mails", "diaries", "contradiction"),
    [
        ([MAIL], {}, "1 mails accepted that no worker says it sent, such as m-1"),
        ([MAIL], {OTHER: DIED}, "1 mails accepted that no worker says it sent, such as m-1"),
        ([MAIL, MAIL], {FIRST: DIED}, "1 mails accepted that no worker says it sent, such as m-1"),
        ([], {FIRST: DIED}, "1 mails sent that the server does not have, such as m-1"),
    ],
    ids=["nobody's", "another one's", "once more than said", "lost"],
)
def test_what_the_server_has_and_what_workers_have_noted_is_compared(
    mails: list[Mail], diaries: dict[str, Diary], contradiction: str
) -> None:
    assert contradiction in compare_mails(PURCHASES[:1], mails, diaries, {FIRST}).contradictions
