"""The commands around Spark: what they refuse before it is started, what they hand on, what they show."""

import io
import json
import logging
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import txbox_spark
from support.program import Ended
from txbox import SqlEffect
from txbox.effects import Upsert
from txbox.effects.fields import read_fields
from txbox_cli import spark as cli_spark
from txbox_spark import BulkLoadReport, JobProgress, LoadPlan, Reconciliation, RejectedCause, StatementPlan
from txbox_spark.reading.errors import InvalidFields
from txbox_spark.report import MergePace

Txbox = Callable[..., Ended]

URL = ("--url", "postgresql://u:hunter2@127.0.0.1:1/x")
WHAT = ("events.jsonl", "--subscriber", "billing", "--message-id", "event_id")

REPORT = BulkLoadReport(
    run_id="0123456789ab",
    subscriber_id="billing",
    source="events.jsonl",
    writer="jdbc",
    writer_reason="executor here has no psycopg",
    attempts=2,
    chunks=3,
    read=1_010,
    rejected=0,
    rejected_sample=(),
    duplicate_in_source=10,
    already_processed=400,
    applied=600,
    seconds={"survey": 1.25, "merge": 2.0},
)
DIRTY = replace(
    REPORT,
    rejected=1_001,
    duplicate_in_source=9,
    already_processed=0,
    applied=0,
    rejected_causes=(
        RejectedCause("field delay: not integer", "delay", 1_000, "NA", "{a\x1b}"),
        RejectedCause("no message id", None, 1, None, "{b\x1b}"),
    ),
    rejected_to="table:refused",
    differing=1_200,
    differing_sample=("p-3", "p-9\x1b"),
)
TABLE = ("--source", "table:archive.purchases")

PACE = MergePace(rows_per_second=12_345.6, chunks_per_minute=90, seconds_left=185)


PLAN = LoadPlan(
    subscriber_id="billing",
    source="events.jsonl",
    writer="copy",
    writer_reason="asked for",
    chunks=7,
    read=1_010,
    rejected=1,
    rejected_causes=(RejectedCause("no message id", None, 1, None, "{\x1b}"),),
    duplicate_in_source=9,
    already_processed=400,
    parked=0,
    expired=0,
    to_apply=600,
    statements=(
        StatementPlan("INSERT INTO purchase\nSELECT id FROM fresh_event", ("Insert on purchase", "  ->  Seq Scan")),
        StatementPlan("LOCK TABLE \x1b", None),
    ),
)


class Spark:
    """Stands where Spark would be started: what the commands hand on is looked at here, Spark is used elsewhere."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.read: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        self.progress: list[JobProgress] = []
        self.stopped = 0
        self.report = REPORT
        self.raises: BaseException | None = None
        self.drops_an_interrupt = False


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Spark:
    seen = Spark()

    class Session:
        def stop(self) -> None:
            seen.stopped += 1

    def spark_session(name: str, **options: Any) -> Session:
        seen.started = {"name": name, **options}
        return Session()

    def read_events(_: Session, paths: list[str], **options: Any) -> str:
        seen.read = {"paths": paths, **options}
        return "the events"

    def load(frame: str, *, on_progress: Callable[[JobProgress], object], **options: Any) -> BulkLoadReport:
        assert frame == "the events"
        seen.given = options
        for one in seen.progress:
            on_progress(one)
        if seen.drops_an_interrupt:  # as Python does with one that comes out of a finalizer
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
        if seen.raises:
            raise seen.raises
        return seen.report

    def plan_load(frame: str, *, on_progress: Callable[[JobProgress], object], **options: Any) -> LoadPlan:
        seen.given = options
        return PLAN if isinstance(options["apply"], str) else replace(PLAN, statements=())

    def reconcile(frame: str, **options: Any) -> Reconciliation:
        seen.given = options
        return Reconciliation(5, 0, 1, 4, 2, 0, 1, 0, ("a", "b\x1b"), 1, (), None)

    monkeypatch.setattr(txbox_spark, "spark_session", spark_session)
    monkeypatch.setattr(txbox_spark, "read_events", read_events)
    monkeypatch.setattr(txbox_spark, "source_of", lambda *_, **__: "the source")
    monkeypatch.setattr(txbox_spark, "bulk_load", load)
    monkeypatch.setattr(txbox_spark, "plan_load", plan_load)
    monkeypatch.setattr(txbox_spark, "reconcile", reconcile)
    # There is no database, and there are no files.
    monkeypatch.setattr(cli_spark, "check_before_spark", lambda *_, **__: None)
    return seen


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "account.sql"
    file.write_text("SELECT FROM fresh_event")
    return str(file)


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


def test_an_empty_script_is_refused(txbox: Txbox, spark: Spark, tmp_path: Path) -> None:
    file = tmp_path / "empty.sql"
    file.write_text(" \n")
    txbox("bulk-load", *WHAT, *URL, "--apply", str(file)).failed_in_one_line(2, "empty.sql is empty")


def test_a_script_that_does_not_name_the_events_is_refused_unless_forced(
    txbox: Txbox, spark: Spark, tmp_path: Path
) -> None:
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


def test_a_script_that_is_not_there_is_told(txbox: Txbox, spark: Spark) -> None:
    txbox("bulk-load", *WHAT, *URL, "--apply", "/no/such.sql").failed_in_one_line(1, "/no/such.sql: No such file")


def test_every_option_reaches_the_load(txbox: Txbox, spark: Spark, script: str) -> None:
    ended = txbox(
        *("bulk-load", *WHAT, "more.csv", *URL, "--apply", script, "--schema", "messaging", "--prefix", "p_"),
        *("--format", "json", "--fields", "event_id string", "--type", "event_id=uuid", "--read-option", "sep=;"),
        *("--encoding", "cp1252"),
        *(
            "--writer",
            "jdbc",
            "--parallelism",
            "3",
            "--chunk-rows",
            "500",
            "--lock-seconds",
            "0.5",
            "--resume",
            "0123456789ab",
        ),
        *("--stalled-seconds", "7", "--effects-seconds", "8.5", "--sent-at", "made", "--apply-expired"),
        *("--rejected-to", "table:refused", "--max-rejected", "2.5%", "--keep", "latest:made"),
        *("--master", "local[1]", "--jdbc-jar", "/a/driver.jar", "--conf", "spark.driver.memory=2g"),
    )
    assert ended.status == 0, ended.err
    assert spark.started == {
        "name": "txbox bulk-load",
        "master": "local[1]",
        "jdbc_jar": Path("/a/driver.jar"),
        "settings": {"spark.driver.memory": "2g"},
    }
    options = {"sep": ";"}
    assert spark.read == {
        "paths": ["events.jsonl", "more.csv"],
        "format": "json",
        "schema": "event_id string",
        "fields": None,
        "message_id": "event_id",
        "encoding": "cp1252",
        "options": options,
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
        "force": False,
        "sent_at": "made",
        "apply_expired": True,
        "rejected_to": "table:refused",
        "max_rejected": "2.5%",
        "keep": "latest:made",
    }
    assert spark.stopped == 1


def test_rejected_rows_are_shown_by_their_causes(txbox: Txbox, spark: Spark, script: str) -> None:
    spark.report = DIRTY
    ended = txbox("bulk-load", *WHAT, *URL, "--apply", script, "--read-option", "sep=;", "--format", "csv")
    assert ended.status == 3
    assert [line for line in ended.out.splitlines() if "rejected" in line or "differ" in line][1:] == [
        "rejected: 1,000 rows: field delay: not integer: 'NA'; --read-option nullValue=NA?, such as {a\\x1b}",
        "rejected: no message id: {b\\x1b}",
        "1,200 ids have rows that differ, and one was taken (--keep says which): p-3, p-9\\x1b",
        "all rejected rows are in table:refused",
    ]
    allowed = txbox("bulk-load", *WHAT, *URL, "--apply", script, "--allow-rejected")
    assert allowed.status == 0
    assert "nullValue" not in allowed.out  # JSON has null
    assert txbox("bulk-load", *WHAT, *URL, "--apply", script, "--json").status == 3


def test_a_function_may_be_the_effect(
    txbox: Txbox, spark: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "effect_of_a_test.py").write_text("def apply(connection): return 'applied'\n")
    monkeypatch.chdir(tmp_path)
    assert txbox("bulk-load", *WHAT, *URL, "--call", "effect_of_a_test:apply").status == 0
    assert spark.given["apply"](None) == "applied"


def test_the_report_is_a_table_or_json(txbox: Txbox, spark: Spark, script: str) -> None:
    shown = txbox("bulk-load", *WHAT, *URL, "--apply", script).out
    counts = {"read": "1,010", "duplicate in source": "10", "already processed": "400", "applied": "600"}
    for name, count in counts.items():
        assert re.search(rf"^ {name} +{count}  ", shown, re.MULTILINE), name
    assert "run 0123456789ab, attempt 2: 3 chunks, writer jdbc (executor here has no psycopg)" in shown
    assert "survey 1.2 s, merge 2.0 s" in shown
    as_json = txbox("bulk-load", *WHAT, *URL, "--apply", script, "--json").out
    assert '"applied": 600' in as_json
    assert '"writer_reason": "executor here has no psycopg"' in as_json


def test_a_dry_run_is_the_plan_of_the_same_load(txbox: Txbox, spark: Spark, script: str) -> None:
    command = ("bulk-load", *WHAT, *URL, "--apply", script, "--sent-at", "made")
    assert txbox(*command).status == 0
    loaded = spark.given
    shown = txbox(*command, "--dry-run").out
    assert spark.given.pop("url") == loaded.pop("url")
    assert {**spark.given, "resume": None} == loaded
    for name, count in {"read": "1,010", "already processed": "400", "to apply": "600"}.items():
        assert re.search(rf"^ {name} +{count}  ", shown, re.MULTILINE), name
    assert shown.partition("rejected: ")[2].splitlines() == [
        "no message id: {\\x1b}",
        "",
        "INSERT INTO purchase",
        "SELECT id FROM fresh_event",
        "",
        "  Insert on purchase",
        "    ->  Seq Scan",
        "",
        "LOCK TABLE \\x1b",
        "",
        "  not explained: EXPLAIN does not take it, or one before it",
        "",
        "dry run, nothing is changed: 7 chunks, writer copy (asked for)",
    ]
    assert json.loads(txbox(*command, "--dry-run", "--json").out) == json.loads(json.dumps(PLAN.as_dict()))
    called = txbox("bulk-load", *WHAT, *URL, "--call", "json:dumps", "--dry-run").out
    assert "the effect is json:dumps, which is not run" in called


def test_where_nobody_watches_progress_is_a_line_for_each_stage(txbox: Txbox, spark: Spark, script: str) -> None:
    spark.progress = [
        JobProgress(None, "survey", 0, 0),
        JobProgress(None, "survey", 1, 4),
        JobProgress(None, "survey", 2, 4),
        JobProgress("0123456789ab", "merge", 0, 2),
        JobProgress("0123456789ab", "merge", 1, 2, 5_000),
        JobProgress("0123456789ab", "merge", 2, 2, 9_000, pace=PACE),
        JobProgress("0123456789ab", "merge", 2, 2, 9_000, pace=PACE),
    ]
    ended = txbox("bulk-load", *WHAT, *URL, "--apply", script)
    assert ended.err.splitlines() == [
        "survey: 1 of 4 tasks",
        "run 0123456789ab, merge: 0 of 2 chunks, 0 events applied",
        "run 0123456789ab, merge: 2 of 2 chunks, 9,000 events applied",
    ]


def test_in_a_terminal_each_stage_has_a_bar(
    txbox: Txbox, spark: Spark, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=180, color_system=None)
    monkeypatch.setattr(cli_spark, "plain_console", lambda **_: terminal)
    spark.progress = [JobProgress(None, "survey", 4, 4), JobProgress("0123456789ab", "merge", 1, 2, 5_000, pace=PACE)]
    assert txbox("bulk-load", *WHAT, *URL, "--apply", script).status == 0
    assert "4/4 tasks" in " ".join(shown.getvalue().split())
    assert "1/2 chunks, 5,000 events applied" in " ".join(shown.getvalue().split())
    assert "applied, 3 min 5 s left, 12,346 rows a second, 90 chunks a minute" in " ".join(shown.getvalue().split())


def test_a_narrow_terminal_has_as_much_as_fits(
    txbox: Txbox, spark: Spark, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(cli_spark, "plain_console", lambda **_: terminal)
    spark.progress = [JobProgress("0123456789ab", "merge", 11, 20, 5_000, pace=PACE)]
    assert txbox("bulk-load", *WHAT, *URL, "--apply", script).status == 0
    assert "11/20 chunks, 5,000 events applied, 3 min 5 s left 0:0" in " ".join(shown.getvalue().split())
    assert "…" not in shown.getvalue().partition("\n")[2]


def test_a_line_says_how_fast_it_is_and_how_long_it_lasts(txbox: Txbox, spark: Spark, script: str) -> None:
    spark.progress = [JobProgress("0123456789ab", "merge", 1, 2, 5_000, pace=PACE)]
    assert txbox("bulk-load", *WHAT, *URL, "--apply", script).err == (
        "run 0123456789ab, merge: 1 of 2 chunks, 5,000 events applied, 3 min 5 s left, "
        "12,346 rows a second, 90 chunks a minute\n"
    )


@pytest.mark.parametrize(
    ("raises", "drops"),
    [(KeyboardInterrupt(), False), (ConnectionError("answer from Java side is empty"), True)],
    ids=["itself", "what it has broken"],
)
def test_an_interrupt_says_how_to_go_on_and_stops_spark(
    raises: BaseException, drops: bool, txbox: Txbox, spark: Spark, script: str
) -> None:
    spark.progress = [JobProgress("0123456789ab", "merge", 1, 2, 5)]
    spark.raises, spark.drops_an_interrupt = raises, drops
    ended = txbox("bulk-load", *WHAT, *URL, "--apply", script)
    assert ended.status == 130
    assert ended.err.endswith("txbox: interrupted; finish it with --resume 0123456789ab, or run it again\n")
    assert spark.stopped == 1


@pytest.mark.usefixtures("spark")
def test_an_interrupt_while_spark_starts_is_one_line(
    txbox: Txbox, script: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """py4j logs what it was interrupted in, by the root logger, and what is broken then fails in its own way."""
    monkeypatch.setattr(logging.getLogger(), "filters", [])

    def interrupted(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            logging.exception("KeyboardInterrupt while sending command.")  # noqa: LOG015 - as py4j does
        raise ConnectionError("answer from Java side is empty")

    monkeypatch.setattr(txbox_spark, "spark_session", interrupted)
    before = signal.getsignal(signal.SIGINT)
    ended = txbox("bulk-load", *WHAT, *URL, "--apply", script)
    signal.signal(signal.SIGINT, before)
    assert (ended.status, ended.err, caplog.text) == (130, "txbox: interrupted\n", "")


def test_json_is_all_that_spark_submit_shows(
    txbox: Txbox, spark: Spark, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts stderr and stdout of its program together."""
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    spark.progress = [JobProgress(None, "survey", 4, 4), JobProgress("0123456789ab", "merge", 1, 2, 5_000)]
    assert txbox("bulk-load", *WHAT, *URL, "--apply", script, "--json").err == ""
    assert "survey" in txbox("bulk-load", *WHAT, *URL, "--apply", script).err


def test_a_reconciliation_that_is_not_complete_has_exit_status_1(txbox: Txbox, spark: Spark) -> None:
    ended = txbox("reconcile", *WHAT, *URL, "--output", "there", "--sample", "2", "--partitions", "4")
    assert ended.status == 1
    assert re.search(r"^ never processed +2  ", ended.out, re.MULTILINE)
    assert re.search(r"^ expired +1  of those, came too late to be run", ended.out, re.MULTILINE)
    assert "parked" not in ended.out
    assert "never processed: b\\x1b" in ended.out
    assert ended.out.endswith("known to be processed: 2 events were not processed, 0 rows cannot be compared\n")
    assert (spark.given["output"], spark.given["sample"], spark.given["partitions"]) == ("there", 2, 4)
    assert spark.stopped == 1


def test_a_table_has_its_own_columns(txbox: Txbox, spark: Spark) -> None:
    asked = txbox("reconcile", *TABLE, *WHAT[1:], *URL, "--fields", "event_id string")
    asked.failed_in_one_line(2, "--fields is of files; a --source has its own columns")
    assert not spark.started
