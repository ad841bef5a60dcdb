"""The command bulk-load: what it shows, on its way and at its end."""

import io
import json
import logging
import os
import re
import signal

import pytest
from rich.console import Console

import txbox_spark
from support.spark.spark_commands import DIRTY, PACE, PLAN, URL, WHAT, Spark, Txbox
from txbox_cli import spark as cli_spark
from txbox_spark import JobProgress


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


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "why",
    [
        "function sum(text) does not exist (line 1 of the statements)",
        "operator does not exist: bigint + text",
        'column "cents" is of type bigint but expression is of type text',
        "COALESCE types text and integer cannot be matched",
    ],
)
def test_texts_of_csv_that_the_effect_takes_for_numbers(
    txbox: Txbox, spark: Spark, script: str, why: str, begun: bool
) -> None:
    failed = txbox_spark.ApplyFailed(why)
    spark.raises = txbox_spark.BulkLoadFailed("0123456789ab", str(failed), done=0, chunks=1) if begun else failed
    csv = ("bulk-load", *WHAT, *URL, "--apply", script, "--format", "csv")
    txbox(*csv).failed_in_one_line(1, why, "; the columns of CSV are texts unless --fields gives their types")
    assert "--fields" not in txbox(*csv, "--fields", "event_id string").err
    assert "--fields" not in txbox("bulk-load", *WHAT, *URL, "--apply", script).err, "JSON has numbers"
    spark.raises = txbox_spark.ApplyFailed('column "text" does not exist')
    assert "--fields" not in txbox(*csv).err


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
        logging.error("Exception while sending command.")  # noqa: LOG015 - as py4j does
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
