"""Chunks as ranges of ids, without Spark."""

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as some

from txbox_spark.merging.chunk_ranges import chunk_bounds, chunk_groups, chunk_range, partition_keys

ids = some.lists(some.text(min_size=1), unique=True, max_size=40).map(sorted)


@given(ids, some.integers(1, 50))
def test_bounds_cut_the_sample_evenly(sample: list[str], chunks: int) -> None:
    bounds = chunk_bounds(sample, chunks)
    assert list(bounds) == sorted(set(bounds))
    assert len(bounds) == max(min(chunks, len(sample)) - 1, 0)
    sizes = [0] * (len(bounds) + 1)
    for one in sample:
        sizes[bisect_right(bounds, one)] += 1
    assert max(sizes) - min(sizes) <= 1


@given(ids, some.integers(1, 50), some.text(min_size=1))
def test_each_id_is_in_the_span_of_one_chunk(sample: list[str], chunks: int, any_id: str) -> None:
    bounds = chunk_bounds(sample, chunks)
    spans = [chunk_range(bounds, chunk) for chunk in range(len(bounds) + 1)]
    for one in [*sample, any_id]:
        found = [
            number for number, (first, beyond) in enumerate(spans) if first <= one and (beyond is None or one < beyond)
        ]
        assert found == [bisect_right(bounds, one)]


def test_spans() -> None:
    assert [chunk_range(("b", "d"), chunk) for chunk in range(3)] == [("", "b"), ("b", "d"), ("d", None)]
    assert chunk_range((), 0) == ("", None)
    with pytest.raises(IndexError):
        chunk_range(("b", "d"), 3)


@pytest.mark.parametrize("partitions", [1, 2, 3, 7, 64, 500])
def test_every_partition_has_a_key_of_its_own(partitions: int) -> None:
    keys = partition_keys(partitions)
    assert len(set(keys)) == len(keys) == partitions


def test_chunks_that_follow_each_other_are_grouped() -> None:
    assert chunk_groups(8, {0, 1, 2, 4, 5, 7}, 10) == (0, 0, 0, 3, 4, 4, 6, 7)
    assert chunk_groups(8, {0, 1, 2, 4, 5, 7}, 2) == (0, 0, 2, 3, 4, 4, 6, 7)
    assert chunk_groups(3, (), 2) == (0, 1, 2)
    assert chunk_range(("b", "d"), 0, 1) == ("", "d")
    assert chunk_range(("b", "d"), 1, 2) == ("b", None)
