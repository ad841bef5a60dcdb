"""The reckoning finds what cannot be: it is what the demo's exit status rests on."""

import pytest

from txbox import Outcome
from txbox_workers.demo.accounting import account_for, account_for_sends, compare, compare_notifications
from txbox_workers.demo.journal import Sightings
from txbox_workers.demo.notification import Notification
from txbox_workers.demo.purchases import Account, Purchase

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
        (Sightings({"d1": "a"}, {"d1": Outcome.PROCESSED}), set(), "1 messages seen processed that are not in the"),
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
TOLD = [Notification("p-1", "1", 100), Notification("p-2", "2", 250)]


def test_one_notification_for_each_purchase_is_exact() -> None:
    notices = compare_notifications(PURCHASES, TOLD)
    assert notices.exact
    assert notices.found == 2


@pytest.mark.parametrize(
    ("found", "missing", "repeated", "wrong"),
    [
        (TOLD[:1], ("p-2",), (), ()),
        ([*TOLD, TOLD[0]], (), ("p-1",), ()),
        ([*TOLD, Notification("p-3", "1", 100)], (), (), ("p-3",)),
        ([TOLD[0], Notification("p-2", "2", 251)], (), (), ("p-2",)),
        ([TOLD[0], Notification("p-2", "1", 250)], (), (), ("p-2",)),
    ],
    ids=["missing", "twice", "of nothing", "another amount", "another customer"],
)
def test_notifications_that_are_not_exact_are_named(
    found: list[Notification], missing: tuple[str, ...], repeated: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    notices = compare_notifications(PURCHASES, found)
    assert not notices.exact
    assert (notices.missing, notices.repeated, notices.wrong) == (missing, repeated, wrong)
