"""Upserts, by a real Spark into real tables: wide, nested and dirty events, and tables that do not fit."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from support.spark.bulk_loads import SUBSCRIBER, Books, counts, frame, load
from txbox import InvalidConfiguration, RightsMissing
from txbox_spark import ApplyFailed, Upsert, inbox_sink, read_events

PURCHASE = """CREATE TABLE purchase (
  order_id text PRIMARY KEY, cents bigint NOT NULL, updated_at timestamptz, note text DEFAULT 'none')"""
COLUMNS = "event_id string, order_id string, cents long, updated_at timestamp"


def at(minute: int) -> datetime:
    return datetime(2026, 1, 31, 12, minute, tzinfo=UTC)


@pytest.mark.parametrize("writer", ["copy", "jdbc"])
def test_the_newest_of_each_key_is_there_however_often_it_is_loaded(
    spark: SparkSession, books: Books, schema_url: str, writer: str
) -> None:
    books.run(PURCHASE, "INSERT INTO purchase VALUES ('o-1', 1, '2026-01-31 12:30Z', 'kept'), ('o-2', 2, NULL, 'too')")
    events = [(f"e-{n:03}", f"o-{n % 7}", n, at(n * 37 % 60)) for n in range(350)]
    newest: dict[str, tuple[Any, ...]] = {}  # no two of a key have the same time
    for _, *row in sorted(events, key=lambda one: one[3]):
        if row[0] != "o-1" or row[2] > at(30):
            newest[row[0]] = tuple(row)
    upsert = Upsert("purchase", key="order_id", only_if_newer="updated_at")
    for applied in (350, 0):
        report = load(frame(spark, events, COLUMNS), schema_url, writer, apply=upsert)
        assert counts(report)["applied"] == applied
        found = books.rows("SELECT order_id, cents, updated_at FROM purchase ORDER BY order_id")
        assert found == sorted(newest.values())
        assert books.rows("SELECT note FROM purchase WHERE order_id IN ('o-1', 'o-2', 'o-5')") == [
            ("kept",), ("too",), ("none",)
        ]  # fmt: skip
    # What comes late is no newer.
    late = [("late", "o-3", -1, at(0)), ("unknown", "o-4", -2, None)]
    assert load(frame(spark, late, COLUMNS), schema_url, writer, apply=upsert).applied == 2
    assert books.rows("SELECT * FROM purchase WHERE cents < 0") == []


def test_without_a_time_the_greatest_message_id_of_a_transaction_wins(
    spark: SparkSession, books: Books, schema_url: str
) -> None:
    books.run(PURCHASE)
    events = [(f"e-{n:02}", f"o-{n % 3}", n, None) for n in range(30)]
    load(frame(spark, events, COLUMNS), schema_url, "copy", apply=Upsert("purchase"))
    assert books.rows("SELECT order_id, cents FROM purchase ORDER BY 1") == [("o-0", 27), ("o-1", 28), ("o-2", 29)]


def test_a_stream_upserts_too_and_a_column_that_is_ignored_is_not_written(
    spark: SparkSession, books: Books, schema_url: str
) -> None:
    books.run(PURCHASE, "ALTER TABLE purchase ADD event_id text")
    upsert = Upsert("purchase", only_if_newer="updated_at", ignore_columns=["cents_2"])
    sink = inbox_sink(url=schema_url, subscriber_id=SUBSCRIBER, message_id="event_id", apply=upsert)
    columns = f"{COLUMNS}, cents_2 long"
    for number, (event, minute) in enumerate([("e-1", 5), ("e-2", 9), ("e-3", 7)]):
        sink(frame(spark, [(event, "o", number, at(minute), 0)], columns), number)
    assert books.rows("SELECT order_id, cents, event_id FROM purchase") == [("o", 1, "e-2")]


@pytest.mark.parametrize("writer", ["copy", "jdbc"])
def test_sixty_columns_of_many_types_arrive_as_the_table_has_them(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path, writer: str
) -> None:
    types = {
        "uuid": "0e1f9bb6-2f3e-4f5a-9d6c-1b2a3c4d5e6f",
        "jsonb": '{"a": [1, null]}',
        "numeric(12,2)": "12.50",
        "timestamp with time zone": "2026-01-31T12:30:00+02:00",
        "date": "2026-01-31",
        "mood": "glad",
        '"Odd"."Mood %%"': "sad",
        "character varying(3)": "abc",
        "boolean": "true",
        "short_code": "xy",
        "inet": "10.0.0.1",
        "integer": "-7",
        "interval": "2 days",
    }
    named = [(f"Column {number}", type_) for number, type_ in enumerate([*types] * 5)]
    assert len(named) == 65
    books.run(
        "CREATE TYPE mood AS ENUM ('glad', 'sad')",
        'CREATE SCHEMA IF NOT EXISTS "Odd"',
        'DROP TYPE IF EXISTS "Odd"."Mood %%"',
        "CREATE TYPE \"Odd\".\"Mood %%\" AS ENUM ('glad', 'sad')",
        "CREATE DOMAIN short_code AS varchar(2)",
        "CREATE TABLE wide (id uuid PRIMARY KEY, " + ", ".join(f'"{name}" {type_}' for name, type_ in named) + ")",
    )
    ids = [f"0e1f9bb6-2f3e-4f5a-9d6c-{number:012x}" for number in range(120)]
    rows = [{"id": id_, **{name: types[type_] for name, type_ in named}} for id_ in ids]
    (file := tmp_path / "wide.jsonl").write_text("\n".join(map(json.dumps, rows)))
    try:
        report = load(read_events(spark, [str(file)]), schema_url, writer, apply=Upsert("wide"), message_id="id")
        assert counts(report)["applied"] == 120
        same = " AND ".join(f"\"{name}\" = '{types[type_]}'::{type_}" for name, type_ in named)
        assert books.rows(f"SELECT count(*) FROM wide WHERE {same}") == [(120,)]
    finally:
        books.run('DROP SCHEMA "Odd" CASCADE')


@pytest.mark.parametrize("writer", ["copy", "jdbc"])
def test_nested_events_are_jsonb_and_arrays(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path, writer: str
) -> None:
    books.run(
        "CREATE TABLE basket "
        "(id bigint PRIMARY KEY, customer jsonb, lines json, tags varchar(5)[], ids uuid[], n int[])"
    )
    uuid = "0e1f9bb6-2f3e-4f5a-9d6c-1b2a3c4d5e6f"
    row = {
        "id": 3,
        "customer": {"name": "Ada", "at": {"city": "Łódź"}},
        "lines": [{"sku": "a", "price": 1.5}, {"sku": None, "price": None}],
        "tags": ["a", "b,c", None],
        "ids": [uuid],
        "n": [1, 2],
    }
    (file := tmp_path / "basket.json").write_text(json.dumps(row))
    load(read_events(spark, [str(file)]), schema_url, writer, apply=Upsert("basket"), message_id="id")
    (found,) = books.rows("SELECT id, customer, lines, tags, ids::text[], n FROM basket")
    assert found == (3, row["customer"], row["lines"], row["tags"], [uuid], [1, 2])


def test_dirty_events_are_judged_by_fields_and_their_keys_by_the_tables_types(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path
) -> None:
    books.run("CREATE TABLE purse (id uuid UNIQUE, code varchar(3), cents numeric(6,2), seen timestamptz)")
    uuid = "0e1f9bb6-2f3e-4f5a-9d6c-1b2a3c4d5e6f"
    lines = [
        {"event": "1", "id": uuid, "cents": "12.345", "seen": "2026-01-31T12:00:00Z", "code": "abc"},
        {"event": "2", "id": uuid.upper().replace("-", ""), "cents": "13", "seen": "2026-01-31T13:00:00+02:00"},
        {"event": "3", "id": uuid, "cents": "twelve"},
        {"id": uuid},
        {"event": "5", "id": "\0"},
    ]
    text = "\n".join(map(json.dumps, lines)) + '\n{"event": "6", "id": \n{"event": "1"}\n'
    (file := tmp_path / "dirty.jsonl").write_text(text)
    fields = "id text, cents numeric, seen text, code text"
    upsert = Upsert("purse", key=["id"], only_if_newer="seen", fields=fields)
    events = read_events(spark, [str(file)], fields=upsert.typed_fields, message_id="event")
    report = load(events, schema_url, "copy", apply=upsert, message_id="event")
    assert counts(report) == {
        "read": 7, "rejected": 4, "duplicate_in_source": 1, "already_processed": 0, "applied": 2
    }  # fmt: skip
    found = books.rows("SELECT id::text, code, cents::text FROM purse")
    assert found == [(uuid, "abc", "12.35")], "12:00Z is newer than 13:00+02:00, though not as a text"
    # Nothing is cut off to fit.
    (long := tmp_path / "long.jsonl").write_text(json.dumps({"event": "9", "id": uuid, "code": "abcd"}))
    events = read_events(spark, [str(long)], fields=upsert.typed_fields, message_id="event")
    (cause,) = load(events, schema_url, "copy", apply=upsert, message_id="event").rejected_causes
    assert cause.cause == "refused by the effect: value too long for type character varying(3)"


def test_a_value_that_the_table_does_not_take_is_rejected(spark: SparkSession, books: Books, schema_url: str) -> None:
    books.run("CREATE TABLE code (id text PRIMARY KEY, short varchar(3))")
    events = frame(spark, [("a", "abc"), ("b", "secret")], "id string, short string")
    report = load(events, schema_url, "copy", apply=Upsert("code"), message_id="id")
    (cause,) = report.rejected_causes
    assert (cause.cause, cause.value) == (
        "column short: value too long for type character varying(3)",
        "secret",
    )
    assert books.rows("SELECT * FROM code") == [("a", "abc")]


@pytest.mark.parametrize(
    ("type_", "events", "values", "fields"),
    [
        ("numeric(10,2)", "decimal(12,4)", ("1.0010", "1.0040", "7.0000"), None),
        ("numeric(10,2)", "double", ("1.001", "1.004", "7.0"), None),
        ("numeric(10,2)", "string", ("1.001", "1.004", "7"), "numeric"),
        ("price", "string", ("1.001", "1.004", "7"), "numeric"),
        ("timestamptz(0)", "timestamp", ("2026-01-31 12:00:00.1", "2026-01-31 12:00:00.2", "2026-01-31 13:00"), None),
        ("citext", "string", ("a", "A", "b"), None),
        ("citext", "string", ("a", "A", "b"), "text"),
        ("mail", "string", ("a", "A", "b"), None),
        ("mail", "string", ("a", "A", "b"), "text"),
        ("char(3)", "string", ("a", "a ", "b"), "text"),
        ('text COLLATE "any case"', "string", ("a", "A", "b"), None),
        ('varchar(3) COLLATE "any case"', "string", ("a", "A", "b"), "text"),
    ],
)
def test_keys_are_compared_as_the_table_compares_them(
    spark: SparkSession,
    books: Books,
    schema_url: str,
    type_: str,
    events: str,
    values: tuple[str, str, str],
    fields: str | None,
) -> None:
    if "COLLATE" in type_:
        make_collation(books)
    books.run(
        "CREATE EXTENSION IF NOT EXISTS citext SCHEMA public",
        "CREATE DOMAIN mail AS public.citext",
        "CREATE DOMAIN price AS numeric(10,2)",
        f"CREATE TABLE kept (key {type_.replace('citext', 'public.citext')}, shop int, n int, PRIMARY KEY (shop, key))",
    )
    first, same, other = values
    rows = [("e-1", first, 1, 1), ("e-2", same, 1, 2), ("e-3", other, 1, 3), ("e-4", first, 2, 4)]
    texts = spark.createDataFrame(rows, "event_id string, key string, shop int, n int")
    typed = None if fields is None else f"key {fields}, shop integer, n integer"
    source = texts.withColumn("key", texts["key"].cast(events))
    report = load(source, schema_url, "copy", apply=Upsert("kept", only_if_newer="n", fields=typed))
    assert (report.applied, report.rejected) == (4, 0)
    assert books.rows("SELECT shop, n FROM kept ORDER BY n") == [(1, 2), (1, 3), (2, 4)]


def test_a_key_is_compared_as_its_own_index_compares_it(spark: SparkSession, books: Books, schema_url: str) -> None:
    make_collation(books)
    books.run(
        "CREATE TABLE kept (code text PRIMARY KEY, shop int NOT NULL, n int)",
        'CREATE UNIQUE INDEX ON kept (shop, code COLLATE "any case")',
    )
    columns = "event_id string, code string, shop int, n int"
    apart = [("e-1", "a", 1, 1), ("e-2", "A", 2, 2)]
    load(spark.createDataFrame(apart, columns), schema_url, "copy", apply=Upsert("kept"))
    assert books.rows("SELECT code FROM kept ORDER BY n") == [("a",), ("A",)]
    alike = [("e-3", "a", 1, 3), ("e-4", "A", 1, 4)]
    load(spark.createDataFrame(alike, columns), schema_url, "copy", apply=Upsert("kept", key=["code", "shop"]))
    assert books.rows("SELECT n FROM kept ORDER BY n") == [(2,), (4,)]


@pytest.mark.parametrize(("kept", "also"), [(5, ""), (3, "NULLS NOT DISTINCT ")])
def test_a_null_in_a_key_is_like_no_other_unless_the_key_says_so(
    spark: SparkSession, books: Books, schema_url: str, kept: int, also: str
) -> None:
    if also and books.rows("SHOW server_version_num") < [("150000",)]:
        pytest.skip("before PostgreSQL 15, nulls in a key always differ")
    books.run(f"CREATE TABLE kept (code text, shop int NOT NULL, n int, UNIQUE {also}(code, shop))")
    rows = [("e-1", None, 1, 1), ("e-2", None, 1, 2), ("e-3", None, 2, 3), ("e-4", None, 2, 4), ("e-5", "a", 1, 5)]
    events = spark.createDataFrame([*rows, ("e-6", "a", 1, 6)], "event_id string, code string, shop int, n int")
    assert load(events, schema_url, "copy", apply=Upsert("kept", key=["code", "shop"])).applied == 6
    found = books.rows("SELECT n FROM kept ORDER BY n")
    assert (len(found), found[-1]) == (kept, (6,))


def make_collation(books: Books) -> None:
    """Create a collation that tells no capitals from small letters; skip the test where the server has none."""
    try:
        books.run("CREATE COLLATION \"any case\" (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    except DBAPIError as error:
        pytest.skip(f"this server has no ICU, `make test-containers` starts one that has: {error.orig}")


def test_an_event_is_a_whole_row_and_what_it_lacks_is_null(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path
) -> None:
    books.run(
        "CREATE TABLE kept (id int PRIMARY KEY, note text DEFAULT 'none', n int, made text DEFAULT 'now')",
        "INSERT INTO kept VALUES (1, 'old', 0, 'before'), (2, 'old', 0, 'before')",
    )
    (file := tmp_path / "some.jsonl").write_text(
        '{"event_id": "1", "id": 1, "n": 1}\n{"event_id": "2", "id": 2, "note": "new"}\n{"event_id": "3", "id": 3}\n'
    )
    load(read_events(spark, [str(file)]), schema_url, "copy", apply=Upsert("kept"))
    assert books.rows("SELECT * FROM kept ORDER BY id") == [
        (1, None, 1, "before"), (2, "new", None, "before"), (3, None, None, "now")
    ]  # fmt: skip
    # A field that has to be there rejects the event, in place of writing null.
    required = Upsert("kept", fields="id integer, n integer, note text not null")
    events = read_events(spark, [str(file)], fields=required.typed_fields, message_id="event_id")
    books.run("TRUNCATE processed_message")
    report = load(events, schema_url, "copy", apply=required)
    assert (report.applied, report.rejected) == (1, 2)


def test_names_that_need_quotes_and_a_partitioned_table(spark: SparkSession, books: Books, schema_url: str) -> None:
    books.run(
        'CREATE TABLE "My.Orders %%" ("Order Id" text, "Größe" int, "1%%" text, PRIMARY KEY ("Größe", "Order Id")) '
        'PARTITION BY HASH ("Order Id")',
        'CREATE TABLE part_0 PARTITION OF "My.Orders %%" FOR VALUES WITH (MODULUS 2, REMAINDER 0)',
        'CREATE TABLE part_1 PARTITION OF "My.Orders %%" FOR VALUES WITH (MODULUS 2, REMAINDER 1)',
    )
    events = frame(spark, [(f"o{n}", n, "x") for n in range(40)], "`Order Id` string, `Größe` int, `1%` string")
    load(events, schema_url, "jdbc", apply=Upsert('"My.Orders %"'), message_id="Order Id")
    assert books.rows('SELECT count(*), sum("Größe"), min("1%%") FROM "My.Orders %%"') == [(40, 780, "x")]


TABLES = """
CREATE TABLE kept (id text PRIMARY KEY, cents bigint NOT NULL);
CREATE VIEW seen AS SELECT * FROM kept;
CREATE TABLE lazy (id text, cents bigint, UNIQUE (id) DEFERRABLE);
CREATE UNIQUE INDEX ON lazy (cents) WHERE cents > 0;
CREATE UNIQUE INDEX ON lazy (lower(id));
CREATE TABLE needy (id text PRIMARY KEY, cents bigint, shop text NOT NULL, made int NOT NULL DEFAULT 1);
CREATE TABLE made (id text PRIMARY KEY, cents bigint GENERATED ALWAYS AS IDENTITY);
CREATE TABLE pointed (id text PRIMARY KEY, cents point)"""


@pytest.mark.parametrize(
    ("table", "options", "error", "said"),
    [
        ("nowhere", {}, InvalidConfiguration, "there is no table nowhere"),
        ("a.b.c.d", {}, InvalidConfiguration, "'a.b.c.d' is not the name of a table"),
        ("seen", {}, InvalidConfiguration, "seen is a view"),
        ("lazy", {}, InvalidConfiguration, "no primary key that ON CONFLICT can take.*it has none"),
        ("lazy", {"key": "cents"}, InvalidConfiguration, r"no unique key on \(cents\)"),
        ("kept", {"only_if_newer": "updated_at"}, InvalidConfiguration, "has no column updated_at to tell"),
        ("needy", {}, InvalidConfiguration, "no column shop, which .*needy.* needs"),
        ("made", {}, InvalidConfiguration, "generates column cents by itself"),
        ("pointed", {}, ApplyFailed, r'column "cents" is of type point but expression is of type bigint'),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_anything_is_merged(
    spark: SparkSession,
    books: Books,
    schema_url: str,
    table: str,
    options: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    books.run(TABLES)
    events = frame(spark, [("a", 1)], "id string, cents long")
    with pytest.raises(error, match=said):
        load(events, schema_url, "copy", apply=Upsert(table, **options), message_id="id")
    assert books.rows("SELECT * FROM bulk_load") == []
    assert books.inbox(SUBSCRIBER) == []


def test_a_role_without_rights_is_told_which(engine: Engine, books: Books, schema_url: str) -> None:
    books.run("CREATE TABLE kept (id text PRIMARY KEY)", "GRANT SELECT ON kept TO PUBLIC")
    books.run("DROP ROLE IF EXISTS upsert_reader", "CREATE ROLE upsert_reader")
    try:
        with engine.connect() as connection:
            schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
            connection.exec_driver_sql(f'GRANT USAGE ON SCHEMA "{schema}" TO upsert_reader')
            connection.exec_driver_sql("SET LOCAL ROLE upsert_reader")
            with pytest.raises(RightsMissing, match=r"the right to INSERT, UPDATE on .*kept"):
                Upsert("kept").check(connection)
            connection.rollback()
    finally:
        books.run("DROP OWNED BY upsert_reader", "DROP ROLE upsert_reader")
