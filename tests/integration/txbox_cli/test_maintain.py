"""``txbox maintain``: once, dry, as a process, and asked wrongly."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from support.postgres.statements import run
from support.program import Ended
from support.waiting import wait_until

Txbox = Callable[..., Ended]


def record(engine: Engine, subscriber_id: str, count: int, *, days_ago: float) -> None:
    run(
        engine,
        "INSERT INTO processed_message (subscriber_id, message_id, processed_at) "
        "SELECT %s, %s || '-' || number, now() - make_interval(days => %s) FROM generate_series(1, %s) AS number",
        (subscriber_id, str(days_ago), days_ago, count),
    )


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM processed_message").scalar_one())


def test_once_it_forgets_what_is_old_and_says_how_much(txbox: Txbox, engine: Engine) -> None:
    record(engine, "billing", 20, days_ago=40)
    record(engine, "mailing", 30, days_ago=100)
    record(engine, "billing", 5, days_ago=1)
    options = ("maintain", "--keep-inbox", "billing=30d", "--keep-inbox", "*=90d", "--json")
    planned = {one["task"]: one["rows"] for one in json.loads(txbox(*options, "--dry-run").out)}
    assert planned["inbox"] == 50
    assert count(engine) == 55
    done = txbox(*options, "--once")
    assert (done.status, done.err) == (0, "")
    report = json.loads(done.out)
    assert (report["worked"], report["removed"]["inbox"], count(engine)) == (True, 50, 5)
    assert "inbox" in txbox(*options[:-1], "--once").out


def test_the_windows_come_from_the_environment_too(
    txbox: Txbox, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(engine, "billing", 20, days_ago=40)
    record(engine, "mailing", 30, days_ago=40)
    monkeypatch.setenv("TXBOX_KEEP_INBOX", "billing=30d *=90d")
    assert json.loads(txbox("maintain", "--once", "--json").out)["removed"]["inbox"] == 20


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (("--json",), 2, "--once or --dry-run"),
        (("--once", "--keep-inbox", "billing=7d"), 1, "14 days"),
    ],
)
def test_what_cannot_work_is_one_line(txbox: Txbox, arguments: tuple[str, ...], status: int, line: str) -> None:
    txbox("maintain", *arguments).failed_in_one_line(status, line)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("inbox", "30d", "must be SUBSCRIBER=SPAN"),
        ("inbox", "billing=soon", "must be a span of time"),
        ("inbox", "billing=5m", "['billing'] must be at least an hour"),
        ("results", "soon", "must be a span of time"),
        ("leases", "5m", "must be at least an hour"),
        ("sent", "200000d", "must be a timedelta"),
    ],
)
def test_a_window_that_cannot_be_names_the_option_or_the_variable_that_it_is_from(
    txbox: Txbox, monkeypatch: pytest.MonkeyPatch, name: str, text: str, problem: str
) -> None:
    by_option = txbox("maintain", "--once", f"--keep-{name}", text)
    by_option.failed_in_one_line(2, f"txbox: --keep-{name}", problem)
    monkeypatch.setenv(f"TXBOX_KEEP_{name.upper()}", text)
    by_variable = txbox("maintain", "--once")
    by_variable.failed_in_one_line(2, f"txbox: TXBOX_KEEP_{name.upper()}", problem)
    assert "--keep" not in by_variable.err


def test_a_bad_url_names_the_option_or_the_variable_that_it_is_from(
    txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    txbox("status", "--url", "nonsense").failed_in_one_line(2, "txbox: --url: this is not a database URL")
    monkeypatch.setenv("TXBOX_DATABASE_URL", "mysql://localhost/db")
    txbox("status").failed_in_one_line(2, "txbox: TXBOX_DATABASE_URL: mysql:// cannot be used")


def test_as_a_process_it_works_until_sigterm(engine: Engine, schema_url: str) -> None:
    record(engine, "billing", 20, days_ago=40)
    command = [sys.executable, "-m", "txbox_cli", "maintain", "--url", schema_url, "--keep-inbox", "*=30d"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: count(engine) == 0, "the old ids are gone")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "stopped"
    assert "inbox: removed 20 rows" in err
