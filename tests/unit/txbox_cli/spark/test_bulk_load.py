"""The command bulk-load: what it refuses before Spark is started, and what it hands on."""

from pathlib import Path

import pytest

from support.spark.spark_commands import TABLE, URL, WHAT, Spark, Txbox
from txbox import SqlEffect
from txbox.effects import Upsert
from txbox.effects.fields import read_fields
from txbox_spark.reading.errors import InvalidFields


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*WHAT, *URL], "name the effect: --apply FILE.sql, --call MODULE:NAME, or --upsert-into TABLE"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--call", "a:b"], "name the effect"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--upsert-into", "t"], "--upsert-into is the effect; leave --apply"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--key", "id"], "--key, --only-if and --ignore-columns go with"),
        ([*WHAT, *URL, "--upsert-into", "t", "--only-if", "at"], "--only-if takes newer:COLUMN, not 'at'"),
        ([*WHAT, *URL, "--upsert-into", "t", "--publish-to", "own:x"], "--publish-to goes with --apply and --fields"),
        (
            [*WHAT, *URL, "--apply", "SCRIPT", "--dry-run", "--resume", "0123456789ab"],
            "--dry-run is of a load that begins",
        ),
        ([*WHAT, *URL, "--call", "nothing"], "such as billing:apply"),
        ([*WHAT, *URL, "--call", "no_such_module:apply"], "there is no module no_such_module"),
        ([*WHAT, *URL, "--call", "json:no_such"], "module json has no function no_such"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--type", "payload"], "--type takes NAME=VALUE, not 'payload'"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--read-option", "=x"], "--read-option takes NAME=VALUE"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--publish-to", "own:x"], "--publish-to goes with --apply and --fields"),
        ([*WHAT, *URL, "--call", "json:dumps", "--publish-to", "own:x"], "--publish-to goes with --apply and --fields"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--publish-to", "mails"], "--publish-to: 'mails' is not a destination"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--writer", "foo"], "--writer must be one of auto, copy, jdbc, not 'foo'"),
        (
            [*WHAT, *URL, "--apply", "SCRIPT", "--keep", "newest"],
            "--keep must be any, latest:COLUMN or earliest:COLUMN",
        ),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--max-rejected", "200%"], "--max-rejected must be a number of rows, or a"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--lock-seconds", "0"], "--lock-seconds must be more than 0 and at most a"),
        (
            [*WHAT, *URL, "--apply", "SCRIPT", "--rejected-to", "table:"],
            "--rejected-to must be a folder, or table:NAME",
        ),
        ([*WHAT, "--apply", "SCRIPT"], "no database is named"),
        ([*WHAT, *URL, "--apply", "SCRIPT", "--parallelism", "0"], "greater than or equal to 1"),
        (["events.jsonl", "--message-id", "event_id", *URL, "--apply", "SCRIPT"], "--subscriber"),
        (["events.jsonl", "--subscriber", "billing", *URL, "--apply", "SCRIPT"], "--message-id"),
        ([*WHAT[1:], *URL, "--apply", "SCRIPT"], "name what to read: the paths of files, or a --source"),
        ([*WHAT, *TABLE, *URL, "--apply", "SCRIPT"], "name what to read: the paths of files, or a --source"),
        ([*WHAT[1:], *TABLE, *URL, "--apply", "SCRIPT", "--format", "csv"], "--format and --encoding are of files"),
        ([*WHAT[1:], "--source", "t", *URL, "--apply", "SCRIPT"], "--source: a source is table:NAME"),
        (
            [*WHAT[1:], "--source", "jdbc:x://u:hunter2@db", *URL, "--apply", "SCRIPT"],
            "--source: jdbc:x://u:***@db needs the option dbtable=NAME",
        ),
        (
            [*WHAT[1:], *TABLE, *URL, "--apply", "SCRIPT", "--fields", "a struct<b: int>"],
            "--fields of a --source are those of --apply",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_spark_is_started(
    arguments: list[str], said: str, txbox: Txbox, spark: Spark, script: str
) -> None:
    given = [script if argument == "SCRIPT" else argument for argument in arguments]
    txbox("bulk-load", *given).failed_in_one_line(2, said)
    assert not spark.started


def test_an_upsert_is_the_effect(txbox: Txbox, spark: Spark) -> None:
    options = ("--key", "id, line", "--only-if", "newer:at", "--ignore-columns", "x,y", "--type", "id=uuid")
    assert txbox("bulk-load", *WHAT, *URL, "--upsert-into", '"Shop"."Order"', *options).status == 0
    made = Upsert('"Shop"."Order"', key=["id", "line"], only_if_newer="at", ignore_columns=["x", "y"])
    assert (spark.given["apply"], spark.given["column_types"]) == (made, {"id": "uuid"})
    assert (spark.read["schema"], spark.read["fields"]) == (None, None)


def test_with_fields_an_upsert_judges_as_a_worker_does(txbox: Txbox, spark: Spark) -> None:
    fields = "id text at /order/id not null, cents bigint"
    assert txbox("bulk-load", *WHAT, *URL, "--upsert-into", "purchase", "--fields", fields).status == 0
    assert spark.given["apply"].typed_fields == spark.read["fields"] == read_fields(fields)
    columns = "id string, lines array<string>"
    assert txbox("bulk-load", *WHAT, *URL, "--upsert-into", "purchase", "--fields", columns).status == 0
    assert (spark.given["apply"], spark.read["schema"]) == (Upsert("purchase"), columns)


def test_what_the_effect_publishes_goes_into_the_outbox_of_the_command(txbox: Txbox, spark: Spark, script: str) -> None:
    queue = "http://127.0.0.1:1/000000000000/mails"
    tables, fields = ("--schema", "shop", "--prefix", "p_"), ("--fields", "cents bigint")
    assert txbox("bulk-load", *WHAT, *URL, "--apply", script, *tables, *fields, "--publish-to", queue).status == 0
    assert spark.given["apply"].publishes
    publication = spark.given["apply"]._publication
    assert (publication.outbox.schema, publication.outbox.prefix, publication.destination) == ("shop", "p_", queue)
    assert txbox("bulk-load", *WHAT, *URL, "--apply", script, *tables, *fields).status == 0
    assert not spark.given["apply"].publishes


def test_java_compiles_less_for_a_small_file(txbox: Txbox, spark: Spark, script: str, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text("{}")
    key, without_c2 = "spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1"

    def options(*arguments: str) -> str | None:
        rest = ("--subscriber", "billing", "--message-id", "event_id", "--apply", script)
        assert txbox("bulk-load", *arguments, *rest, *URL).status == 0
        found: str | None = spark.started["settings"].get(key)
        return found

    assert options(str(file)) == without_c2
    assert options(str(file), "--conf", f"{key}=-Xss4m") == f"{without_c2} -Xss4m"
    assert options(str(file), "--master", "spark://host:7077") is None
    assert options(str(tmp_path)) is None
    assert options(str(tmp_path / "*.jsonl")) is None
    file.write_bytes(b" " * ((4 << 20) + 1))
    assert options(str(file)) is None


def test_a_script_that_is_missing_or_empty_or_does_not_name_the_events_is_refused_unless_forced(
    txbox: Txbox, spark: Spark, tmp_path: Path
) -> None:
    txbox("bulk-load", *WHAT, *URL, "--apply", "/no/such.sql").failed_in_one_line(1, "/no/such.sql: No such file")
    empty = tmp_path / "empty.sql"
    empty.write_text(" \n")
    txbox("bulk-load", *WHAT, *URL, "--apply", str(empty)).failed_in_one_line(2, "empty.sql is empty")
    file = tmp_path / "other.sql"
    file.write_text("SELECT 1")
    effect = ("--apply", str(file))
    txbox("bulk-load", *WHAT, *URL, *effect).failed_in_one_line(2, "other.sql does not name fresh_event", "--force")
    assert not spark.started
    assert txbox("bulk-load", *WHAT, *URL, *effect, "--force").status == 0
    assert spark.given["force"]


def test_fields_that_are_none_are_a_wrong_question(txbox: Txbox, spark: Spark, script: str) -> None:
    spark.raises = InvalidFields("schema 'a strung' is not Spark DDL")
    asked = txbox("bulk-load", *WHAT, *URL, "--apply", script, "--fields", "a strung")
    asked.failed_in_one_line(2, "--fields: schema 'a strung' is not Spark DDL")


@pytest.mark.parametrize("fields", ["event_id string, cents int", "customer_id text at /customer/id not null"])
def test_fields_are_those_of_the_effect(txbox: Txbox, spark: Spark, script: str, fields: str) -> None:
    assert txbox("bulk-load", *WHAT, *URL, "--apply", script, "--fields", fields).status == 0
    assert isinstance(effect := spark.given["apply"], SqlEffect)
    assert effect.fields == read_fields(fields)
    assert (spark.read["schema"], spark.read["fields"], spark.read["message_id"]) == (None, effect.fields, "event_id")


def test_columns_of_types_that_only_spark_has_are_as_spark_reads_them(txbox: Txbox, spark: Spark, script: str) -> None:
    fields = "event_id string, lines array<string>"
    assert txbox("bulk-load", *WHAT, *URL, "--apply", script, "--fields", fields).status == 0
    assert (spark.read["schema"], spark.given["apply"]) == (fields, "SELECT FROM fresh_event")


def test_every_option_reaches_the_load(txbox: Txbox, spark: Spark, script: str) -> None:
    options = (
        "--schema messaging --prefix p_ --format json --type event_id=uuid --read-option sep=; --encoding cp1252 "
        "--writer jdbc --parallelism 3 --chunk-rows 500 --lock-seconds 0.5 --resume 0123456789ab --stalled-seconds 7 "
        "--effects-seconds 8.5 --executor-seconds 9 --sent-at made --apply-expired --rejected-to table:refused "
        "--max-rejected 2.5% --keep latest:made --master local[1] --jdbc-jar /a/driver.jar "
        "--conf spark.driver.memory=2g"
    )
    what = (*WHAT, "more.csv", *URL, "--apply", script, "--fields", "event_id string")
    ended = txbox("bulk-load", *what, *options.split())
    assert ended.status == 0, ended.err
    assert spark.started == {
        "name": "txbox bulk-load",
        "master": "local[1]",
        "jdbc_jar": Path("/a/driver.jar"),
        "settings": {"spark.driver.memory": "2g"},
    }
    assert spark.read == {
        "paths": ["events.jsonl", "more.csv"],
        "format": "json",
        "schema": "event_id string",
        "fields": None,
        "message_id": "event_id",
        "encoding": "cp1252",
        "executor_seconds": 9.0,
        "options": {"sep": ";"},
    }
    assert spark.given.pop("url").render_as_string(hide_password=False).endswith("u:hunter2@127.0.0.1:1/x")
    assert spark.given == {
        "subscriber_id": "billing",
        "message_id": "event_id",
        "apply": "SELECT FROM fresh_event",
        "schema": "messaging",
        "prefix": "p_",
        "column_types": {"event_id": "uuid"},
        "writer": "jdbc",
        "parallelism": 3,
        "chunk_rows": 500,
        "lock_seconds": 0.5,
        "source": "the source",
        "resume": "0123456789ab",
        "stalled_seconds": 7.0,
        "effects_seconds": 8.5,
        "executor_seconds": 9.0,
        "force": False,
        "sent_at": "made",
        "apply_expired": True,
        "rejected_to": "table:refused",
        "max_rejected": "2.5%",
        "keep": "latest:made",
    }
    assert spark.stopped == 1


def test_a_function_may_be_the_effect(
    txbox: Txbox, spark: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "effect_of_a_test.py").write_text("def apply(connection): return 'applied'\n")
    monkeypatch.chdir(tmp_path)
    assert txbox("bulk-load", *WHAT, *URL, "--call", "effect_of_a_test:apply").status == 0
    assert spark.given["apply"](None) == "applied"
