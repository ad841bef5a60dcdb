"""A stream through the inbox, by a real Spark and a real Postgres; what to expect is worked out in Python."""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from sqlalchemy import Engine

from support.spark.bulk_loads import APPLY, COLUMNS, COPY_FIRST, Books
from support.spark.event_files import drop
from support.waiting import wait_until
from txbox import Inbox, SchemaMissing
from txbox.instrumentation import BulkLoaded
from txbox.instrumentation import Event as TxboxEvent
from txbox_spark import BulkLoadReport, SparkSetupError, require_jdbc_driver
from txbox_spark.loading.writer import FEW
from txbox_spark.sink import BatchFailed, inbox_sink

WRONG = "INSERT INTO effect SELECT event_id FROM fresh_event; UPDATE no_such_table SET balance = 0"
GATE = 4711
"""The advisory lock that a test holds to keep a batch in its apply."""

Event = dict[str, Any]
Reports = list[tuple[int, BulkLoadReport]]


def events(numbers: Iterable[int]) -> list[Event]:
    return [{"event_id": f"e{number:05}", "account_id": number % 7, "amount": number % 11 + 1} for number in numbers]


class Stream:
    """A folder that files of events are dropped into, the query over it, and the tables it changes."""

    def __init__(self, spark: SparkSession, engine: Engine, url: str, folder: Path) -> None:
        self.spark, self.engine, self.url = spark, engine, url
        self.landing, self.checkpoint = folder / "landing", folder / "checkpoint"
        self.landing.mkdir()
        self.reports: Reports = []
        self.queries: list[StreamingQuery] = []
        self.dropped: list[Event] = []
        self.books = Books(engine)
        self.rows = self.books.rows

    def drop(self, rows: list[Event]) -> None:
        """Put a file into the folder, whole at once."""
        self.dropped += rows
        drop(self.landing, rows)

    def read(self) -> DataFrame:
        return self.spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).json(str(self.landing))

    def sink(self, **arguments: Any) -> Callable[[DataFrame, int], None]:
        settings = {
            "url": self.url,
            "subscriber_id": "billing",
            "message_id": "event_id",
            "apply": APPLY,
            "writer": "copy",
            "on_batch": lambda number, report: self.reports.append((number, report)),
        }
        return inbox_sink(**{**settings, **arguments})

    def start(
        self, sink: Callable[[DataFrame, int], None], frame: DataFrame | None = None, checkpoint: str = "checkpoint"
    ) -> StreamingQuery:
        writer = (frame or self.read()).writeStream.foreachBatch(sink)
        place = self.checkpoint.with_name(checkpoint)
        self.queries.append(writer.option("checkpointLocation", str(place)).start())
        return self.queries[-1]

    def run(
        self, sink: Callable[[DataFrame, int], None], frame: DataFrame | None = None, checkpoint: str = "checkpoint"
    ) -> None:
        """Start the query, let it process what there is, and stop it."""
        query = self.start(sink, frame, checkpoint)
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    def assert_applied_once(self, expected: Iterable[Event]) -> None:
        self.books.require_applied((one["event_id"], one["account_id"], one["amount"]) for one in expected)

    def ledger(self) -> list[tuple[Any, ...]]:
        """The runs that the ledger holds, and how many chunks of each."""
        return self.rows(
            "SELECT run_id, count(chunk.chunk) FROM bulk_load AS run "
            "FULL JOIN bulk_load_chunk AS chunk USING (run_id) GROUP BY run_id"
        )


@pytest.fixture
def stream(spark: SparkSession, engine: Engine, schema_url: str, tmp_path: Path) -> Iterator[Stream]:
    stream = Stream(spark, engine, schema_url, tmp_path)
    yield stream
    for query in stream.queries:
        query.stop()


@pytest.fixture(params=COPY_FIRST)
def writer(request: pytest.FixtureRequest, spark: SparkSession) -> str:
    if request.param == "jdbc":
        try:
            require_jdbc_driver(spark)
        except SparkSetupError as error:
            pytest.fail(str(error))
    return str(request.param)


def totals(reports: Reports) -> dict[str, int]:
    names = ("read", "rejected", "duplicate_in_source", "already_processed", "applied")
    return {name: sum(getattr(report, name) for _, report in reports) for name in names}


# --- what is applied -------------------------------------------------------------------------------------------------


def test_duplicates_in_and_across_batches_are_applied_once(stream: Stream, writer: str) -> None:
    stream.drop([*events(range(100)), *events(range(50)), *events(range(10))])
    stream.drop(events(range(80, 200)))
    stream.drop([*events(range(0, 300, 3)), *events(range(0, 300, 3))])
    stream.run(stream.sink(writer=writer))
    stream.assert_applied_once(stream.dropped)
    assert [number for number, _ in stream.reports] == [0, 1, 2]
    seen: set[str] = set()
    start = 0
    for (_, report), rows in zip(stream.reports, (160, 120, 200), strict=True):
        ids = {event["event_id"] for event in stream.dropped[start : start + rows]}
        start += rows
        assert (report.read, report.duplicate_in_source) == (rows, rows - len(ids))
        assert (report.already_processed, report.applied) == (len(ids & seen), len(ids - seen))
        assert report.writer == writer
        seen |= ids
    assert stream.ledger() == []
    assert stream.books.staging_tables() == []


def test_a_live_worker_records_some_of_the_events_before_and_meanwhile(
    stream: Stream, engine: Engine, writer: str
) -> None:
    inbox = Inbox("billing")

    def live(rows: list[Event]) -> int:
        first = 0
        for event in rows:
            with engine.begin() as connection:
                if inbox.record(connection, event["event_id"]):
                    first += 1
                    connection.exec_driver_sql("INSERT INTO effect VALUES (%s, %s, %s)", tuple(event.values()))
                    connection.exec_driver_sql(
                        "UPDATE account SET balance = balance + %s WHERE account_id = %s",
                        (event["amount"], event["account_id"]),
                    )
        return first

    before = live(events(range(0, 400, 5)))
    counted: list[int] = []
    worker = threading.Thread(target=lambda: counted.append(live(events(range(399, -1, -3)))))
    stream.drop(events(range(200)))
    stream.drop(events(range(150, 400)))
    query = stream.start(stream.sink(writer=writer))
    worker.start()
    query.processAllAvailable()
    worker.join()
    stream.assert_applied_once(stream.dropped)
    assert before == 80
    assert totals(stream.reports)["applied"] == 400 - before - counted[0]


def test_rejected_rows_are_counted_logged_kept_and_told(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    loaded: list[TxboxEvent] = []
    bad = [{"event_id": None, "account_id": 1, "amount": 77}, {"event_id": "", "account_id": 1, "amount": 78}]
    stream.drop([*events(range(5)), *bad])
    with caplog.at_level(logging.WARNING, "txbox"):
        stream.run(stream.sink(rejected_to="table:kept", hooks=[loaded.append]))
    stream.assert_applied_once(events(range(5)))
    assert sorted(stream.rows("SELECT cause FROM kept")) == [("empty message id",), ("no message id",)]
    (event,) = loaded
    assert isinstance(event, BulkLoaded)
    assert re.fullmatch("stream [0-9a-f-]{36}", event.source)
    assert {name: count for name, count in event.counts.items() if count} == {"applied": 5, "rejected": 2}
    assert totals(stream.reports) == {
        "read": 7, "rejected": 2, "duplicate_in_source": 0, "already_processed": 0, "applied": 5,
    }  # fmt: skip
    assert all("message id" in one for one in stream.reports[0][1].rejected_sample)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "batch 0: 2 of 7 rows rejected: " in line
    assert "77" in line


def test_the_progress_of_the_query_and_our_event_are_of_one_batch(stream: Stream) -> None:
    """What Spark's listeners are told of a batch comes after what ours are."""
    loaded: dict[tuple[str, int | None], BulkLoaded] = {}
    seen: list[tuple[StreamingQueryProgress, BulkLoaded | None]] = []
    stages: set[str] = set()

    def hook(event: TxboxEvent) -> None:
        assert isinstance(event, BulkLoaded)
        loaded[event.source, event.batch_id] = event

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
            pass

        def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
            progress = event.progress
            seen.append((progress, loaded.get((f"stream {progress.id}", progress.batchId))))

        def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
            pass

    listener = Listener()
    stream.spark.streams.addListener(listener)
    try:
        stream.drop(events(range(30)))
        stream.drop([*events(range(20, 50)), {"event_id": None, "account_id": 1, "amount": 77}])
        observed = stream.read().observe("rows", functions.count("*").alias("rows"))
        stream.run(stream.sink(hooks=[hook], on_progress=lambda one: stages.add(one.stage)), observed)
        wait_until(lambda: len([one for one in seen if one[0].numInputRows]) == 2, "the listener is told of both")
    finally:
        stream.spark.streams.removeListener(listener)
    (first, ours), (second, then) = [one for one in seen if one[0].numInputRows]
    assert ours is not None
    assert then is not None
    assert (ours.counts["applied"], ours.counts["rejected"]) == (30, 0)
    assert (then.counts["applied"], then.counts["rejected"], then.counts["already_processed"]) == (20, 1, 10)
    assert [ours.run_id, then.run_id] == [report.run_id for _, report in stream.reports]
    assert stages == {"survey", "merge"}
    # What Spark itself knows: a batch is computed more than once, and what becomes of its rows is not told to it.
    assert (first.sink.description, first.sink.numOutputRows) == ("ForeachBatchSink", -1)
    assert first.numInputRows > 30
    assert second.numInputRows > 31
    if stream.spark.version >= "4.3":  # before, what is computed twice is observed twice (SPARK-37487, SPARK-58183)
        assert (first.observedMetrics["rows"].rows, second.observedMetrics["rows"].rows) == (30, 31)
    assert f"txbox bulk load {then.run_id} of {then.source} batch 1: merge" in job_descriptions(stream.spark)


def job_descriptions(spark: SparkSession) -> set[str]:
    """What Spark's pages and its listeners call the jobs."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)  # type: ignore[attr-defined]
    found = (jobs.apply(number).description() for number in range(jobs.size()))
    return {str(one.get()) for one in found if one.isDefined()}


# --- restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{}, {"max_rejected": 2, "rejected_to": "table:kept"}], ids=["", "rejected"])
def test_a_wrong_apply_ends_the_query_and_it_goes_on_when_mended(
    stream: Stream, writer: str, limit: dict[str, Any]
) -> None:
    """So it does with a limit of rejected rows, which are kept once."""
    bad: list[Event] = [{"event_id": name, "account_id": 1, "amount": 77} for name in (None, "") if limit]
    stream.drop(events(range(30)))
    stream.run(stream.sink(writer=writer))
    stream.drop([*events(range(20, 60)), *bad])
    stream.drop(events(range(60, 70)))
    wrong = stream.sink(writer=writer, apply=WRONG, **limit)
    with pytest.raises(StreamingQueryException) as raised:
        stream.run(wrong)
    said = str(raised.value)
    assert "BatchFailed: batch 1 of the stream: chunk 0 of run" in said
    assert 'relation "no_such_table" does not exist' in said
    assert "start the query again with the same checkpoint" in said
    stream.assert_applied_once(events(range(30)))
    ((run, chunks),) = stream.ledger()
    assert chunks == 0, "nothing of the failed batch is committed"
    assert run in said
    stream.run(stream.sink(writer=writer, **limit))
    stream.assert_applied_once(events(range(70)))
    assert [(number, report.applied) for number, report in stream.reports] == [(0, 30), (1, 30), (2, 10)]
    resumed = stream.reports[1][1]
    assert (resumed.run_id, resumed.attempts, resumed.rejected) == (run, 2, len(bad))
    assert not limit or stream.rows("SELECT count(*) FROM kept") == [(2,)]
    assert stream.ledger() == []
    assert stream.books.staging_tables() == []


def test_a_checkpoint_that_is_lost_means_only_that_everything_is_read_again(stream: Stream) -> None:
    for first in (0, 40, 80):
        stream.drop(events(range(first, first + 60)))
    stream.run(stream.sink())
    stream.drop(events(range(120, 180)))
    # Other batches than before: all files in one.
    everything = stream.spark.readStream.schema(COLUMNS).json(str(stream.landing))
    stream.run(stream.sink(), everything, "another-checkpoint")
    stream.assert_applied_once(stream.dropped)
    assert [report.read for _, report in stream.reports] == [60, 60, 60, 240]
    assert stream.reports[-1][1].applied == 40


def test_stopping_the_query_in_a_batch_ends_it_at_once(stream: Stream, engine: Engine, writer: str) -> None:
    stream.drop(events(range(50)))
    gated = f"SELECT pg_advisory_xact_lock({GATE}); {APPLY}"
    with engine.connect() as gate:
        gate.exec_driver_sql(f"SELECT pg_advisory_lock({GATE})")
        query = stream.start(stream.sink(writer=writer, apply=gated))
        wait_until(lambda: waiting_at_the_gate(stream), "a batch in its apply", timeout=60)
        stopping = threading.Thread(target=query.stop)
        stopping.start()
        if writer == "jdbc":  # chunks that have begun are waited for
            gate.exec_driver_sql(f"SELECT pg_advisory_unlock({GATE})")
        stopping.join(60)
        assert not stopping.is_alive()
        gate.exec_driver_sql(f"SELECT pg_advisory_unlock({GATE})")
    assert query.exception() is None, "to be stopped is no failure"
    stream.run(stream.sink(writer=writer))
    stream.assert_applied_once(stream.dropped)
    assert stream.ledger() == []


def waiting_at_the_gate(stream: Stream) -> bool:
    return bool(stream.rows(f"SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = {GATE} AND NOT granted"))


# --- the ledger ------------------------------------------------------------------------------------------------------


def begin_run(stream: Stream, source: str, *, subscriber: str = "billing", hours: int = 0) -> str:
    """Write a run into the ledger as a killed process leaves it, with a chunk."""
    run = f"{len(stream.rows('SELECT FROM bulk_load')):012x}"
    with stream.engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds, heartbeat_at) "
            "VALUES (%s, %s, %s, '', 'copy', 1, '[]', now() - make_interval(hours => %s))",
            (run, subscriber, source, hours),
        )
        connection.exec_driver_sql("INSERT INTO bulk_load_chunk (run_id, chunk) VALUES (%s, 0)", (run,))
    return run


def test_what_killed_batches_left_behind_is_swept_and_nothing_else(stream: Stream) -> None:
    stream.drop(events(range(10)))
    stream.run(stream.sink())
    query = stream.queries[0].id
    other = "0b7f4a8e-0000-4000-8000-000000000000"
    begin_run(stream, f"stream {query} batch 17")
    begin_run(stream, f"stream {other} batch 17", hours=25)
    kept = {
        begin_run(stream, f"stream {other} batch 18", hours=23),
        begin_run(stream, f"stream {query} batch 17", subscriber="shipping", hours=25),
        begin_run(stream, f"stream {query} batch 17 of my own", hours=25),
        begin_run(stream, "3 parquet files", hours=25),
    }
    with stream.engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO bulk_load_chunk (run_id, chunk) VALUES ('a task that outlived', 0)")
    stream.drop(events(range(10, 20)))
    stream.run(stream.sink())
    assert stream.queries[1].id == query, "the checkpoint keeps the query's name"
    assert dict(stream.ledger()) == dict.fromkeys(kept, 1)


# --- the price of a batch --------------------------------------------------------------------------------------------


def jobs_so_far(spark: SparkSession) -> int:
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())  # type: ignore[attr-defined]


def test_a_batch_without_rows_runs_one_job_and_leaves_nothing(stream: Stream, writer: str) -> None:
    jobs: list[int] = []
    sink = stream.sink(writer=writer)

    def counted(batch: DataFrame, number: int) -> None:
        context = stream.spark.sparkContext
        group, before = context.getLocalProperty("spark.jobGroup.id"), jobs_so_far(stream.spark)
        sink(batch, number)
        jobs.append(jobs_so_far(stream.spark) - before)
        assert context.getLocalProperty("spark.jobGroup.id") == group == str(stream.queries[-1].runId)

    stream.drop([])
    stream.drop(events(range(3)))
    stream.drop([{**event, "amount": 100} for event in events(range(3, 9))])
    stream.run(counted, stream.read().where("amount < 100"))
    stream.assert_applied_once(events(range(3)))
    assert [jobs[0], jobs[2]] == [0, 1], "none over no files, one to look whether there are rows"
    assert [number for number, _ in stream.reports] == [1], "the others had no rows"
    assert stream.ledger() == []


@pytest.mark.slow
def test_the_writer_is_chosen_once(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    import txbox_spark.loading.loader

    choose, asked = txbox_spark.loading.loader.choose_writer, []
    monkeypatch.setattr(txbox_spark.loading.loader, "choose_writer", lambda *of: asked.append(of) or choose(*of))
    for first in (0, 10, 20):
        stream.drop(events(range(first, first + 10)))
    stream.run(stream.sink(writer="auto"))
    assert len(asked) == 1
    reason = "the executors have psycopg and reach Postgres"
    assert [(report.writer, report.writer_reason) for _, report in stream.reports] == [("copy", reason)] * 3


# --- other sources ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stateful_query(stream: Stream) -> None:
    """Its state is computed with the batch, and the batch is computed twice."""
    seen = stream.read().dropDuplicates(["event_id"])
    stream.drop([*events(range(50)), *events(range(25))])
    stream.drop(events(range(40)))
    stream.run(stream.sink(), seen)
    stream.drop(events(range(30, 80)))
    stream.run(stream.sink(), seen)
    stream.assert_applied_once(stream.dropped)
    assert totals(stream.reports) == {
        "read": 80, "rejected": 0, "duplicate_in_source": 0, "already_processed": 0, "applied": 80,
    }  # fmt: skip


# --- arguments -------------------------------------------------------------------------------------------------------


def test_without_tables_it_says_so(stream: Stream) -> None:
    batch = stream.spark.createDataFrame([("e1", 1, 1)], COLUMNS)
    with pytest.raises(SchemaMissing):
        stream.sink(schema="no_such_schema")(batch, 0)


def test_a_batch_without_executors_chooses_no_writer_for_the_next(stream: Stream, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"event_id": "e00001", "account_id": 1, "amount": 2}')
    sink = stream.sink(writer="auto")
    sink(stream.spark.read.schema(COLUMNS).json(str(tmp_path)), 0)
    sink(stream.spark.createDataFrame([("e00002", 1, 1)], COLUMNS), 1)
    sink(stream.spark.read.schema(COLUMNS).json(str(tmp_path)), 2)
    asked = "the executors have psycopg and reach Postgres"
    assert [report.writer_reason for _, report in stream.reports] == [FEW.reason, asked, asked]


def test_outside_of_a_query_it_is_a_function_like_any_other(stream: Stream) -> None:
    batch = stream.spark.createDataFrame([("e00001", 1, 2), ("e00001", 1, 2)], COLUMNS)
    sink = stream.sink()
    sink(batch, 0)
    sink(batch, 0)
    stream.assert_applied_once(events([1]))
    assert [(number, report.applied) for number, report in stream.reports] == [(0, 1), (0, 0)]
    with pytest.raises(ZeroDivisionError):  # what on_batch raises is not swallowed
        stream.sink(on_batch=lambda number, report: 1 // number)(batch, 0)
    assert stream.ledger() == []
    with pytest.raises(BatchFailed) as raised:
        stream.sink(apply=WRONG)(stream.spark.createDataFrame([("e2", 1, 1)], COLUMNS), 5)
    assert raised.value.batch_id == 5
    assert stream.ledger() == [(raised.value.run_id, 0)]
