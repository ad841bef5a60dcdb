"""The check finds what is lost or doubled: the demo's exit status rests on it. Each test spoils one thing."""

from collections.abc import Callable, Sequence
from email.mime.text import MIMEText
from typing import Any

import pytest
from sqlalchemy import Engine

from support.txbox.leases import acquired_in_time
from txbox.leases import Lease, PostgresLedger
from txbox_demo.checker import ACCOUNTS, CHAIN, DemoReport, check
from txbox_demo.purchases import Purchase
from txbox_local import AcceptedMail

PURCHASES = [
    Purchase("p-1", "1", "19970101", 2, 700),
    Purchase("p-2", "1", "19970102", 1, 300),
    Purchase("p-3", "2", "19970102", 1, 500),
]
RIGHT = """
INSERT INTO purchase_order VALUES ('p-1', '1', '19970101', 2, 700), ('p-2', '1', '19970102', 1, 300),
  ('p-3', '2', '19970102', 1, 500);
INSERT INTO account VALUES ('1', 2, 3, 1000), ('2', 1, 1, 500);
INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', 'p-1'), ('billing', 'p-2'),
  ('billing', 'p-3'), ('other', 'p-1')
"""


def mail(
    order: str, customer: str, cents: int, *, message: str = "", fence: int = 1, unknown: int = 0, also: str = ""
) -> AcceptedMail:
    email = MIMEText("Thank you!")
    headers = {"Order": order, "Cents": cents, "Message": message or f"m-{order}", "Fence": fence}
    for name, value in (headers | {"Unknown-Attempts": unknown}).items():
        email[f"X-{name}"] = str(value)
    recipients = [f"{customer}@customers.example", *([also] if also else [])]
    return AcceptedMail("shop@cdnow.example", tuple(recipients), email.as_bytes())


MAILS = [mail("p-1", "1", 700), mail("p-2", "1", 300), mail("p-3", "2", 500)]


@pytest.fixture
def chain(tables: Engine) -> Engine:
    """The tables after a run in which all was well."""
    with tables.begin() as connection:
        connection.exec_driver_sql(RIGHT)
    return tables


def wrong(report: DemoReport) -> dict[str, list[str]]:
    return {what: ids for what, ids in report.wrong.items() if ids}


def test_a_run_in_which_all_is_well_is_exact(chain: Engine) -> None:
    report = check(chain, PURCHASES, MAILS, CHAIN)
    assert report.exact
    assert report.wrong == {what: [] for what in CHAIN}
    assert report.cents == {"by the file": 1500, "in the accounts": 1500, "difference": 0}
    figures = {name: figure for name, (figure, _) in report.figures.items()}
    assert figures == {"mails": 3, "mailed once": 3, "mailed again": 0}


@pytest.mark.parametrize(
    ("fault", "expected", "difference"),
    [
        ("UPDATE account SET cds = 4 WHERE customer_id = '1'", {"accounts": ["1"]}, 0),
        ("DELETE FROM account WHERE customer_id = '2'", {"accounts": ["2"]}, 500),
        ("INSERT INTO account VALUES ('3', 1, 1, 7)", {"accounts": ["3"]}, 7),
        ("UPDATE account SET cents = CASE customer_id WHEN '1' THEN 1100 ELSE 400 END", {"accounts": ["1", "2"]}, 200),
        ("DELETE FROM purchase_order WHERE order_id = 'p-2'", {"orders": ["p-2"]}, 0),
        ("INSERT INTO purchase_order VALUES ('p-9', '1', '19970101', 1, 1)", {"orders": ["p-9"]}, 0),
        ("DELETE FROM processed_message WHERE message_id = 'p-3'", {"billed not once": ["p-3"]}, 0),
        (
            "UPDATE processed_message SET subscriber_id = 'billing', message_id = 'p-9' WHERE subscriber_id = 'other'",
            {"billed not once": ["p-9"]},
            0,
        ),
    ],
    ids=[
        "a CD",
        "a customer missing",
        "a customer too many",
        "errors that cancel",
        "an order missing",
        "an order too many",
        "not billed",
        "billed and not in the file",
    ],
)
def test_an_effect_that_is_lost_or_doubled_is_named(
    fault: str, expected: dict[str, list[str]], difference: int, chain: Engine
) -> None:
    with chain.begin() as connection:
        connection.exec_driver_sql(fault)
    report = check(chain, PURCHASES, MAILS, CHAIN)
    assert wrong(report) == expected
    assert not report.exact
    assert report.cents["difference"] == difference


def test_what_was_left_is_named(chain: Engine) -> None:
    with chain.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO outbox_message (lane, message_id, destination, headers, body) VALUES (1, 'm-8', 'x', '{}', '')"
        )
    PostgresLedger("notification", engine=chain).acquire("m-9", lease_seconds=60)
    report = check(chain, PURCHASES, MAILS, CHAIN)
    assert wrong(report) == {"left in the outbox": ["m-8"], "not completed": ["m-9"]}


@pytest.mark.parametrize(
    ("mails", "expected"),
    [
        (MAILS[:2], {"mails missing": ["p-3"]}),
        ([*MAILS, MAILS[0]], {"mails repeated": ["p-1"]}),
        ([*MAILS, mail("p-1", "1", 700, fence=2)], {"mails repeated": ["p-1"]}),
        ([*MAILS, mail("p-1", "1", 700, message="m-other", fence=2, unknown=1)], {"mails repeated": ["p-1"]}),
        ([*MAILS, mail("p-9", "1", 700)], {"mails wrong": ["p-9"]}),
        ([*MAILS[:2], mail("p-3", "2", 501)], {"mails wrong": ["p-3"]}),
        ([*MAILS[:2], mail("p-3", "2", 500, also="x@y.example")], {"mails wrong": ["p-3"]}),
    ],
    ids=[
        "missing",
        "twice under one lease",
        "twice under two leases",
        "published twice",
        "of nothing",
        "another amount",
        "another customer too",
    ],
)
def test_mails_that_are_not_exact_are_named(
    mails: Sequence[AcceptedMail], expected: dict[str, list[str]], chain: Engine
) -> None:
    assert wrong(check(chain, PURCHASES, mails, CHAIN)) == expected


def sent_under(lease: Lease, **changes: Any) -> AcceptedMail:
    headers = {"message": "m-p-1", "fence": lease.fence, "unknown": lease.unknown_attempts} | changes
    return mail("p-1", "1", 700, **headers)


@pytest.fixture
def leases(chain: Engine) -> tuple[Lease, Lease]:
    """A lease that has run out, and the next one, which has completed the message."""
    ledger = PostgresLedger("notification", engine=chain)
    first, second = acquired_in_time(ledger, "m-p-1", lease_seconds=0.01), acquired_in_time(ledger, "m-p-1")
    ledger.complete(second)
    return first, second


Leases = tuple[Lease, Lease]


def test_a_mail_that_came_twice_because_the_first_lease_had_run_out_is_exact(chain: Engine, leases: Leases) -> None:
    first, second = map(sent_under, leases)
    # Also if the first owner was only too slow, and its mail came last.
    for both in ([first, second], [second, first]):
        report = check(chain, PURCHASES, [*both, *MAILS[1:]], CHAIN)
        assert report.exact
        assert [figure for figure, _ in report.figures.values()] == [4, 2, 1]
        with chain.begin() as connection:
            connection.exec_driver_sql("TRUNCATE purchase, mail")


@pytest.mark.parametrize(
    "copies",
    [
        lambda first, second: [sent_under(first), sent_under(second), sent_under(second)],
        lambda first, second: [sent_under(first), sent_under(second, unknown=0)],
        lambda first, second: [sent_under(first), sent_under(second, message="m-9")],
        lambda first, second: [sent_under(second), mail("p-1", "1", 700, fence=second.fence + 1, unknown=1)],
    ],
    ids=[
        "by one twice",
        "the ledger did not tell",
        "published twice",
        "after it was completed",
    ],
)
def test_a_mail_that_came_twice_although_it_can_be_known_is_a_fault(
    copies: Callable[[Lease, Lease], list[AcceptedMail]], chain: Engine, leases: Leases
) -> None:
    assert wrong(check(chain, PURCHASES, [*copies(*leases), *MAILS[1:]], CHAIN)) == {"mails repeated": ["p-1"]}


@pytest.mark.parametrize("failed", [True, False], ids=["the handler raised", "the ledger has forgotten it"])
def test_a_lease_that_has_not_run_out_is_no_excuse(failed: bool, chain: Engine) -> None:
    ledger = PostgresLedger("notification", engine=chain)
    first = acquired_in_time(ledger, "m-p-1")
    if failed:
        ledger.release(first)
    else:
        ledger.complete(first)
        with chain.begin() as connection:
            connection.exec_driver_sql("UPDATE message_lease SET completed_at = NULL")
    second = acquired_in_time(ledger, "m-p-1")
    ledger.complete(second)
    mails = [sent_under(first), sent_under(second, unknown=1), *MAILS[1:]]
    assert wrong(check(chain, PURCHASES, mails, CHAIN)) == {"mails repeated": ["p-1"]}


def test_each_copy_but_the_last_needs_its_own_excuse(chain: Engine) -> None:
    ledger = PostgresLedger("notification", engine=chain)
    first, second = acquired_in_time(ledger, "m-p-1", lease_seconds=0.01), acquired_in_time(ledger, "m-p-1")
    ledger.release(second)
    third = acquired_in_time(ledger, "m-p-1")
    ledger.complete(third)
    assert check(chain, PURCHASES, [*map(sent_under, (first, third)), *MAILS[1:]], CHAIN).exact
    with chain.begin() as connection:
        connection.exec_driver_sql("TRUNCATE purchase, mail")
    report = check(chain, PURCHASES, [*map(sent_under, (first, second, third)), *MAILS[1:]], CHAIN)
    assert wrong(report) == {"mails repeated": ["p-1"]}


def test_the_accounts_alone_can_be_checked(chain: Engine) -> None:
    with chain.begin() as connection:
        connection.exec_driver_sql("DELETE FROM purchase_order; DELETE FROM account WHERE customer_id = '2'")
    report = check(chain, PURCHASES, (), ACCOUNTS)
    assert (wrong(report), report.figures) == ({"accounts": ["2"]}, {})
