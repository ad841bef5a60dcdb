"""The report of a run: what the demo says of itself."""

from dataclasses import replace
from typing import Any

import pytest

from support.demo_reports import COMPLETE, RIGHT
from txbox_workers.demo.accounting import Notices, Sends
from txbox_workers.demo.report import Shop
from txbox_workers.demo.standing import Standing


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
        ({"notices": Notices(found=2, missing=(), repeated=("x",), wrong=())}, True),
    ],
    ids=["order", "send", "delivery", "contradiction", "backlog", "account", "notification"],
)
def test_whatever_is_wrong_the_run_is_not_exact(changes: dict[str, Any], adds_up: bool) -> None:
    report = replace(RIGHT, **changes)
    assert not report.exact
    assert report.as_dict()["exact"] is False
    assert report.adds_up is adds_up
