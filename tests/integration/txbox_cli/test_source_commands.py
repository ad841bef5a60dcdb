"""Events from tables and databases, through the commands, by a real Spark."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine, make_url

from support.program import PASSWORD, Ended
from support.spark.bulk_loads import APPLY, COLUMNS, Books, frame, purchases
from txbox_spark import read_source
from txbox_spark.runtime.jdbc import jdbc_options

Txbox = Callable[..., Ended]

EVENTS = purchases(300)
TWICE = [*EVENTS, *EVENTS[:10]]
WHAT = ("--subscriber", "billing", "--message-id", "event_id")

pytestmark = pytest.mark.usefixtures("same_spark")


@pytest.fixture
def effect(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "apply.sql"
    script.write_text(APPLY, encoding="utf-8")
    return ("--apply", str(script), "--chunk-rows", "100")


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A table in Spark's catalog."""
    spark.sql("CREATE DATABASE IF NOT EXISTS archive")
    frame(spark, TWICE).write.option("path", str(tmp_path / "archive")).saveAsTable("archive.purchases")
    yield "table:archive.purchases"
    spark.sql("DROP DATABASE archive CASCADE")


@pytest.fixture
def database(engine: Engine, schema_url: str) -> tuple[str, ...]:
    """A table in the test's own Postgres; the password is in the URL, as it should not be."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE purchase (event_id text, account_id int, amount bigint)")
        for row in TWICE:
            connection.exec_driver_sql("INSERT INTO purchase VALUES (%s, %s, %s)", row)
    options = jdbc_options(make_url(schema_url))
    url = f"{options['url']}&user={options['user']}&password={options['password']}"
    return ("--source", url, "--read-option", "dbtable=purchase")


def test_a_table_is_loaded_resumed_and_reconciled(
    txbox: Txbox, engine: Engine, spark: SparkSession, table: str, effect: tuple[str, ...]
) -> None:
    books = Books(engine)
    ended = txbox("bulk-load", "--source", table, *WHAT, *effect, "--json")
    assert ended.status == 0, ended.err
    report = json.loads(ended.out)
    assert (report["source"], report["read"], report["applied"]) == (table, 310, 300)
    books.require_applied(EVENTS)

    shown = txbox("loads", "show", report["run_id"])
    assert f"source:         {table}\n" in shown.out
    again = txbox("loads", "resume", report["run_id"], "--source", table, *WHAT, *effect, "--json")
    assert json.loads(again.out)["applied"] == 300, again.err
    assert json.loads(txbox("reconcile", "--source", table, *WHAT, "--json").out)["complete"] is True

    spark.sql("CREATE VIEW archive.other AS SELECT * FROM archive.purchases")
    other = txbox("loads", "resume", report["run_id"], "--source", "table:archive.other", *WHAT, *effect)
    other.failed_in_one_line(1, "this is not the same")
    spark.createDataFrame([("e", 1, 1)], COLUMNS).write.insertInto("archive.purchases")
    more = txbox("loads", "resume", report["run_id"], "--source", table, *WHAT, *effect)
    more.said(1, "have other message ids")
    assert txbox("reconcile", "--source", table, *WHAT).status == 1
    books.require_applied(EVENTS)


@pytest.mark.parametrize("writer", ["copy", pytest.param("jdbc", marks=pytest.mark.slow)])
def test_a_database_is_loaded_and_its_password_is_nowhere(
    txbox: Txbox,
    engine: Engine,
    schema_url: str,
    database: tuple[str, ...],
    effect: tuple[str, ...],
    writer: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    password = make_url(schema_url).password
    assert password
    books = Books(engine)
    ended = txbox("bulk-load", *database, *WHAT, *effect, "--writer", writer, "--json")
    assert ended.status == 0, ended.err
    report = json.loads(ended.out)
    assert (report["read"], report["duplicate_in_source"], report["applied"]) == (310, 10, 300)
    assert report["source"].endswith("&password=*** (dbtable=purchase)")
    books.require_applied(EVENTS)
    with engine.connect() as connection:
        kept = connection.exec_driver_sql("SELECT string_agg(run::text, ' ') FROM bulk_load AS run").scalar_one()
    shown = txbox("loads", "show", report["run_id"])
    reconciled = txbox("reconcile", *database, *WHAT)
    assert reconciled.status == 0, reconciled.err
    for text in (ended.out, ended.err, kept, shown.out, reconciled.out, reconciled.err, caplog.text):
        assert password not in text


def test_fields_of_the_effect_are_those_of_a_table(
    txbox: Txbox, engine: Engine, table: str, effect: tuple[str, ...]
) -> None:
    fields = "event_id text, account_id integer, amount bigint not null"
    given = ("bulk-load", "--source", table, *WHAT, *effect, "--fields", fields)
    txbox(*given, "--type", "amount=bigint").failed_in_one_line(2, "--fields of a --source are those of --apply")
    books = Books(engine)
    ended = txbox(*given, "--json")
    assert json.loads(ended.out)["applied"] == 300, ended.err
    books.require_applied(EVENTS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--source", "table:archive.nothing"), "cannot read table:archive.nothing: [TABLE_OR_VIEW_NOT_FOUND]"),
        (("--source", "delta:/tmp/none"), "spark.jars.packages=io.delta:delta-spark"),
        (("--source", "iceberg:lake.t"), "spark.jars.packages=org.apache.iceberg:iceberg-spark-runtime"),
        (
            ("--source", "jdbc:postgresql://127.0.0.1:1/d", "--read-option", "dbtable=t"),
            "Connection to 127.0.0.1:1 refused",
        ),
        (("--source", "jdbc:none://u:hunter2@h/d", "--read-option", "dbtable=t"), "No suitable driver"),
        (
            ("--source", "jdbc:postgresql://h:x/d?user=u&password=hunter2", "--read-option", "dbtable=t"),
            "cannot read jdbc:postgresql://h:x/d?user=u&password=*** (dbtable=t): Unable to parse URL",
        ),
    ],
)
def test_a_source_that_cannot_be_read_is_one_line(
    txbox: Txbox, engine: Engine, effect: tuple[str, ...], given: tuple[str, ...], said: str
) -> None:
    txbox("bulk-load", *given, *WHAT, *effect).failed_in_one_line(1, said)
    if PASSWORD in " ".join(given):  # nor may a traceback show it
        txbox("bulk-load", *given, *WHAT, *effect, "--debug").said(1, said)


def test_an_option_says_what_is_read(
    spark: SparkSession, table: str, schema_url: str, database: tuple[str, ...]
) -> None:
    options = jdbc_options(make_url(schema_url))
    url = options.pop("url")
    query = "SELECT event_id FROM purchase WHERE amount > 500000"
    events, source = read_source(spark, url, options={**options, "query": query})
    expected = {row[0] for row in TWICE if row[2] > 500_000}
    assert {row[0] for row in events.collect()} == expected
    assert source.description.endswith(f" (query={query})")
    whole = read_source(spark, url, options={**options, "dbtable": "purchase"})[1]
    narrow = read_source(spark, url, options={**options, "dbtable": "(SELECT event_id FROM purchase) AS p"})[1]
    faster = read_source(spark, url, options={**options, "dbtable": "purchase", "fetchsize": "10"})[1]
    assert len({source.digest, whole.digest, narrow.digest}) == 3
    assert faster == whole
