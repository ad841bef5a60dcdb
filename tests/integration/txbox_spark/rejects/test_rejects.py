"""Rows that only Postgres refuses are rejected, with their cause; the others are applied, by both writers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.spark.bulk_loads import COPY_FIRST, WRITERS, Books, failed, frame, load
from txbox import InvalidConfiguration, SqlEffect
from txbox_spark import BulkLoadReport, TooManyRejected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = "event_id string, number string, payload string, day string, owner string, tags array<array<int>>"
TYPES = {"number": "integer", "payload": "jsonb", "day": "date", "owner": "uuid"}
APPLY = "INSERT INTO typed SELECT event_id, number, payload, day, owner, tags FROM fresh_event"
OWNER = "0195f1a2-0000-7000-8000-000000000001"

BAD = {
    "number": ["x", "99999999999", "1.5", ""],
    "payload": ["{", '{"a": "\\ud800"}', '{"a": 1} 2'],
    "day": ["2024-02-30", "yesterday's", "5874898-01-01"],
    "owner": ["no uuid"],
    "tags": [[[1], [2, 3]]],
}


@pytest.fixture
def typed(books: Books) -> Books:
    """A table with types and constraints."""
    books.run(
        "CREATE TABLE typed (event_id text PRIMARY KEY, number integer CHECK (number >= 0), payload jsonb, day date, "
        "owner uuid, tags integer[], UNIQUE (number) DEFERRABLE INITIALLY DEFERRED)"
    )
    return books


def good(count: int) -> list[tuple[Any, ...]]:
    return [
        (f"good-{number:05}", str(number), f'{{"n": {number}}}', "2024-02-29", OWNER, [[1, 2], [3, None]])
        for number in range(count)
    ]


def bad() -> list[tuple[Any, ...]]:
    names = [*TYPES, "tags"]
    rows = []
    for column, values in BAD.items():
        for number, value in enumerate(values):
            row = dict(zip(names, ("1000000", "{}", "2024-01-01", OWNER, None), strict=True)) | {column: value}
            rows.append((f"good-{7 * len(rows):05}-{column}-{number}", *row.values()))
    return rows


def counts(report: BulkLoadReport) -> tuple[int, int, int]:
    return report.read, report.rejected, report.applied


@pytest.mark.parametrize("writer", WRITERS)
def test_values_that_postgres_refuses(spark: "SparkSession", typed: Books, schema_url: str, writer: str) -> None:
    rows = good(300) + bad()

    report = load(
        frame(spark, rows, COLUMNS),
        schema_url,
        writer,
        apply=APPLY,
        column_types=TYPES,
        rejected_to="table:refused",
    )

    assert counts(report) == (len(rows), len(bad()), 300)
    assert typed.rows("SELECT event_id FROM typed ORDER BY 1") == [(row[0],) for row in good(300)]
    assert typed.inbox() == [row[0] for row in good(300)]
    kept = typed.rows("SELECT message_id, column_name, value, event FROM refused ORDER BY 1")
    expected = sorted((row[0], row[0].split("-")[2], row) for row in bad())
    assert [(one[0], one[1]) for one in kept] == [(one[0], one[1]) for one in expected]
    for (_, column, value, event), (_, _, row) in zip(kept, expected, strict=True):
        whole = dict(zip(["event_id", *TYPES, "tags"], row, strict=True))
        if whole["tags"] is not None:
            whole["tags"] = '{{"1"},{"2","3"}}'  # as it is sent
        assert value == whole[column]
        assert json.loads(event) == whole
    assert sum(one.rows for one in report.rejected_causes) == len(bad())
    assert {one.column for one in report.rejected_causes} == set(BAD)


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_events_that_break_a_constraint(
    spark: "SparkSession", typed: Books, schema_url: str, writer: str, tmp_path: Path
) -> None:
    """All of them are in the folder, beside the rows that cannot be read; and are loaded when the cause is gone."""
    broken = {"good-00007": "-1", "good-00150": "-2", "good-00299": "5"}
    rows = [(one, broken.get(one, number), *others) for one, number, *others in good(300)]
    rows += [(None, "1", "{}", "2024-01-01", OWNER, None)] * 2
    asked = {"apply": APPLY, "column_types": TYPES, "rejected_to": str(tmp_path / "rejected")}

    report = load(frame(spark, rows, COLUMNS), schema_url, writer, **asked)

    assert counts(report) == (302, 5, 297)
    assert report.rejected_to == asked["rejected_to"]
    assert [(one.rows, one.cause) for one in report.rejected_causes[:1]] == [(2, "no message id")]
    said = " ".join(one.cause for one in report.rejected_causes)
    assert "typed_number_check" in said
    assert "typed_number_key" in said
    kept = [
        json.loads(line)
        for file in (tmp_path / "rejected" / f"run={report.run_id}").glob("*.json")
        for line in file.read_text().splitlines()
    ]
    # Of two events with one number, the first is taken; which one that is, the order of their ids says.
    refused = {one["message_id"] for one in kept if "message_id" in one}
    assert refused == {"good-00007", "good-00150", "good-00299"}
    assert len(kept) == 5
    assert all(json.loads(one["event"])["owner"] == OWNER for one in kept)
    assert typed.inbox() == [row[0] for row in good(300) if row[0] not in refused]
    assert (
        typed.rows("SELECT FROM pg_class WHERE relname ~ 'staging' AND relnamespace = current_schema()::regnamespace")
        == []
    )

    typed.run("ALTER TABLE typed DROP CONSTRAINT typed_number_check, DROP CONSTRAINT typed_number_key")
    again = load(frame(spark, rows, COLUMNS), schema_url, writer, **asked)
    assert (again.rejected, again.already_processed, again.applied) == (2, 297, 3)


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_more_rows_are_rejected_than_may_be(spark: "SparkSession", typed: Books, schema_url: str, writer: str) -> None:
    asked = {"apply": APPLY, "column_types": TYPES}
    unread = frame(spark, [*good(98), *[(None, "1", "{}", "2024-01-01", OWNER, None)] * 3], COLUMNS)
    with pytest.raises(TooManyRejected, match="3 rows are rejected, more than the 2 that may be"):
        load(unread, schema_url, writer, max_rejected="2%", **asked)
    assert (typed.inbox(), typed.rows("SELECT FROM bulk_load")) == ([], [])
    assert load(unread, schema_url, writer, max_rejected="3%", **asked).rejected == 3

    refused = frame(spark, [(f"more-{one}", "x", "{}", "2024-01-01", OWNER, None) for one in range(3)], COLUMNS)
    failed(refused, schema_url, writer, "3 rows are rejected, more than the 2", max_rejected=2, **asked)
    assert load(refused, schema_url, writer, max_rejected=3, **asked).rejected == 3


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_a_run_that_is_resumed_keeps_each_rejected_row_once(
    spark: "SparkSession", typed: Books, schema_url: str, writer: str
) -> None:
    """Its first attempt ends in the middle, at an event that fails the load."""
    rows = [*good(400), *bad(), (None, "1", "{}", "2024-01-01", OWNER, None)]
    typed.run("INSERT INTO forbidden VALUES ('good-00390')")
    guarded = (
        f"{APPLY}; DO $$ BEGIN IF EXISTS (SELECT FROM fresh_event JOIN forbidden USING (event_id)) "
        "THEN RAISE 'this one is forbidden'; END IF; END $$"
    )
    asked = {"apply": guarded, "column_types": TYPES, "rejected_to": "table:kept", "lock_seconds": 0.001}
    events = frame(spark, rows, COLUMNS)
    error = failed(events, schema_url, writer, "forbidden", parallelism=1, **asked)
    typed.run("DELETE FROM forbidden")
    report = load(events, schema_url, writer, resume=error.run_id, **asked)
    assert counts(report) == (len(rows), len(bad()) + 1, 400)
    kept = typed.rows("SELECT message_id FROM kept WHERE run_id = %s", report.run_id)
    assert sorted(str(one) for (one,) in kept) == sorted(["None", *(row[0] for row in bad())])
    assert typed.inbox() == [row[0] for row in good(400)]


@pytest.mark.parametrize("writer", COPY_FIRST)
@pytest.mark.parametrize("limits", [("90%", "90%"), (None, "90%"), ("90%", None)])
def test_a_run_with_a_limit_is_resumed(
    spark: "SparkSession", typed: Books, schema_url: str, writer: str, limits: tuple[str | None, str | None]
) -> None:
    """Rows with an id are rejected for what they tell alone, whether the survey has counted them or not."""
    rows = [*good(200), ("nul", "1", "\0", "2024-01-01", OWNER, None), (None, "1", "{}", "2024-01-01", OWNER, None)]
    events, first, then = frame(spark, rows, COLUMNS), *limits
    asked = {"column_types": TYPES, "rejected_to": "table:kept"}
    error = failed(
        events, schema_url, writer, "no_table", apply=f"{APPLY}; TABLE no_table", max_rejected=first, **asked
    )
    known = typed.rows("SELECT rows_rejected FROM bulk_load")
    assert known == [(2 if writer == "jdbc" else None,)], "of writer copy, its chunks count them"
    report = load(events, schema_url, writer, resume=error.run_id, apply=APPLY, max_rejected=then, **asked)
    assert (report.attempts, *counts(report)) == (2, 202, 2, 200)
    assert typed.rows("SELECT message_id FROM kept ORDER BY 1") == [("nul",), (None,)]


@pytest.mark.slow
def test_other_types_do_not_resume_a_run_of_staged_events(spark: "SparkSession", typed: Books, schema_url: str) -> None:
    r"""``\\u0000`` is text that json takes, and jsonb does not."""
    rows = [*good(3), ("escaped", "9", r'"\u0000"', "2024-01-01", OWNER, None)]
    events = frame(spark, rows, COLUMNS)
    error = failed(
        events, schema_url, "jdbc", "no_table", apply="TABLE no_table", column_types={**TYPES, "payload": "json"}
    )
    with pytest.raises(InvalidConfiguration, match=r"without 0 rows .* now 1 cannot; resume it with the same fields"):
        load(events, schema_url, "jdbc", resume=error.run_id, apply=APPLY, column_types=TYPES)
    assert typed.inbox() == []


def test_few_new_events_that_are_refused(spark: "SparkSession", typed: Books, schema_url: str) -> None:
    """Where nearly all ids are known, events are picked out of the source by the others."""
    typed.record(row[0] for row in good(300))
    rows = [*good(300), *bad()[:2]]
    report = load(frame(spark, rows, COLUMNS), schema_url, "copy", apply=APPLY, column_types=TYPES)
    assert (report.read, report.rejected, report.already_processed, report.applied) == (302, 2, 300, 0)


def test_fields_are_judged_the_same_in_spark(
    spark: "SparkSession", typed: Books, schema_url: str, tmp_path: Path
) -> None:
    """A cause names the field, and the value if all rows have the same."""
    effect = tmp_path / "effect.sql"
    effect.write_text("INSERT INTO typed (event_id, number) SELECT message_id, number FROM fresh_event")
    rows = [*good(20), *[(f"na-{one}", "NA", "{}", "2024-01-01", OWNER, None) for one in range(30)]]
    report = load(frame(spark, rows, COLUMNS), schema_url, "copy", apply=SqlEffect(effect, fields="number integer"))
    (cause,) = report.rejected_causes
    assert (cause.cause, cause.column, cause.value, cause.rows) == ("field number: not integer", "number", "NA", 30)


def test_a_table_that_cannot_keep_rejected_rows(spark: "SparkSession", typed: Books, schema_url: str) -> None:
    events = frame(spark, good(3), COLUMNS)
    typed.run("CREATE TABLE other (run_id text)")
    for name, said in (("other", "chunk"), ("no_schema.refused", "no_schema"), ("a b", "a b")):
        with pytest.raises(InvalidConfiguration, match=said):
            load(events, schema_url, "copy", rejected_to=f"table:{name}", apply=APPLY, column_types=TYPES)
