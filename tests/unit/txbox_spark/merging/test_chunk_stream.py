"""A task's stream of batches, cut into chunks, and one event of each id out of every chunk."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby, pairwise

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as some

from txbox_spark.merging.chunk_stream import ChunkStream, DistinctEvents

SCHEMA = pyarrow.schema({"message_id": pyarrow.string(), "rejected": pyarrow.string(), "number": pyarrow.int64()})
BOUNDS = ("b", "d", "f")
"""Of four chunks."""


def batches(*several: list[str | None]) -> Iterator[pyarrow.RecordBatch]:
    number = 0
    for rows in several:
        made = []
        for message_id in rows:
            rejected = None if message_id is not None else json.dumps({"cause": f"no id: {number}"})
            made.append({"message_id": message_id, "rejected": rejected, "number": number})
            number += 1
        yield pyarrow.RecordBatch.from_pylist(made, schema=SCHEMA)


def chunks_of(stream: ChunkStream) -> list[tuple[int, list[int]]]:
    found = []
    while (chunk := stream.next_chunk()) is not None:
        rows = [row for batch in stream.rows() for row in batch.to_pylist()]
        found.append((chunk, [row["number"] for row in rows]))
    assert stream.next_chunk() is None
    assert list(stream.rows()) == []
    return found


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ([], []),
        ([[]], []),
        ([[], ["d"], []], [(2, [0])]),
        ([["b", "c", "d"]], [(1, [0, 1]), (2, [2])]),
        ([["a"], ["a"], [], ["aa", "f"], ["g"]], [(0, [0, 1, 2]), (3, [3, 4])]),
        ([["a", "b", "c", "d", "e", "f", "g"]], [(0, [0]), (1, [1, 2]), (2, [3, 4]), (3, [5, 6])]),
        ([["e", None], [None, None]], [(2, [0]), (3, [1, 2, 3])]),
        ([["f", None], [None]], [(3, [0, 1, 2])]),
        ([[None]], [(3, [0])]),
    ],
)
def test_chunks_are_cut_where_they_end(given_: list[list[str | None]], expected: list[tuple[int, list[int]]]) -> None:
    assert chunks_of(ChunkStream(batches(*given_), BOUNDS)) == expected


@given(some.lists(some.text(), max_size=20), some.lists(some.text(min_size=1), unique=True, max_size=5))
def test_each_event_is_in_the_chunk_of_its_id(ids: list[str], bounds: list[str]) -> None:
    ids, bounds = sorted(ids), sorted(bounds)
    found = {row: chunk for chunk, rows in chunks_of(ChunkStream(batches(ids), bounds)) for row in rows}
    assert found == {row: bisect_right(bounds, one) for row, one in enumerate(ids)}


def test_chunks_may_have_other_numbers() -> None:
    stream = ChunkStream(batches(["a", "b", "e"], [None]), ["c"], [4, 7])
    assert chunks_of(stream) == [(4, [0, 1]), (7, [2, 3])]


def test_the_chunk_ahead_is_known_when_one_is_read() -> None:
    stream = ChunkStream(batches(["a"], ["d"]), BOUNDS)
    assert (stream.next_chunk(), len(list(stream.rows())), stream.chunk_ahead()) == (0, 1, 2)


def test_a_chunk_that_is_not_read_to_its_end_is_passed_over() -> None:
    stream = ChunkStream(batches(["a", "b"], ["c", "c"], ["c", "d"]), BOUNDS)
    assert stream.next_chunk() == 0
    assert stream.next_chunk() == 1
    assert next(stream.rows()).column("number").to_pylist() == [1]
    assert stream.next_chunk() == 2
    assert [batch.column("number").to_pylist() for batch in stream.rows()] == [[5]]
    assert stream.next_chunk() is None


def test_batches_are_taken_one_at_a_time() -> None:
    taken = []

    def source() -> Iterator[pyarrow.RecordBatch]:
        for number, batch in enumerate(batches(["a"], ["a"], ["a"], ["b"])):
            taken.append(number)
            yield batch

    stream = ChunkStream(source(), BOUNDS)
    assert (stream.next_chunk(), taken) == (0, [0])
    rows = stream.rows()
    next(rows)
    assert taken == [0]
    next(rows)
    assert taken == [0, 1]


def copied(distinct: DistinctEvents) -> list[tuple[str, int]]:
    return [(row["message_id"], row["number"]) for events in distinct.events() for row in events.to_pylist()]


@given(
    some.lists(some.one_of(some.none(), some.sampled_from("abcdefg")), max_size=30),
    some.lists(some.integers(0, 30), max_size=5),
)
def test_one_event_of_each_id(ids: list[str | None], cuts: list[int]) -> None:
    """However the sorted ids are spread over batches; nulls come last, as they are sorted."""
    rows = sorted(ids, key=lambda one: one or "z")
    borders = [0, *sorted(cuts), len(rows)]
    several = [rows[first:end] for first, end in pairwise(borders)]
    distinct = DistinctEvents(batches(*several))
    found = copied(distinct)
    numbered = [(one, number) for number, one in enumerate(row for rows in several for row in rows)]
    expected = [next(same) for one, same in groupby(numbered, key=lambda row: row[0]) if one is not None]
    assert found == expected
    nulls = [f"no id: {number}" for one, number in numbered if one is None]
    assert (distinct.read, distinct.rejected, distinct.kept) == (len(numbered), len(nulls), len(expected))
    assert [row.cause for row in distinct.take_rejected()] == nulls
    assert not distinct.take_rejected()


@given(
    some.lists(some.tuples(some.sampled_from("abc"), some.sampled_from([None, 1, 2])), max_size=12),
    some.lists(some.integers(0, 12), max_size=4),
)
def test_ids_whose_rows_differ(rows: list[tuple[str, int | None]], cuts: list[int]) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    borders = [0, *sorted(cuts), len(rows)]
    made = [{"message_id": one, "rejected": None, "number": number} for one, number in rows]
    distinct = DistinctEvents(
        (pyarrow.RecordBatch.from_pylist(made[first:end], schema=SCHEMA) for first, end in pairwise(borders)),
        ["number"],
    )
    list(distinct.events())
    expected = tuple(one for one in "abc" if len({number for other, number in rows if other == one}) > 1)
    assert (distinct.differing.differing, distinct.differing.differing_sample) == (len(expected), expected)


@pytest.mark.parametrize("several", [[["b", "a"]], [["b"], ["a"]], [["é"], ["z"]]])
def test_events_out_of_order_are_refused(several: list[list[str | None]]) -> None:
    """Duplicates are found side by side; what is not sorted could hide one, and it would be applied twice."""
    with pytest.raises(AssertionError, match="not sorted"):
        list(DistinctEvents(batches(*several)).events())


def test_the_order_is_that_of_bytes() -> None:
    rows: list[str | None] = ["Z", "a", "z", "é", "\uffff", "\U0001f600"]
    assert [one for one, _ in copied(DistinctEvents(batches(rows[:3], rows[3:])))] == rows
