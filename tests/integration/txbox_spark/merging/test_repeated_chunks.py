"""Chunks that are known already: tried with their ids alone, and settled only if every id is in the inbox."""

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import Engine

from support.spark.bulk_loads import COPY_FIRST, SUBSCRIBER, Books, counts, frame, load, purchases
from txbox import DeadLetter, DeadLetters, Reason
from txbox_spark.loading.copy_writer import likely_repeated
from txbox_spark.merging.chunk_ranges import partition_by_chunk
from txbox_spark.merging.merge_plan import MergeStatements


def test_chunks_of_which_every_sampled_id_is_known(engine: Engine, books: Books) -> None:
    books.record(["a", "b", "d", "e", "f"])
    bounds = ("c", "e")
    found = likely_repeated(engine, MergeStatements.load(), SUBSCRIBER, ["a", "b", "c", "d", "e", "f"], bounds)
    assert found == (0, 2)
    assert likely_repeated(engine, MergeStatements.load(), SUBSCRIBER, ["a", "b"], bounds) == (0,)
    assert likely_repeated(engine, MergeStatements.load(), "shipping", ["a", "b"], bounds) == ()
    assert likely_repeated(engine, MergeStatements.load(), SUBSCRIBER, [], ()) == ()


def test_they_are_settled_without_reading_the_events(
    spark: SparkSession, books: Books, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad rows and duplicates are counted as ever."""
    events = purchases(400)
    first = load(frame(spark, events), schema_url, "copy")
    assert (first.chunks, first.applied) == (4, 400)
    laid_out = []

    def noted(rows: DataFrame, *others: Any, **named: Any) -> DataFrame:
        laid_out.append(rows.columns)
        return partition_by_chunk(rows, *others, **named)

    monkeypatch.setattr("txbox_spark.loading.copy_writer.partition_by_chunk", noted)
    again = load(frame(spark, [*events, *events[:50], (None, 1, 1), ("", 1, 1)]), schema_url, "copy")
    assert counts(again) == {
        "read": 452, "rejected": 2, "duplicate_in_source": 50, "already_processed": 400, "applied": 0
    }  # fmt: skip
    assert len(again.rejected_sample) == 2
    assert laid_out == [["message_id", "rejected"]]
    books.require_applied(events)


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_what_is_parked_is_not_applied_and_told_from_what_is_processed(
    spark: SparkSession, books: Books, engine: Engine, schema_url: str, writer: str
) -> None:
    events = purchases(100)
    processed, parked = [one[0] for one in events[:30]], [one[0] for one in events[30:33]]
    books.record(processed)
    letters = DeadLetters(engine)
    for message_id in (*parked, "parked, and in no source"):
        letters.park(DeadLetter(SUBSCRIBER, message_id, Reason.FAILED, "no", 3, "queue", message_id.encode()))
    first = load(frame(spark, [*events, *events[28:35]]), schema_url, writer)
    assert counts(first) == {
        "read": 107, "rejected": 0, "duplicate_in_source": 7, "already_processed": 30, "applied": 67, "parked": 3
    }  # fmt: skip
    again = load(frame(spark, events), schema_url, writer)
    assert (again.already_processed, again.parked, again.applied) == (97, 3, 0)
    for letter in letters.list():
        letters.redrive(letter.dead_letter_id or 0, lambda _: None)
    assert load(frame(spark, events), schema_url, writer).applied == 3
    books.require_applied(events[30:], recorded=processed)


@pytest.mark.parametrize("few", [12, 3])
def test_of_chunks_with_few_new_ids_only_the_new_events_are_sent(
    spark: SparkSession, books: Books, schema_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """The counts are of the whole file; a chunk with more new ids than the driver holds takes the whole road."""
    monkeypatch.setattr("txbox_spark.loading.copy_writer.FEW_NEW_SHARE", 0.05)
    monkeypatch.setattr("txbox_spark.loading.copy_writer.FEW_NEW_IDS", few)
    events = purchases(400)
    known = sorted(events)
    new = [known.pop(place) for place in (399, 200, 150, 20, 2)]  # 2, 1, 1 and 1 of the four chunks
    parked = [known.pop(100)[0], known.pop(300)[0]]
    books.record([one[0] for one in known])
    for message_id in parked:
        DeadLetters(engine).park(DeadLetter(SUBSCRIBER, message_id, Reason.FAILED, "no", 3, "queue", b""))
    copied = []

    def noted(rows: DataFrame, *others: Any, **named: Any) -> DataFrame:
        copied.append(rows.count())
        return partition_by_chunk(rows, *others, **named)

    monkeypatch.setattr("txbox_spark.loading.copy_writer.partition_by_chunk", noted)
    report = load(frame(spark, [*events, *new, (None, 1, 1), ("", 1, 1)]), schema_url, "copy")
    assert counts(report) == {
        "read": 407, "rejected": 2, "duplicate_in_source": 5, "already_processed": 393, "applied": 5, "parked": 2
    }  # fmt: skip
    assert len(report.rejected_sample) == 2
    assert copied == ([407, 10] if few == 12 else [407, 407])
    books.require_applied(new, recorded=[*(one[0] for one in known), *parked])


@pytest.mark.parametrize("known", [150, 399])
def test_what_only_seemed_to_be_known_is_loaded(
    spark: SparkSession, books: Books, schema_url: str, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    """A sample proves nothing: with any other id in a chunk, all of the chunk takes the whole road."""
    monkeypatch.setattr("txbox_spark.loading.copy_writer.likely_repeated", lambda *_: (0, 1, 2, 3))
    events = purchases(400)
    recorded = [one[0] for one in events[:known]]
    books.record(recorded)
    report = load(frame(spark, [*events, *events[390:]]), schema_url, "copy")
    assert (report.duplicate_in_source, report.already_processed, report.applied) == (10, known, 400 - known)
    books.require_applied(events[known:], recorded=recorded)
