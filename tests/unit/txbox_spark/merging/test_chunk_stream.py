"""A task's stream of batches, cut into chunks, and one event of each id out of every chunk."""

from collections.abc import Iterator
from itertools import groupby, pairwise

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as some

from txbox_spark.merging.chunk_stream import ChunkStream, DistinctEvents

SCHEMA = pyarrow.schema(
    {"message_id": pyarrow.string(), "rejected": pyarrow.string(), "number": pyarrow.int64(), "chunk": pyarrow.int32()}
)

Row = tuple[str | None, int]
"""An id and a chunk."""


def batches(*several: list[Row]) -> Iterator[pyarrow.RecordBatch]:
    number = 0
    for rows in several:
        made = []
        for message_id, chunk in rows:
            rejected = None if message_id is not None else f"no id: {number}"
            made.append({"message_id": message_id, "rejected": rejected, "number": number, "chunk": chunk})
            number += 1
        yield pyarrow.RecordBatch.from_pylist(made, schema=SCHEMA)


def chunks_of(stream: ChunkStream) -> list[tuple[int, list[int]]]:
    found = []
    while (chunk := stream.next_chunk()) is not None:
        rows = [row for batch in stream.rows() for row in batch.to_pylist()]
        assert {row["chunk"] for row in rows} == {chunk}
        found.append((chunk, [row["number"] for row in rows]))
    assert stream.next_chunk() is None
    assert list(stream.rows()) == []
    return found


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ([], []),
        ([[]], []),
        ([[], [("a", 3)], []], [(3, [0])]),
        ([[("a", 1), ("b", 1), ("c", 2)]], [(1, [0, 1]), (2, [2])]),
        ([[("a", 1)], [("b", 1)], [], [("c", 1), ("d", 4)], [("e", 4)]], [(1, [0, 1, 2]), (4, [3, 4])]),
        ([[("a", 0), ("b", 1), ("c", 2), ("d", 3)]], [(0, [0]), (1, [1]), (2, [2]), (3, [3])]),
        ([[("a", 5)], [("b", 2)], [("c", 9)]], [(5, [0]), (2, [1]), (9, [2])]),
    ],
)
def test_chunks_are_cut_where_they_end(given_: list[list[Row]], expected: list[tuple[int, list[int]]]) -> None:
    assert chunks_of(ChunkStream(batches(*given_))) == expected


def test_a_chunk_that_is_not_read_to_its_end_is_passed_over() -> None:
    stream = ChunkStream(batches([("a", 1), ("b", 2)], [("c", 2), ("d", 2)], [("e", 2), ("f", 3)]))
    assert stream.next_chunk() == 1
    assert stream.next_chunk() == 2
    assert next(stream.rows()).column("number").to_pylist() == [1]
    assert stream.next_chunk() == 3
    assert [batch.column("number").to_pylist() for batch in stream.rows()] == [[5]]
    assert stream.next_chunk() is None


def test_batches_are_taken_one_at_a_time() -> None:
    taken = []

    def source() -> Iterator[pyarrow.RecordBatch]:
        for number, batch in enumerate(batches([("a", 1)], [("b", 1)], [("c", 1)], [("d", 2)])):
            taken.append(number)
            yield batch

    stream = ChunkStream(source())
    assert (stream.next_chunk(), taken) == (1, [0])
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
    """However the sorted ids are spread over batches; nulls come first, as Spark sorts them."""
    rows: list[Row] = [(one, 1) for one in sorted(ids, key=lambda one: one or "")]
    borders = [0, *sorted(cuts), len(rows)]
    several = [rows[first:end] for first, end in pairwise(borders)]
    distinct = DistinctEvents(batches(*several))
    found = copied(distinct)
    numbered = [(one, number) for number, (one, _) in enumerate(row for rows in several for row in rows)]
    expected = [next(same) for one, same in groupby(numbered, key=lambda row: row[0]) if one is not None]
    assert found == expected
    nulls = [f"no id: {number}" for one, number in numbered if one is None]
    assert (distinct.read, distinct.rejected, distinct.kept) == (len(numbered), len(nulls), len(expected))
    assert distinct.rejected_sample == nulls[:10]


@pytest.mark.parametrize("several", [[[("b", 1), ("a", 1)]], [[("b", 1)], [("a", 1)]], [[("é", 1)], [("z", 1)]]])
def test_events_out_of_order_are_refused(several: list[list[Row]]) -> None:
    """Duplicates are found side by side; what is not sorted could hide one, and it would be applied twice."""
    with pytest.raises(AssertionError, match="not sorted"):
        list(DistinctEvents(batches(*several)).events())


def test_the_order_is_that_of_bytes() -> None:
    rows: list[Row] = [("Z", 1), ("a", 1), ("z", 1), ("é", 1), ("\uffff", 1), ("\U0001f600", 1)]
    assert [one for one, _ in copied(DistinctEvents(batches(rows[:3], rows[3:])))] == [one for one, _ in rows]
