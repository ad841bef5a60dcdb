"""The file of purchases: what the demo's result is compared with."""

import pytest

from txbox_demo.purchases import TOTAL_PURCHASES, Purchase, read_purchases


@pytest.fixture(scope="module")
def everything() -> list[Purchase]:
    return list(read_purchases())


def test_the_file_adds_up_to_its_known_totals(everything: list[Purchase]) -> None:
    assert len(everything) == TOTAL_PURCHASES == 69_659
    assert len({purchase.customer_id for purchase in everything}) == 23_570
    assert sum(purchase.cds for purchase in everything) == 167_881
    assert sum(purchase.cents for purchase in everything) == 2_500_315_63


def test_ids_are_positions_because_equal_lines_are_different_purchases(everything: list[Purchase]) -> None:
    assert [purchase.order_id for purchase in everything] == [f"cdnow-{n:05}" for n in range(1, len(everything) + 1)]
    without_ids = {(p.customer_id, p.ordered_on, p.cds, p.cents) for p in everything}
    assert len(without_ids) < len(everything)  # an id made from the columns would lose some


def test_the_first_ones_are_a_prefix(everything: list[Purchase]) -> None:
    assert list(read_purchases(10)) == everything[:10]
    assert list(read_purchases(0)) == []
    assert everything[0] == Purchase("cdnow-00001", "00001", "19970101", 1, 1177)
