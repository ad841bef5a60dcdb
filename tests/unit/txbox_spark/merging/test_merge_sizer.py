"""How many chunks one transaction merges, by how long the one before it has held its locks."""

import pytest

from txbox_spark.merging.merge_plan import SMALL_TRANSACTIONS, MergeSizer


def test_it_grows_while_there_is_time_and_shrinks_to_what_fits() -> None:
    sizer = MergeSizer(0.25, 100)
    sizes = []
    for held_seconds_of_a_chunk in (0.02, 0.02, 0.02, 0.02, 0.04, 0.3, 0.01):
        sizes.append(sizer.chunks)
        sizer.merged(sizer.chunks, sizer.chunks * held_seconds_of_a_chunk, beside_others=False)
    assert sizes == [1, 2, 4, 8, 12, 6, 1]
    assert sizer.chunks == 2


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (3, 3), (100, 8)])
def test_it_takes_no_more_than_it_may(most: int, expected: int) -> None:
    sizer = MergeSizer(0.25, most)
    for _ in range(3):
        sizer.merged(sizer.chunks, 0.0, beside_others=False)
    assert sizer.chunks == expected


def test_a_transaction_that_was_smaller_than_allowed_counts_as_what_it_was() -> None:
    sizer = MergeSizer(1.0, 100)
    sizer.merged(8, 0.8, beside_others=False)
    assert sizer.chunks == 10
    sizer.merged(2, 0.2, beside_others=False)
    assert sizer.chunks == 4


def test_it_stays_at_one_chunk_for_a_while_after_workers_were_seen() -> None:
    sizer = MergeSizer(1.0, 100)
    sizer.merged(1, 0.0, beside_others=False)
    assert sizer.chunks == 2
    sizer.merged(2, 0.0, beside_others=True)
    for _ in range(SMALL_TRANSACTIONS):
        assert sizer.chunks == 1
        sizer.merged(1, 0.0, beside_others=False)
    assert sizer.chunks == 2
