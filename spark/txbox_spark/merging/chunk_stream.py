"""What a task is given: Arrow batches in which chunks follow each other, each sorted by message id."""

from collections.abc import Iterator

from txbox_spark.merging.chunk_ranges import CHUNK
from txbox_spark.reading.columns import MESSAGE_ID
from txbox_spark.reading.event_rows import REJECTED
from txbox_spark.runtime.lazy_imports import compute, pyarrow

SHOWN_REJECTED = 10
"""How many rejected rows are shown."""


class ChunkStream:
    """Cuts a stream of batches where a chunk ends; holds one batch at a time."""

    def __init__(self, batches: "Iterator[pyarrow.RecordBatch]") -> None:
        self._batches = batches
        self._rest: pyarrow.RecordBatch | None = None
        self._chunk: int | None = None

    def next_chunk(self) -> int | None:
        """Skip what is left of this chunk, and return the number of the next one; None: there is none."""
        if self._chunk is not None:
            for _ in self.rows():
                pass
        self._chunk = self._chunk_ahead()
        return self._chunk

    def rows(self) -> "Iterator[pyarrow.RecordBatch]":
        """Give the rows of this chunk that have not been given yet."""
        while self._chunk is not None and self._chunk_ahead() == self._chunk:
            batch, self._rest = self._rest, None
            assert batch is not None  # noqa: S101 - there is a row ahead
            end = compute.index(compute.not_equal(batch.column(CHUNK), self._chunk), True).as_py()
            if end >= 0:
                batch, self._rest = batch.slice(0, end), batch.slice(end)
            yield batch

    def _chunk_ahead(self) -> int | None:
        """Return the chunk of the next row."""
        while self._rest is None or not self._rest.num_rows:
            self._rest = next(self._batches, None)
            if self._rest is None:
                return None
        chunk: int = self._rest.column(CHUNK)[0].as_py()
        return chunk


class DistinctEvents:
    """The loadable events of one chunk, one of each id; and the count of everything else, so far."""

    def __init__(self, batches: "Iterator[pyarrow.RecordBatch]") -> None:
        self.read = 0  # rows
        self.rejected = 0  # rows that cannot be loaded
        self.kept = 0  # events
        self.rejected_sample: list[str] = []  # some of the rejected rows
        self._batches = batches
        self._last = ""

    def events(self) -> "Iterator[pyarrow.RecordBatch]":
        """Give the events, as they lie in the batches."""
        for batch in self._batches:
            events = self._distinct(self._loadable(batch))
            if events.num_rows:
                yield events

    def _loadable(self, batch: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
        self.read += batch.num_rows
        ids = batch.column(MESSAGE_ID)
        if not ids.null_count:
            return batch
        self.rejected += ids.null_count
        reasons = batch.column(REJECTED).drop_null().slice(0, SHOWN_REJECTED - len(self.rejected_sample))
        self.rejected_sample.extend(reasons.to_pylist())
        return batch.filter(ids.is_valid())

    def _distinct(self, batch: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
        """Drop the events whose id the one before them has."""
        if not batch.num_rows:
            return batch
        ids = batch.column(MESSAGE_ID)
        first = ids[0].as_py()
        following, before = ids.slice(1), ids.slice(0, len(ids) - 1)
        # Arrow compares texts as Spark and Postgres do here: byte by byte.
        if compute.any(compute.less(following, before)).as_py() or first.encode() < self._last.encode():
            raise AssertionError("the events are not sorted by id, so that duplicates could be missed")
        mask = pyarrow.concat_arrays([pyarrow.array([first != self._last]), compute.greater(following, before)])
        self._last = ids[len(ids) - 1].as_py()
        kept: int = mask.true_count
        self.kept += kept
        return batch if kept == batch.num_rows else batch.filter(mask)
