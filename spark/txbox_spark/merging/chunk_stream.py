"""Reads a task's input: Arrow batches sorted by message id, with one chunk after another."""

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from txbox_spark.merging.fresh_event import as_text
from txbox_spark.reading.columns import MESSAGE_ID
from txbox_spark.reading.event_rows import REJECTED
from txbox_spark.rejects.remarks import SHOWN_ROWS, RejectedRow, Remarks
from txbox_spark.runtime.lazy_imports import compute, pyarrow

MANY_REJECTED = 10_000
"""How many rejected rows are held before they are passed on."""


class ChunkStream:
    """Cuts a stream of batches where a chunk ends; holds one batch at a time.

    The cut is made here because Spark takes two microseconds to find an event's chunk among a hundred. Rejected rows
    have no id, so they come last, and belong to the last chunk.
    """

    def __init__(
        self, batches: "Iterator[pyarrow.RecordBatch]", bounds: Sequence[str], numbers: Sequence[int] | None = None
    ) -> None:
        """Set the bounds to cut at; ``numbers`` are the numbers of the chunks between them, from 0 by default."""
        self._batches = batches
        self._bounds = bounds
        self._numbers = range(len(bounds) + 1) if numbers is None else numbers
        self._rest: pyarrow.RecordBatch | None = None
        self._chunk: int | None = None

    def next_chunk(self) -> int | None:
        """Skip the rest of this chunk, and return the number of the next one; None at the end."""
        if self._chunk is not None:
            for _ in self.rows():
                pass
        self._chunk = self.chunk_ahead()
        return self._chunk

    def rows(self) -> "Iterator[pyarrow.RecordBatch]":
        """Yield the rows of this chunk that were not yielded yet."""
        while self._chunk is not None and self.chunk_ahead() == self._chunk:
            batch, self._rest = self._rest, None
            assert batch is not None  # noqa: S101 - chunk_ahead has found a row
            end = self._end(batch)
            if end >= 0:
                batch, self._rest = batch.slice(0, end), batch.slice(end)
            yield batch

    def chunk_ahead(self) -> int | None:
        """Return the number of the next row's chunk; None at the end."""
        while self._rest is None or not self._rest.num_rows:
            self._rest = next(self._batches, None)
            if self._rest is None:
                return None
        return self._numbers[self._position(self._rest)]

    def _position(self, batch: "pyarrow.RecordBatch") -> int:
        first = batch.column(MESSAGE_ID)[0].as_py()
        return len(self._bounds) if first is None else bisect_right(self._bounds, first)

    def _end(self, batch: "pyarrow.RecordBatch") -> int:
        """Return where a batch's first chunk ends; -1 if it does not end in this batch."""
        position = self._position(batch)
        if position == len(self._bounds):
            return -1
        ids = batch.column(MESSAGE_ID)
        beyond = compute.greater_equal(ids, pyarrow.scalar(self._bounds[position], ids.type)).fill_null(True)
        end: int = compute.index(beyond, True).as_py()
        return end


class DistinctEvents:
    """Takes the loadable events of one chunk, one of each id, and counts everything else so far."""

    def __init__(self, batches: "Iterator[pyarrow.RecordBatch]", content: Sequence[str] = ()) -> None:
        """Take the first row of each id; ``content`` names the columns in which other rows are compared with it."""
        self.read = 0  # rows
        self.rejected = 0  # rows that cannot be loaded
        self.kept = 0  # distinct events
        self._rejected: list[str] = []  # rejected rows, as JSON, that were not taken yet
        self._batches = batches
        self._content = list(content)
        self._last = ""
        self._last_row: pyarrow.RecordBatch | None = None
        self._differing: list[str] = []
        self._differs = ""  # the last id with rows that differ
        self._all_differing = 0

    @property
    def differing(self) -> Remarks:
        """The remarks on ids whose rows differ."""
        return Remarks(differing=self._all_differing, differing_sample=tuple(self._differing))

    def events(self) -> "Iterator[pyarrow.RecordBatch]":
        """Yield the events of each batch; an empty batch means that many rejected rows wait to be taken."""
        for batch in self._batches:
            events = self._distinct(self._loadable(batch))
            if events.num_rows or self.has_many_rejected:
                yield events

    @property
    def has_many_rejected(self) -> bool:
        """Whether the caller should take the rejected rows now."""
        return len(self._rejected) >= MANY_REJECTED

    def take_rejected(self) -> list[RejectedRow]:
        """Return the rejected rows since the last call."""
        rows, self._rejected = self._rejected, []
        return [RejectedRow.from_json(one) for one in rows]

    def _loadable(self, batch: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
        self.read += batch.num_rows
        ids = batch.column(MESSAGE_ID)
        if not ids.null_count:
            return batch
        self.rejected += ids.null_count
        self._rejected += batch.column(REJECTED).drop_null().to_pylist()
        return batch.filter(ids.is_valid())

    def _distinct(self, batch: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
        """Drop each event whose id is that of the event before it."""
        if not batch.num_rows:
            return batch
        ids = batch.column(MESSAGE_ID)
        first = ids[0].as_py()
        following, before = ids.slice(1), ids.slice(0, len(ids) - 1)
        # Arrow compares texts byte by byte, as Spark and Postgres do here.
        if compute.any(compute.less(following, before)).as_py() or first.encode() < self._last.encode():
            raise AssertionError("the events are not sorted by id, so that duplicates could be missed")
        mask = pyarrow.concat_arrays([pyarrow.array([first != self._last]), compute.greater(following, before)])
        kept: int = mask.true_count
        if self._content:
            if kept < batch.num_rows:
                self._compare(batch, mask)
            self._last_row = batch.slice(batch.num_rows - 1)
        self._last = ids[len(ids) - 1].as_py()
        self.kept += kept
        return batch if kept == batch.num_rows else batch.filter(mask)

    def _compare(self, batch: "pyarrow.RecordBatch", first: "pyarrow.BooleanArray") -> None:
        """Record the ids of rows that differ from the row before them with the same id."""
        repeated = compute.indices_nonzero(compute.invert(first))
        if not first[0].as_py() and self._last_row is not None:
            batch = pyarrow.concat_batches([self._last_row, batch])
            repeated = compute.add(repeated, 1)
        ids = batch.column(MESSAGE_ID).take(repeated)
        content = batch.select(self._content)
        rows, before = content.take(repeated), content.take(compute.subtract(repeated, 1))
        differ = functools.reduce(compute.or_, map(_differ, rows.columns, before.columns))
        for message_id in ids.filter(differ).to_pylist():
            if message_id != self._differs:
                self._differs = message_id
                self._all_differing += 1
                if len(self._differing) < SHOWN_ROWS:
                    self._differing.append(message_id)


def _differ(column: "pyarrow.Array", other: "pyarrow.Array") -> "pyarrow.BooleanArray":
    """Return whether the values are sent differently; as texts, because NaN equals itself then."""
    one_is_null = compute.not_equal(column.is_null(), other.is_null())
    return compute.coalesce(compute.not_equal(as_text(column), as_text(other)), one_is_null)
