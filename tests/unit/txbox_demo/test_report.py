"""The report of a run: what the demo says of itself."""

from dataclasses import replace
from typing import Any

import pytest

from support.demo_reports import COMPLETE, NOTICES, RIGHT
from txbox_demo.accounting import Sends
from txbox_demo.report import Shop
from txbox_demo.standing import Standing


def test_a_run_in_which_all_is_well_is_exact() -> None:
    figures = RIGHT.as_dict()
    assert RIGHT.exact
    assert (figures["exact"], figures["adds_up"], figures["contradictions"]) == (True, True, [])
    assert figures["kills"] == {"total": 3, "shop": {"anywhere": 1}, "relay": {"sent": 2, "claimed": 0}}
    assert figures["sent"]["again"] == 1
    assert figures["billing"]["duplicate_share"] == 1.0


@pytest.mark.parametrize(
    ("changes", "adds_up"),
    [
        ({"shop": Shop(placed=2, rolled_back=0, wrong=("x",))}, False),
        ({"sends": Sends(messages=3, handed=3, contradictions=("a message too many",))}, False),
        ({"deliveries": {"billing": COMPLETE, "notification": replace(COMPLETE, duplicates=0)}}, False),
        ({"deliveries": {"billing": replace(COMPLETE, contradictions=("twice",)), "notification": COMPLETE}}, False),
        ({"standing": Standing(placed=1, billed=1, notified=1, outbox=1)}, False),
        ({"comparison": replace(RIGHT.comparison, wrong=("00001",), found_cents=117701, difference_cents=1)}, True),
        ({"notices": replace(NOTICES, mails=0, once=0, missing=("x",))}, True),
        ({"notices": replace(NOTICES, mails=2, once=0, repeated=("x",))}, True),
        ({"notices": replace(NOTICES, wrong=("x",))}, True),
        ({"notices": replace(NOTICES, contradictions=("a mail too many",))}, False),
    ],
    ids=[
        "order",
        "send",
        "delivery",
        "contradiction",
        "backlog",
        "account",
        "mail missing",
        "mail repeated",
        "mail wrong",
        "mail of nobody",
    ],
)
def test_whatever_is_wrong_the_run_is_not_exact(changes: dict[str, Any], adds_up: bool) -> None:
    report = replace(RIGHT, **changes)
    assert not report.exact
    assert report.as_dict()["exact"] is False
    assert report.adds_up is adds_up


def test_a_mail_that_came_twice_where_nobody_can_know_is_exact_and_counted() -> None:
    report = replace(RIGHT, notices=replace(NOTICES, mails=3, unsure=2, unsure_twice=1, unsure_once=1, refused=4))
    assert report.exact
    assert report.as_dict()["notifications"] == {
        "mails": 3,
        "refused": 4,
        "once": 1,
        "unsure": 2,
        "unsure_twice": 1,
        "unsure_once": 1,
        "missing": [],
        "repeated": [],
        "wrong": [],
    }
