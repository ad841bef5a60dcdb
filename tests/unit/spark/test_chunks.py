"""A task's stream of batches, cut into chunks, and one event of each id out of every chunk."""

import csv
import io
from collections.abc import Iterator
from itertools import groupby, pairwise

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as some

from txbox_spark.chunks import ChunkStream, Distinct

SCHEMA = pyarrow.schema(
    {"message_id": pyarrow.string(), "rejected": pyarrow.string(), "line": pyarrow.string(), "chunk": pyarrow.int32()}
)

Row = tuple[str | None, int]
"""An id and a chunk."""


def batches(*several: list[Row]) -> Iterator[pyarrow.RecordBatch]:
    number = 0
    for rows in several:
        made = []
        for message_id, chunk in rows:
            rejected = None if message_id is not None else f"no id: {number}"
            line = None if message_id is None else f"{message_id},{number}\n"
            made.append({"message_id": message_id, "rejected": rejected, "line": line, "chunk": chunk})
            number += 1
        yield pyarrow.RecordBatch.from_pylist(made, schema=SCHEMA)


def _number(line: str) -> int:
    return int(line.rpartition(",")[2])


def chunks_of(stream: ChunkStream) -> list[tuple[int, list[int]]]:
    found = []
    while (chunk := stream.next_chunk()) is not None:
        rows = [row for batch in stream.rows() for row in batch.to_pylist()]
        assert {row["chunk"] for row in rows} == {chunk}
        found.append((chunk, [_number(row["line"]) for row in rows]))
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
    assert [_number(line) for line in next(stream.rows()).column("line").to_pylist()] == [1]
    assert stream.next_chunk() == 3
    rest = [batch.column("line").to_pylist() for batch in stream.rows()]
    assert [[_number(line) for line in lines] for lines in rest] == [[5]]
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


def copied(distinct: Distinct) -> list[list[str]]:
    text = b"".join(bytes(block) for block in distinct.as_csv()).decode()
    return list(csv.reader(io.StringIO(text)))


@given(
    some.lists(some.one_of(some.none(), some.sampled_from("abcdefg")), max_size=30),
    some.lists(some.integers(0, 30), max_size=5),
)
def test_one_event_of_each_id(ids: list[str | None], cuts: list[int]) -> None:
    """However the sorted ids are spread over batches; nulls come first, as Spark sorts them."""
    rows: list[Row] = [(one, 1) for one in sorted(ids, key=lambda one: one or "")]
    borders = [0, *sorted(cuts), len(rows)]
    several = [rows[first:end] for first, end in pairwise(borders)]
    distinct = Distinct(batches(*several))
    found = copied(distinct)
    numbered = [(one, str(number)) for number, (one, _) in enumerate(row for rows in several for row in rows)]
    expected = [list(next(same)) for one, same in groupby(numbered, key=lambda row: row[0]) if one is not None]
    assert found == expected
    nulls = [f"no id: {number}" for one, number in numbered if one is None]
    assert (distinct.read, distinct.rejected, distinct.kept) == (len(numbered), len(nulls), len(expected))
    assert distinct.rejected_sample == nulls[:10]
