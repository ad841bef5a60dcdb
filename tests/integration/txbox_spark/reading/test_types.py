"""Every type, there and unchanged: what ``fresh_event`` holds against the same values written by psycopg."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import Engine

from support.spark.bulk_loads import SUBSCRIBER, WRITERS, Books
from support.spark.typed_values import TEXTS, TYPED
from txbox import InvalidConfiguration
from txbox_spark import bulk_load

KEEP = "CREATE TABLE loaded AS TABLE fresh_event"

FORMAT = "format"
ROADS = (*WRITERS, FORMAT)
"""The writers of a bulk load, and the data source: what arrives is the same by all of them."""


def keep(
    events: DataFrame, url: str, road: str, message_id: str = "event_id", types: dict[str, str] | None = None
) -> None:
    """Load events, and keep what ``fresh_event`` has."""
    if road != FORMAT:
        bulk_load(
            events, url=url, subscriber_id=SUBSCRIBER, message_id=message_id, apply=KEEP, writer=road,
            column_types=types,
        )  # fmt: skip
        return
    given = {"url": url, "subscriber": SUBSCRIBER, "message_id": message_id, "apply": KEEP}
    if types:
        given["types"] = ", ".join(f"{name}={type_}" for name, type_ in types.items())
    events.coalesce(1).write.format("txbox").mode("append").options(**given).save()


@contextmanager
def session_zone(spark: SparkSession, zone: str) -> Iterator[None]:
    """Set Spark's time zone and that of the JVM, which the JDBC driver goes by."""
    zones: Any = spark._jvm.java.util.TimeZone
    before, session = zones.getDefault(), spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    zones.setDefault(zones.getTimeZone(zone))
    try:
        yield
    finally:
        zones.setDefault(before)
        spark.conf.set("spark.sql.session.timeZone", session)


def columns_of(engine: Engine, table: str) -> dict[str, str]:
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = %s::regclass AND attnum > 0 ORDER BY attnum",
            (table,),
        )
        return dict(map(tuple, found))


def shown(engine: Engine, table: str) -> dict[str, dict[str, str | None]]:
    """The rows of a table by id, each value as Postgres writes it, whose text tells 0.1 from 0.10 and 0 from -0."""
    with engine.connect() as connection:
        connection.exec_driver_sql("SET timezone = 'UTC'")
        raw: Any = connection.connection.driver_connection
        names = list(columns_of(engine, table))
        query = sql.SQL("SELECT {} FROM {}").format(
            sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in names),
            sql.Identifier(table),
        )
        rows = [dict(zip(names, row, strict=True)) for row in raw.execute(query)]
    assert len({row["event_id"] for row in rows}) == len(rows)
    return {str(row["event_id"]): row for row in rows}


def write_expected(engine: Engine, types: dict[str, str], rows: list[dict[str, Any]]) -> None:
    with engine.begin() as connection:
        raw: Any = connection.connection.driver_connection
        defined = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_)) for name, type_ in types.items()
        )
        raw.execute(sql.SQL("CREATE TABLE expected ({})").format(defined))
        for row in rows:
            query = sql.SQL("INSERT INTO expected ({}) VALUES ({})").format(
                sql.SQL(", ").join(map(sql.Identifier, row)), sql.SQL(", ").join(sql.Placeholder() * len(row))
            )
            raw.execute(query, list(row.values()))


def require_unchanged(engine: Engine) -> None:
    loaded, expected = shown(engine, "loaded"), shown(engine, "expected")
    assert loaded.keys() == expected.keys()
    differing = {
        (key, name): (loaded[key][name], value)
        for key, row in expected.items()
        for name, value in row.items()
        if loaded[key][name] != value
    }
    assert differing == {}


@pytest.fixture
def through_parquet(tmp_path: Path) -> Callable[[DataFrame], DataFrame]:
    """Write a DataFrame to a file, lest Spark works its values out beforehand, and read it."""

    def through(frame: DataFrame) -> DataFrame:
        path = str(tmp_path / "events.parquet")
        frame.coalesce(1).write.parquet(path)
        return frame.sparkSession.read.parquet(path)

    return through


@pytest.mark.parametrize("zone", [pytest.param("UTC", marks=pytest.mark.slow), "America/New_York", "Pacific/Apia"])
@pytest.mark.parametrize("road", ROADS)
def test_values(
    spark: SparkSession,
    engine: Engine,
    schema_url: str,
    through_parquet: Callable[[DataFrame], DataFrame],
    road: str,
    zone: str,
) -> None:
    selects, expected = [], []
    for number in range(max(len(column.values) for column in TYPED) + 1):
        chosen = [(column, *(column.values[number:] or ((None, None),))[0]) for column in TYPED]
        values = [f"CAST({value or 'NULL'} AS {column.spark}) AS {column.name}" for column, value, _ in chosen]
        selects.append(f"SELECT 'row {number}' AS event_id, {', '.join(values)}")
        expected.append({"event_id": f"row {number}", **{column.name: value for column, _, value in chosen}})
    with session_zone(spark, zone):
        events = through_parquet(spark.sql(" UNION ALL ".join(selects)))
        keep(events, schema_url, road)
    types = {column.name: column.postgres for column in TYPED}
    assert columns_of(engine, "loaded") == {"message_id": "text", "event_id": "text", **types}
    write_expected(engine, {"event_id": "text", **types}, expected)
    require_unchanged(engine)


@pytest.mark.parametrize("road", ROADS)
def test_texts(
    spark: SparkSession,
    engine: Engine,
    schema_url: str,
    through_parquet: Callable[[DataFrame], DataFrame],
    road: str,
) -> None:
    odd = [*TEXTS, None, "NULL"]
    rows: list[tuple[Any, ...]] = [
        (f"{one} {number}", one, None, [one, None, one], {"k": one}, (one,)) for number, one in enumerate(TEXTS)
    ]
    rows += [("all", None, "x", odd, {str(one): one for one in TEXTS}, None), ("none", None, None, None, None, None)]
    events = spark.createDataFrame(
        rows,
        "event_id string, said string, maybe string, "
        "list array<string>, map map<string, string>, struct struct<a: string>",
    )
    keep(through_parquet(events), schema_url, road)
    types = {
        "event_id": "text", "said": "text", "maybe": "text", "list": "text[]", "map": "jsonb", "struct": "jsonb"
    }  # fmt: skip
    from psycopg.types.json import Jsonb

    write_expected(
        engine,
        types,
        [
            {
                **dict(zip(types, row[:4], strict=False)),
                "map": None if row[4] is None else Jsonb(row[4]),
                "struct": None if row[5] is None else Jsonb({"a": row[5][0]}),
            }
            for row in rows
        ],
    )
    require_unchanged(engine)


# Column, Postgres's type, and values as text, which Postgres reads.
DECLARED = (
    ("order_id", "uuid", "5f0c3f0e-7f5e-4f0a-9d57-0b3d1f3c9f11"),
    ("event_id", "text", "e1"),
    ("payload", "jsonb", r'{"a": "\\u0000 100 % \"x\"", "b": [1, null]}'),
    ("raw", "json", r'{"b": 1,  "a": "\u0000", "b": 2}'),
    ("address", "inet", "2001:db8::1/64"),
    ("labels", "text[]", r'{"a,b",NULL,"\"q\"",""}'),
    ("amount", "numeric", "123456789012345678901234567890123456789012345678901234567890.0010"),
    ("short", "varchar(3)", "abc"),
    ("at", "timestamp with time zone", "infinity"),
    ("during", "tstzrange", "[2026-01-01 00:00:00+00,2026-02-01 00:00:00+00)"),
    ("ids", "uuid[]", "{5f0c3f0e-7f5e-4f0a-9d57-0b3d1f3c9f11,NULL}"),
)


# The same of columns that are no text: Spark's expression, Postgres's type, and what arrives.
DECLARED_OF_OTHERS = (
    ("tags", "array('a', NULL, 'b\"')", "jsonb", '["a", null, "b\\""]'),
    ("kept", "named_struct('a', NULL)", "json", '{"a":null}'),
    ("number", "7", "jsonb", "7"),
    ("owners", "array('5f0c3f0e-7f5e-4f0a-9d57-0b3d1f3c9f11')", "uuid[]", "{5f0c3f0e-7f5e-4f0a-9d57-0b3d1f3c9f11}"),
    ("said", "TIMESTAMP'2026-01-01 00:00:00.5Z'", "text", "2026-01-01 00:00:00.5Z"),
)


@pytest.mark.parametrize("road", ROADS)
def test_declared_types(spark: SparkSession, engine: Engine, schema_url: str, road: str) -> None:
    names = [name for name, *_ in DECLARED]
    rows = [tuple(value for *_, value in DECLARED), tuple("e2" if name == "event_id" else None for name in names)]
    events = spark.createDataFrame(rows, ", ".join(f"{name} string" for name in names)).repartition(2)
    events = events.selectExpr("*", *(f"{value} AS {name}" for name, value, *_ in DECLARED_OF_OTHERS))
    others = {name: type_ for name, _, type_, _ in DECLARED_OF_OTHERS}
    types = {name: type_ for name, type_, _ in DECLARED} | others
    keep(events, schema_url, road, types={name: type_ for name, type_ in types.items() if name != "event_id"})
    found = columns_of(engine, "loaded")
    assert found.pop("message_id") == "text"
    assert found == {**types, "short": "character varying(3)"}
    arrived = {name: value for name, *_, value in DECLARED_OF_OTHERS}
    write_expected(engine, types, [dict(zip(names, row, strict=True)) | arrived for row in rows])
    require_unchanged(engine)


@pytest.mark.parametrize("road", ROADS)
def test_an_id_of_a_declared_type(spark: SparkSession, engine: Engine, schema_url: str, road: str) -> None:
    one = "5F0C3F0E-7f5e-4f0a-9d57-0b3d1f3c9f11"
    events = spark.createDataFrame([(one,)], "order_id string")
    keep(events, schema_url, road, message_id="order_id", types={"order_id": "uuid"})
    assert columns_of(engine, "loaded") == {"message_id": "text", "order_id": "uuid"}
    with engine.connect() as connection:
        assert [tuple(row) for row in connection.exec_driver_sql("SELECT message_id, order_id::text FROM loaded")] == [
            (one, one.lower())
        ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("INTERVAL '1' DAY", "column 'odd' is of type interval day, which has no counterpart in Postgres; cast it"),
        ("INTERVAL '1' MONTH", "is of type interval month"),
        ("array(INTERVAL '1' DAY)", "is of type interval day"),
    ],
)
def test_types_without_a_counterpart(
    spark: SparkSession, engine: Engine, schema_url: str, value: str, said: str
) -> None:
    books = Books(engine)
    events = spark.sql(f"SELECT 'e1' AS event_id, {value} AS odd")
    with pytest.raises(InvalidConfiguration, match=said):
        bulk_load(events, url=schema_url, subscriber_id=SUBSCRIBER, message_id="event_id", apply=KEEP, writer="copy")
    assert books.inbox() == []


@pytest.mark.parametrize("declared", ["text; DROP TABLE effect", "text)", "", "int -- x", "numeric(%s)", '"odd"'])
def test_declarations_that_are_no_types(spark: SparkSession, schema_url: str, declared: str) -> None:
    events = spark.sql("SELECT 'e1' AS event_id, 'x' AS said")
    with pytest.raises(InvalidConfiguration, match=r"column 'said': .* is not the name of a Postgres type"):
        bulk_load(
            events, url=schema_url, subscriber_id=SUBSCRIBER, message_id="event_id", apply=KEEP, writer="copy",
            column_types={"said": declared},
        )  # fmt: skip
    with pytest.raises(InvalidConfiguration, match="column_types names 'sayd', which is no column of the events"):
        bulk_load(
            events, url=schema_url, subscriber_id=SUBSCRIBER, message_id="event_id", apply=KEEP, writer="copy",
            column_types={"sayd": "text"},
        )  # fmt: skip
