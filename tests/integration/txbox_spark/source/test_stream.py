"""A stream through format txbox: with its checkpoint, without, and with an effect that fails."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession, functions

from support.spark.bulk_loads import APPLY, APPLY_ALLOWED, COLUMNS, SUBSCRIBER, Books, Purchase, as_dicts, purchases
from support.spark.event_files import drop


class Landing:
    """A folder that files of events are dropped into, and the queries over it."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self._spark, self._url, self._folder = spark, url, folder
        (folder / "landing").mkdir()

    def drop(self, events: Iterable[Purchase]) -> None:
        """Put a file into the folder, whole at once."""
        drop(self._folder / "landing", as_dicts(events))

    def run(self, checkpoint: str, apply: str = APPLY) -> list[tuple[int, int, int]]:
        """Run a query until it has read what is there; of each batch, what Spark counts as read, written, observed."""
        stream = self._spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1)
        given = {"url": self._url, "subscriber": SUBSCRIBER, "message_id": "event_id", "apply": apply}
        query = (
            stream.json(str(self._folder / "landing"))
            .observe("rows", functions.count("*").alias("rows"))
            .writeStream.format("txbox")
            .options(**given)
            .option("checkpointLocation", str(self._folder / checkpoint))
            .queryName("purchases")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        progress = [one for one in query.recentProgress if one.numInputRows]
        return [(one.numInputRows, one.sink.numOutputRows, one.observedMetrics["rows"].rows) for one in progress]


def test_each_event_of_a_stream_is_applied_once(
    spark: SparkSession, schema_url: str, books: Books, tmp_path: Path
) -> None:
    events = purchases(300)
    landing = Landing(spark, schema_url, tmp_path)
    landing.drop(events[:100])
    landing.drop([*events[50:200], (None, 1, 1)])
    assert landing.run("checkpoint") == [(100, 100, 100), (151, 151, 151)], "Spark counts duplicates and rejected rows"
    books.require_applied(events[:200])
    landing.drop(events[150:])
    landing.run("checkpoint")
    books.require_applied(events)
    assert books.rows(
        "SELECT run.rows_read, run.rows_rejected, finished_at IS NOT NULL, sum(applied)::int FROM bulk_load AS run "
        "JOIN bulk_load_chunk USING (run_id) GROUP BY run_id"
    ) == [(150, 0, True, 100)], "the ledger has the last batch"
    landing.run("another")
    books.require_applied(events)
    assert books.rows("SELECT sum(applied)::int FROM bulk_load_chunk") == [(0,)]


def test_a_batch_that_fails_ends_the_query_and_comes_again(
    spark: SparkSession, schema_url: str, books: Books, tmp_path: Path
) -> None:
    events = purchases(40)
    books.run(f"INSERT INTO forbidden VALUES ('{events[30][0]}')")
    landing = Landing(spark, schema_url, tmp_path)
    landing.drop(events[:20])
    landing.drop(events[20:])
    with pytest.raises(StreamingQueryException, match="this one is forbidden"):
        landing.run("checkpoint", APPLY_ALLOWED)
    books.require_applied(events[:20])
    ((error,),) = books.rows("SELECT error FROM bulk_load WHERE finished_at IS NULL")
    assert "this one is forbidden" in error
    books.run("DELETE FROM forbidden")
    landing.run("checkpoint", APPLY_ALLOWED)
    books.require_applied(events)
    assert books.rows("SELECT error, finished_at IS NOT NULL FROM bulk_load") == [(None, True)]
