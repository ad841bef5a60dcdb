"""``txbox status --watch``: a report that is shown again, and ends as its reader wants."""

import contextlib
import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable

from sqlalchemy import Engine

from support.postgres.tcp_proxy import TcpProxy
from support.program import COMMAND, PASSWORD, Ended, Running
from support.waiting import wait_until
from txbox import Inbox

WATCH = ("status", "--watch", "--interval", "0.2")


def record(engine: Engine, message_id: str) -> None:
    with engine.begin() as connection:
        Inbox("billing").record(connection, message_id)


def test_each_report_follows_the_one_before_through_an_outage_until_a_signal(
    proxy: TcpProxy, proxied: Engine, engine: Engine
) -> None:
    url = proxied.url.render_as_string(hide_password=False)
    with Running(*WATCH, env={"TXBOX_DATABASE_URL": url}) as running:
        running.says("inbox: 0 rows\n")
        record(engine, "a")
        running.says("inbox: 1 rows\n")
        assert running.err == []
        proxy.refuse()
        proxy.cut()
        running.says("next try in 0.2 s")
        proxy.accept()
        record(engine, "b")
        running.says("inbox: 2 rows\n")
        running.signal(signal.SIGINT)
        assert running.wait() == 0
    headings = [line for line in running.out if line.endswith(", every 0.2 s; Ctrl-C ends\n")]
    reports = len([line for line in running.out if line.startswith("inbox: ")])
    assert len(headings) >= reports >= 3
    assert len(headings) - reports <= 1, "the signal may come behind a heading"
    assert "\x1b" not in "".join(running.out)


def test_as_json_each_report_is_one_line(schema_url: str, engine: Engine) -> None:
    with Running(*WATCH, "--json", env={"TXBOX_DATABASE_URL": schema_url}) as running:
        running.says("inbox_rows")
        record(engine, "a")
        running.says('"inbox_rows": 1')
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    assert running.err == []
    rows = [json.loads(line)["inbox_rows"] for line in running.out]
    assert rows == sorted(rows)
    assert {*rows} == {0, 1}


def test_a_database_that_was_never_there_ends_it(txbox: Callable[..., Ended]) -> None:
    txbox(*WATCH, "--url", f"postgresql://u:{PASSWORD}@127.0.0.1:1/none").failed_in_one_line(1, "Connection refused")


def test_in_a_terminal_each_report_takes_the_place_of_the_one_before(schema_url: str) -> None:
    terminal, end = pty.openpty()
    shown = b""
    process = subprocess.Popen(
        [*COMMAND, *WATCH],
        stdout=end,
        stderr=end,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TXBOX_DATABASE_URL": schema_url, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(end)
    try:
        os.set_blocking(terminal, False)

        def twice() -> bool:
            nonlocal shown
            with contextlib.suppress(BlockingIOError):
                shown += os.read(terminal, 65536)
            return shown.count(b"inbox: 0 rows") >= 2

        wait_until(twice)
        assert shown.count(b"\x1b[2J") >= 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
