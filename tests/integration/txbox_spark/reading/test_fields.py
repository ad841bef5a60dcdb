"""The fields of a ``SqlEffect``: Spark reads the same values as a worker, and rejects what a worker parks."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from support.aws.lambda_events import NOTHING, Context, event, record
from support.effects import FIELDS, GOOD, HALF_A_PAIR, MALFORMED, MORE_THAN_ONE
from support.spark.bulk_loads import COPY_FIRST
from support.workers.memory_worker import work_off
from txbox import Inbox, InvalidConfiguration, Message, Outbox, SqlEffect
from txbox.effects.fields import read_fields
from txbox_aws.lambda_ import sqs_handler
from txbox_spark import bulk_load, read_events
from txbox_workers.memory_source import MemorySource

EVENTS = """CREATE TABLE event (message_id text, customer_id text, cents bigint, small smallint, price numeric(6,2),
ratio double precision, paid boolean, day date, at timestamptz, local timestamp, ref uuid, details jsonb, currency text,
free numeric)"""
APPLY = "INSERT INTO event SELECT * FROM fresh_event"


def with_id(body: str, message_id: str) -> str:
    """A body with an id in front, if it is an object."""
    first = f'{{"id": "{message_id}"{"" if body == "{}" else ","} '
    return body.replace("{", first, 1) if body.lstrip().startswith("{") else body


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_a_load_applies_and_rejects_what_a_worker_applies_and_parks(
    spark: Any, engine: Engine, schema_url: str, tmp_path: Path, writer: str
) -> None:
    good = {f"good-{number}": with_id(body, f"good-{number}") for number, (body, _) in enumerate(GOOD)}
    bad = {f"bad-{number}": with_id(body, f"bad-{number}") for number, body in enumerate(MALFORMED) if body}
    with engine.begin() as connection:
        connection.exec_driver_sql(EVENTS)
        connection.exec_driver_sql("CREATE TABLE by_worker (LIKE event)")
    fields = read_fields(FIELDS)
    sent = [Message(id_, body.encode()) for id_, body in {**good, **bad}.items()]
    effect = SqlEffect.of("INSERT INTO by_worker SELECT * FROM fresh_event", fields=fields)
    work_off(MemorySource(sent, batch_size=50), engine, effect=effect, inbox=Inbox("worker"))

    # In a file of its own: where a line has half of a pair, Spark reads numbers as floating-point ones.
    half = with_id(HALF_A_PAIR, f"bad-{MALFORMED.index(HALF_A_PAIR)}")
    applied = rejected = 0
    refused = {with_id(body, f"bad-{MALFORMED.index(body)}") for body in MORE_THAN_ONE}
    for name, lines in (("events", {*good.values(), *bad.values()} - {half} - refused), ("half", {half})):
        (file := tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        report = bulk_load(
            read_events(spark, [str(file)], fields=fields, message_id="id"),
            url=schema_url,
            subscriber_id="load",
            message_id="id",
            apply=SqlEffect.of(APPLY, fields=fields),
            writer=writer,
        )
        applied, rejected = applied + report.applied, rejected + report.rejected
    with engine.connect() as connection:
        loaded, worked = (
            dict(connection.exec_driver_sql(f"SELECT message_id, {table}::text FROM {table}").fetchall())
            for table in ("event", "by_worker")
        )
        parked = set(connection.exec_driver_sql("SELECT message_id FROM dead_letter").scalars())
    assert set(loaded) - set(good) == set(), "no road applies these"
    assert loaded == worked
    assert set(worked) == set(good)
    assert parked == set(bad)
    assert (applied, rejected) == (len(good), len(bad) - len(refused))


PUBLISHING = """
INSERT INTO account SELECT customer_id, cents FROM fresh_event;
SELECT customer_id AS key, jsonb_build_object('of', message_id, 'cents', cents) AS body,
  jsonb_build_object('kind', 'billed') AS headers, interval '1 day' AS delay FROM fresh_event"""


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_a_load_publishes_what_a_worker_and_a_function_of_lambda_publish(
    spark: Any, engine: Engine, schema_url: str, tmp_path: Path, writer: str
) -> None:
    """One file, its fields, and an outbox: on each road the same messages, each once, whatever the batches are."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (customer_id text, cents bigint)")
    (file := tmp_path / "account.sql").write_text(PUBLISHING)
    fields = "customer_id text at /customer/id not null, cents bigint default 7"
    bodies = {f"m{number:02}": f'{{"id": "m{number:02}", "customer": {{"id": {number}}}}}' for number in range(30)}

    def effect(road: str) -> SqlEffect:
        return SqlEffect(file, fields=fields, outbox=Outbox(), destination=f"own:{road}")

    messages = [Message(id_, body.encode()) for id_, body in bodies.items()]
    work_off(MemorySource([*messages, *messages], batch_size=7), engine, effect=effect("w"), inbox=Inbox("w"))
    handle = sqs_handler(inbox=Inbox("f"), engine=engine, effect=effect("f"))
    for _ in range(2):
        assert handle(event(*(record(id_, body) for id_, body in bodies.items())), Context(30)) == NOTHING
    (events := tmp_path / "events.jsonl").write_text("\n".join([*bodies.values(), *bodies.values()]))
    for _ in range(2):
        bulk_load(
            read_events(spark, [str(events)], fields=effect("l").fields, message_id="id"),
            url=schema_url,
            subscriber_id="l",
            message_id="id",
            apply=effect("l"),
            writer=writer,
            chunk_rows=10,
        )
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT destination, key, headers, convert_from(body, 'utf8'), due_at > now() FROM outbox_message"
        ).fetchall()
        accounts = connection.exec_driver_sql("SELECT customer_id, sum(cents) FROM account GROUP BY 1").fetchall()
    assert {tuple(row) for row in accounts} == {(str(number), 3 * 7) for number in range(30)}
    by_road = {road: sorted(tuple(row[1:]) for row in rows if row[0] == f"own:{road}") for road in "wfl"}
    assert by_road["w"] == by_road["f"] == by_road["l"]
    assert [row[0] for row in by_road["l"]] == sorted(str(number) for number in range(30))


@pytest.mark.parametrize("road", ["bulk_load", "format"])
def test_columns_of_other_types_are_judged_by_their_text(
    spark: Any, engine: Engine, schema_url: str, road: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE kept (message_id text, cents smallint, at timestamptz, name text, tags jsonb)"
        )
    events = spark.sql(
        "SELECT * FROM VALUES "
        "('a', 1L, timestamp '2026-01-01 00:00:00Z', named_struct('first', 'x'), array('t', null)), "
        "('b', 70000L, null, null, null), ('c', null, null, named_struct('first', null), null) "
        "AS t (id, cents, at, who, tags)"
    )
    statements = "INSERT INTO kept SELECT * FROM fresh_event"
    fields = "cents smallint default 7, at timestamptz, name text at /who/first, tags jsonb"
    if road == "format":
        given = {"url": schema_url, "subscriber": "billing", "message_id": "id", "apply": statements, "sent_at": "at"}
        events.coalesce(1).write.format("txbox").mode("append").options(**given, fields=fields).save()
    else:
        effect = SqlEffect.of(statements, fields=fields)
        bulk_load(events, url=schema_url, subscriber_id="billing", message_id="id", apply=effect, sent_at="at")
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT message_id, cents, at IS NULL, name, tags::text FROM kept ORDER BY 1"
        ).fetchall()
        ledger = connection.exec_driver_sql(
            "SELECT rows_read, rows_rejected, rejected_sample::text FROM bulk_load"
        ).one()
    assert [tuple(row) for row in rows] == [("a", 1, False, "x", '["t", null]'), ("c", 7, True, None, None)]
    assert tuple(ledger)[:2] == (3, 1)
    assert "field cents: not smallint" in ledger[2]


@pytest.mark.parametrize(
    ("fields", "why"),
    [("amount bigint", "no column amount; they have id, cents"), ("a text at /cents/x", "no x in int")],
)
def test_a_field_that_the_events_lack_is_refused(spark: Any, schema_url: str, fields: str, why: str) -> None:
    events = spark.sql("SELECT 'a' AS id, 1 AS cents")
    effect = SqlEffect.of("SELECT FROM fresh_event", fields=fields)
    with pytest.raises(InvalidConfiguration, match=why):
        bulk_load(events, url=schema_url, subscriber_id="billing", message_id="id", apply=effect)


def test_an_id_may_be_made_of_columns_that_are_no_fields(
    spark: Any, engine: Engine, schema_url: str, tmp_path: Path
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE kept (message_id text, cents bigint)")
    (file := tmp_path / "events.jsonl").write_text('{"order": 7, "line no": "1", "cents": 3}\n')
    effect = SqlEffect.of("INSERT INTO kept SELECT * FROM fresh_event", fields="cents bigint")
    message_id = "concat(order, '-of-', `line no`)"
    events = read_events(spark, [str(file)], fields=effect.fields, message_id=message_id)
    bulk_load(events, url=schema_url, subscriber_id="billing", message_id=message_id, apply=effect)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT * FROM kept").fetchall() == [("7-of-1", 3)]
