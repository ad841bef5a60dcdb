"""The last act's reckoning, and which purchases go to the workers."""

from dataclasses import replace
from typing import Any

import pytest

from txbox_demo.accounting import Comparison
from txbox_demo.last_act import LastAct, _parts
from txbox_demo.purchases import TOTAL_PURCHASES, read_purchases

RIGHT = Comparison(customers=2, wrong=(), expected_cents=5, found_cents=5, difference_cents=0)
WRONG = Comparison(customers=2, wrong=("00001",), expected_cents=5, found_cents=6, difference_cents=1)


def act(**changes: Any) -> LastAct:
    load = {"read": TOTAL_PURCHASES, "applied": TOTAL_PURCHASES - 10}
    return replace(LastAct(load, 10, 3, 20, TOTAL_PURCHASES, RIGHT, 1.0), **changes)


def test_every_purchase_by_one_of_two_roads_is_exact() -> None:
    assert act().adds_up
    assert act().exact
    assert act().as_dict()["exact"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"processed_by_workers": 9},
        {"processed_by_workers": 11},
        {"recorded": TOTAL_PURCHASES - 1},
        {"load": {"read": TOTAL_PURCHASES - 1, "applied": TOTAL_PURCHASES - 10}},
    ],
)
def test_a_purchase_by_both_roads_or_by_none_does_not_add_up(changes: dict[str, Any]) -> None:
    assert not act(**changes).adds_up
    assert not act(**changes).exact


def test_figures_that_add_up_do_not_make_wrong_accounts_right() -> None:
    assert act(comparison=WRONG).adds_up
    assert not act(comparison=WRONG).exact


def test_the_workers_purchases_come_from_all_over_the_file_those_too_that_go_first() -> None:
    first, others = _parts(100)
    everything = first + others
    assert len(first) == 34
    assert len({purchase.event_id for purchase in everything}) == 100
    in_file = [purchase.event_id for purchase in read_purchases()]
    places = sorted(in_file.index(purchase.event_id) for purchase in everything)
    assert places[0] < 1_000
    assert places[-1] > 0.95 * TOTAL_PURCHASES
    before = sorted(in_file.index(purchase.event_id) for purchase in first)
    assert (before[0], before[-1]) == (places[0], places[-1])
