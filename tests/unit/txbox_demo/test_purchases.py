"""The file of purchases: what the demo's result is compared with."""

from txbox_demo.purchases import TOTAL_PURCHASES, Purchase, read_purchases


def test_the_file_adds_up_to_its_known_totals_and_ids_are_positions() -> None:
    everything = list(read_purchases())
    assert len(everything) == TOTAL_PURCHASES == 69_659
    assert len({purchase.customer_id for purchase in everything}) == 23_570
    assert sum(purchase.cds for purchase in everything) == 167_881
    assert sum(purchase.cents for purchase in everything) == 2_500_315_63
    # An id made from the columns would lose those whose lines are equal.
    assert [purchase.order_id for purchase in everything] == [f"cdnow-{n:05}" for n in range(1, len(everything) + 1)]
    assert everything[0] == Purchase("cdnow-00001", "00001", "19970101", 1, 1177)
    assert list(read_purchases(10)) == everything[:10]
