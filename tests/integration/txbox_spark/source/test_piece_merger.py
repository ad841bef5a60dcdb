"""What tasks do with their rows, and what their run comes to: attempts as Spark makes them, without a Spark."""

import json
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow
import pytest
from pyspark.sql.types import ArrayType, IntegerType, LongType, StringType, StructField, StructType
from sqlalchemy import Engine

from support.spark.bulk_loads import APPLY, SUBSCRIBER, Books, Purchase, purchases
from txbox import SqlEffect
from txbox.effects import Field
from txbox_spark.merging.merge_plan import MergePlan
from txbox_spark.report import BulkLoadReport
from txbox_spark.source.arrow_events import ArrowEvents
from txbox_spark.source.piece_merger import FIRST_ROWS, PieceMerger
from txbox_spark.source.run_ledger import FRAME, STREAM, RunLedger, WriteFailed

SOURCE = StructType(
    [
        StructField("event_id", StringType()),
        StructField("account_id", IntegerType()),
        StructField("amount", LongType()),
    ]
)
ARROW = pyarrow.schema([("event_id", pyarrow.string()), ("account_id", pyarrow.int32()), ("amount", pyarrow.int64())])


def batches(events: Sequence[Purchase], rows: int = FIRST_ROWS) -> Iterator[pyarrow.RecordBatch]:
    for begin in range(0, len(events), rows):
        columns = zip(*events[begin : begin + rows], strict=True)
        yield pyarrow.RecordBatch.from_arrays(
            [pyarrow.array(one, kind) for one, kind in zip(columns, ARROW.types, strict=True)], schema=ARROW
        )


class Write:
    """One write: attempts at tasks, and its end."""

    def __init__(self, engine: Engine, apply: str = APPLY, **plan: Any) -> None:
        events = ArrowEvents.of(SOURCE, "event_id", {}, None)
        self.plan = MergePlan(
            run_id=secrets.token_hex(6),
            subscriber_id=SUBSCRIBER,
            columns=events.columns,
            apply=apply,
            lock_seconds=1e-9,
            **plan,
        )
        url = engine.url.render_as_string(hide_password=False)
        self.task = PieceMerger(url, self.plan, events, FRAME, fails_on_rejected=False)
        self.ledger = RunLedger(engine, self.plan, FRAME)

    def attempt(self, events: Sequence[Purchase]) -> tuple[int, ...]:
        """Run one attempt at a task."""
        return self.task.merge(batches(events))

    def finish(self, *attempts: Iterable[int]) -> BulkLoadReport:
        """End it with the attempts that count."""
        return self.ledger.finish([number for one in attempts for number in one])


def adds_up(report: BulkLoadReport) -> tuple[int, int, int, int, int]:
    parts = (report.rejected, report.duplicate_in_source, report.already_processed, report.applied)
    assert report.read == sum(parts) + report.parked + report.expired
    return (report.read, *parts)


def test_what_a_lost_attempt_has_applied_counts_once(engine: Engine, books: Books) -> None:
    events = purchases(3 * FIRST_ROWS // 2)
    books.record(one[0] for one in events[:10])
    write = Write(engine)
    lost = write.attempt(events[:FIRST_ROWS])
    won = write.attempt([*events, events[-1], (None, 1, 1)])
    assert (len(lost), len(won)) == (1, 2)
    report = write.finish(won)
    assert adds_up(report) == (len(events) + 2, 1, 1, 10, len(events) - 10)
    assert write.finish(won) == report, "an answer was lost, and it is asked once more"
    assert books.chunks(write.plan.run_id) == [0, 1]
    books.require_applied(events[10:], recorded=[one[0] for one in events[:10]])


def test_an_attempt_that_outlives_the_write_merges_nothing(engine: Engine, books: Books) -> None:
    events = purchases(20)
    write = Write(engine)
    report = write.finish(write.attempt(events[:10]))
    with pytest.raises(WriteFailed, match="the write has ended"):
        write.attempt(events)
    assert adds_up(report) == (10, 0, 0, 0, 10)
    books.require_applied(events[:10])


def test_tasks_with_the_same_events_do_not_wait_in_a_circle(engine: Engine, books: Books) -> None:
    events = purchases(1_000)
    write = Write(engine)
    merged: list[tuple[int, ...]] = []
    barrier = threading.Barrier(4)

    def task(own: Sequence[Purchase]) -> None:
        barrier.wait()
        merged.append(write.attempt(own))

    threads = [threading.Thread(target=task, args=(events[::step],)) for step in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = write.finish(*merged)
    assert adds_up(report) == (4_000, 0, 0, 3_000, 1_000)
    books.require_applied(events)


def test_one_that_has_failed_ends_the_others(engine: Engine, books: Books) -> None:
    write = Write(engine, "SELECT 1 / 0 FROM fresh_event")
    with pytest.raises(WriteFailed, match="division by zero"):
        write.attempt(purchases(5))
    other = replace(write.task, plan=replace(write.plan, apply=APPLY))
    with pytest.raises(WriteFailed, match="division by zero"):
        other.merge(batches(purchases(5)))
    write.ledger.abort("aborted")
    assert "division by zero" in books.ledger(write.plan.run_id)["error"]
    assert books.inbox() == []


def test_a_write_without_rows_is_finished(engine: Engine, books: Books) -> None:
    write = Write(engine)
    assert adds_up(write.finish(write.attempt([]))) == (0, 0, 0, 0, 0)
    assert books.ledger(write.plan.run_id)["finished_at"] is not None


def rejections(sent: pyarrow.RecordBatch) -> list[tuple[str, str] | None]:
    """Why each row is rejected, and the row."""
    texts = sent.column("rejected").to_pylist()
    return [None if one is None else (json.loads(one)["cause"], json.loads(one)["event"]) for one in texts]


def test_fields_are_judged_as_a_worker_judges_them() -> None:
    nested = StructType([StructField("id", StringType()), StructField("tags", ArrayType(StringType()))])
    source = StructType(
        [StructField("id", StringType()), StructField("customer", nested), StructField("n", LongType())]
    )
    effect = SqlEffect.of(
        "INSERT INTO x SELECT * FROM fresh_event",
        fields={
            "customer_id": Field("text", at="/customer/id", required=True),
            "tags": Field("jsonb", at="/customer/tags"),
            "n": Field("smallint", default="7"),
        },
    )
    rows = [
        {"id": "good", "customer": {"id": "ada", "tags": ['a"', None]}, "n": 1},
        {"id": "default", "customer": {"id": "bob", "tags": None}, "n": None},
        {"id": "no customer", "customer": None, "n": 1},
        {"id": "large", "customer": {"id": "eve", "tags": []}, "n": 40_000},
    ]
    arrow = pyarrow.schema(
        [
            ("id", pyarrow.string()),
            ("customer", pyarrow.struct([("id", pyarrow.string()), ("tags", pyarrow.list_(pyarrow.string()))])),
            ("n", pyarrow.int64()),
        ]
    )
    events = ArrowEvents.of(source, "id", {}, effect.fields)
    sent = events.batch(pyarrow.RecordBatch.from_pylist(rows, schema=arrow))
    assert [one.postgres_type for one in events.columns] == ["text", "jsonb", "smallint"]
    values = [tuple(row.values())[2:] for row in sent.to_pylist()]
    assert sent.column("message_id").to_pylist() == ["good", "default", None, None]
    assert values == [
        ("ada", '["a\\"",null]', "1"),
        ("bob", None, "7"),
        (None, None, "1"),
        ("eve", "[]", "40000"),
    ]
    assert rejections(sent) == [
        None,
        None,
        ("field customer_id: no value, and it is required", '{"id":"no customer","n":1}'),
        ("field n: not smallint", '{"id":"large","customer":{"id":"eve","tags":[]},"n":40000}'),
    ]


def test_texts_that_postgres_cannot_keep_are_rejected() -> None:
    source = StructType([StructField("id", StringType()), StructField("said", StringType())])
    said = [b"fine", b"a\0b", b"\xff", "naïve".encode()]
    ids = [b"1", b"2", b"3", b"\xc3("]

    def texts(values: list[bytes]) -> pyarrow.Array:
        return pyarrow.Array.from_buffers(
            pyarrow.string(), len(values), pyarrow.array(values, pyarrow.binary()).buffers()
        )

    rows = pyarrow.RecordBatch.from_arrays([texts(ids), texts(said)], names=["id", "said"])
    sent = ArrowEvents.of(source, "id", {}, None).batch(rows)
    assert sent.column("message_id").to_pylist() == ["1", None, None, None]
    assert rejections(sent) == [
        None,
        ("NUL character, which Postgres cannot keep", '{"id":"2","said":"a\\u0000b"}'),
        ("not UTF-8 in column said", '{"id":"3"}'),
        ("not UTF-8 in the message id", '{"said":"naïve"}'),
    ]


def test_a_batch_of_a_stream_that_no_task_tells_of_is_aborted_and_forgotten_with_its_query(
    engine: Engine, books: Books
) -> None:
    """The executors died before any piece was merged, or the driver did; and another query has a batch under way."""
    plan = Write(engine).plan

    def batch(checkpoint: str | None) -> RunLedger:
        return RunLedger(engine, replace(plan, run_id=secrets.token_hex(6)), STREAM, checkpoint)

    left, lost, other, unknown, last = map(batch, ("a", "a", "b", None, "a"))
    for one in (left, lost, other, unknown):
        one.begin()
    batch("a").abort_batch("the executors are gone")
    batch(None).abort_batch("nothing is known of them")
    errors = dict(books.rows("SELECT run_id, error FROM bulk_load"))
    gone = "the executors are gone"
    assert [errors[one.plan.run_id] for one in (left, lost, other, unknown)] == [gone, gone, None, None]
    last.finish([])
    last.forget_batches()
    kept = {run_id for (run_id,) in books.rows("SELECT run_id FROM bulk_load")}
    assert kept == {one.plan.run_id for one in (other, unknown, last)}
