"""A dry run, by a real Spark and a real Postgres: it says what the load then does, and changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine

from support.spark.bulk_loads import APPLY, SUBSCRIBER, Books, frame, load, purchases
from support.txbox.horizon import LONG_AGO, forget, id_of
from txbox import DeadLetter, DeadLetters, InvalidConfiguration, Reason, SqlEffect
from txbox_spark import ApplyFailed, LoadPlan, Upsert, load_plan, plan_load, read_events

SENT = "event_id string, account_id int, amount bigint, made timestamp"
WIDE = 65


def planned(events: Any, url: str, writer: str = "copy", **changed: Any) -> LoadPlan:
    given = {"subscriber_id": SUBSCRIBER, "message_id": "event_id", "apply": APPLY, "chunk_rows": 100, **changed}
    return plan_load(events, url=url, writer=writer, **given)


def everything(books: Books) -> dict[str, Any]:
    """What is in every table of the schema, where every sequence is, and which relations there are."""
    tables = books.rows(
        "SELECT relname, relkind::text, relfilenode FROM pg_class "
        "WHERE relnamespace = current_schema()::regnamespace ORDER BY relname"
    )
    seen: dict[str, Any] = {"relations": tables}
    for name, kind, _ in tables:
        if kind == "r":
            seen[name] = sorted(books.rows(f'SELECT ctid::text, xmin::text, row::text FROM "{name}" AS row'))
        elif kind == "S":
            seen[name] = books.rows(f'SELECT last_value, is_called FROM "{name}"')
    seen["temporary"] = books.rows("SELECT relname FROM pg_class WHERE relpersistence = 't'")
    return seen


@pytest.mark.parametrize("writer", ["copy", "jdbc"])
def test_it_counts_what_the_load_then_counts_and_changes_nothing(
    spark: SparkSession, books: Books, engine: Engine, schema_url: str, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_plan, "BATCH_IDS", 37)
    books.run("CREATE TABLE numbered (n bigserial, id text)", "INSERT INTO numbered (id) VALUES ('before')")
    events = [(*one, None) for one in purchases(250)]
    books.record([one[0] for one in events[:40]])
    books.record(["forgotten", "zz: in no source", "\U0010ffff"])
    forget(engine, "forgotten")
    letters = DeadLetters(engine)
    for parked in (events[41][0], "parked, and in no source"):
        letters.park(DeadLetter(SUBSCRIBER, str(parked), Reason.FAILED, "no", 1, "queue", b""))
    events += [
        ("forgotten", 1, 1, LONG_AGO),
        (id_of(LONG_AGO), 1, 1, None),
        *events[:9],
        (None, 1, 1, None),
        ("", 1, 1, None),
    ]
    source = frame(spark, events, SENT)
    apply = f"{APPLY}; INSERT INTO numbered (id) SELECT event_id FROM fresh_event WHERE nextval('numbered_n_seq') > 0"
    before = everything(books)
    plan = planned(source, schema_url, writer, apply=apply, sent_at="made")
    assert everything(books) == before
    assert (plan.read, plan.rejected, plan.duplicate_in_source, plan.already_processed) == (263, 2, 9, 40)
    assert (plan.parked, plan.expired, plan.to_apply) == (1, 2, 209)
    assert sum(one.rows for one in plan.rejected_causes) == 2
    assert [one.statement.split()[0] for one in plan.statements] == ["INSERT", "UPDATE", "INSERT"]
    assert all(one.plan and "on " in one.plan[0] for one in plan.statements)

    report = load(source, schema_url, writer, apply=apply, sent_at="made")
    told = plan.as_dict()
    done = report.as_dict()
    done["to_apply"] = done.pop("applied")
    assert set(told) - set(done) == {"statements"}
    assert [name for name in told if name in done and sorted([told[name]]) != sorted([done[name]])] == []
    again = planned(source, schema_url, writer, apply=apply, sent_at="made")
    assert (again.to_apply, again.already_processed) == (0, 249)


def test_the_statement_of_an_upsert_into_a_wide_table_is_shown_and_explained(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path
) -> None:
    names = [f"c{number}" for number in range(WIDE)]
    books.run(f"CREATE TABLE wide (id uuid PRIMARY KEY, {', '.join(f'{name} numeric(6,2)' for name in names)})")
    row = {"id": "0e1f9bb6-2f3e-4f5a-9d6c-1b2a3c4d5e6f", **dict.fromkeys(names, "1.50")}
    (file := tmp_path / "wide.jsonl").write_text(json.dumps(row))
    before = everything(books)
    plan = planned(read_events(spark, [str(file)]), schema_url, message_id="id", apply=Upsert("wide"), writer="auto")
    assert everything(books) == before
    (one,) = plan.statements
    assert f'"c{WIDE - 1}" = excluded."c{WIDE - 1}"' in one.statement
    assert one.plan is not None
    assert "  Conflict Arbiter Indexes: wide_pkey" in one.plan
    assert (plan.to_apply, plan.chunks, plan.writer_reason) == (1, 1, "few events are merged without the executors")


def test_nested_and_dirty_events_are_judged_by_the_fields_of_the_effect(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path
) -> None:
    effect = SqlEffect.of(
        "INSERT INTO effect SELECT message_id, account, cents FROM fresh_event",
        fields="account integer at /customer/account not null, cents bigint",
    )
    lines = [
        '{"event_id": "a", "customer": {"account": 1}, "cents": 5}',
        '{"event_id": "b", "customer": {"account": "one"}, "cents": 5}',
        '{"event_id": "c", "customer": {}, "cents": 5}',
        '{"event_id": "d", "customer": {"account": 1}, "cents": ',
        '{"event_id": "a", "customer": {"account": 1}, "cents": 5}',
    ]
    (file := tmp_path / "dirty.jsonl").write_text("\n".join(lines))
    events = read_events(spark, [str(file)], fields=effect.fields, message_id="event_id")
    plan = planned(events, schema_url, apply=effect)
    assert (plan.read, plan.rejected, plan.duplicate_in_source, plan.to_apply) == (5, 3, 1, 1)
    assert "field account: not integer" in str(plan.rejected_causes)
    assert "no value, and it is required" in str(plan.rejected_causes)


@pytest.mark.parametrize(
    ("apply", "said"),
    [
        ("SELECT 1 FROM fresh_event;\n\nSELECT ,", r"syntax error.*\(line 3 of the statements\)"),
        ("SELECT '$txbox$ 5%' FROM fresh_event;\n\nDO $txbox$ $txbox$; LOCK\nTABEL x", r"syntax error.*\(line 4 of"),
        ("SELECT 1 FROM fresh_event;\n\nSELEC\n2", r"syntax error.*\(line 3 of the statements\)"),
        ("INSERT INTO effect\nSELECT event_id, account, 1 FROM fresh_event", r'column "account" does not.*\(line 2 of'),
        ("SELECT FROM fresh_event; DELETE FROM no_such", 'relation "no_such" does not exist'),
    ],
)
def test_statements_that_cannot_work_come_out(
    spark: SparkSession, books: Books, schema_url: str, apply: str, said: str
) -> None:
    before = everything(books)
    with pytest.raises(ApplyFailed, match=said):
        planned(frame(spark, purchases(3)), schema_url, apply=apply)
    assert everything(books) == before


def test_what_postgres_does_not_explain_is_said(spark: SparkSession, books: Books, schema_url: str) -> None:
    apply = (
        "SELECT '50%' FROM fresh_event; CREATE TEMPORARY TABLE one AS SELECT * FROM fresh_event;\n"
        "INSERT INTO effect SELECT * FROM one"
    )
    before = everything(books)
    plan = planned(frame(spark, purchases(3)), schema_url, apply=apply)
    assert everything(books) == before
    assert [one.plan is None for one in plan.statements] == [False, True, True]


def test_a_callable_is_not_run_and_a_function_of_the_server_writes_nothing(
    spark: SparkSession, books: Books, schema_url: str
) -> None:
    def fail(_: object) -> None:
        raise AssertionError

    assert planned(frame(spark, purchases(3)), schema_url, apply=fail).statements == ()
    # The planner runs a function that calls itself stable; this one gets others to write.
    books.run(
        "CREATE FUNCTION writes() RETURNS int LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO account VALUES (-1, 1); RETURN 1; END $$",
        "CREATE FUNCTION sly() RETURNS int LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN writes(); END $$",
        "ANALYZE account",
    )
    apply = "SELECT FROM fresh_event JOIN account USING (account_id) WHERE account_id < sly()"
    before = everything(books)
    with pytest.raises(ApplyFailed, match="cannot execute INSERT in a read-only transaction"):
        planned(frame(spark, purchases(3)), schema_url, apply=apply)
    assert everything(books) == before


def test_the_errors_name_what_was_called(spark: SparkSession, books: Books, schema_url: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"^plan_load: writer must be one of"):
        planned(frame(spark, purchases(3)), schema_url, writer="fax")
    options: dict[str, Any] = {"resume": "0123456789ab"}
    with pytest.raises(TypeError, match="resume"):
        planned(frame(spark, purchases(3)), schema_url, **options)
