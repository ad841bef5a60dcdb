"""What `txbox worker` says when it starts, and what ends it, without a server."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.program import Ended, own_module
from txbox_workers.worker import Worker

Txbox = Callable[..., Ended]

MODULE = """
from sqlalchemy import create_engine
from txbox import Inbox
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

engine = create_engine("postgresql+psycopg://u@127.0.0.1:1/x")
worker = Worker(MemorySource(), inbox=Inbox("billing"), engine=engine, handler=print)
"""


@pytest.fixture(autouse=True)
def _billing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(monkeypatch, tmp_path, "billing", MODULE)


def test_a_worker_that_cannot_start_does_not_say_that_it_works(txbox: Txbox) -> None:
    ended = txbox("worker", "billing:worker")
    ended.failed_in_one_line(1, "Connection refused")
    assert ended.out == ""


def test_the_end_of_the_terminal_drains_it(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "_start", lambda _: signal.raise_signal(signal.SIGHUP))
    ended = txbox("worker", "billing:worker")
    assert ended.status == 0
    assert ended.out.splitlines() == ["billing works on memory; Ctrl-C drains and stops", "stopped: no deliveries"]


QUEUE = ["--queue", "http://127.0.0.1:1/1/purchases"]
SQL = [*QUEUE, "--subscriber", "billing", "--apply", "account.sql"]
URL = ["--url", "postgresql://u:hunter2@127.0.0.1:1/x"]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "give either MODULE:NAME, such as billing:worker, or --queue, --subscriber, --apply and --fields; "),
        (SQL, "; there is no --fields"),
        (["billing:worker", *QUEUE, "--batch-size", "5"], "leave out --queue, --batch-size, or MODULE:NAME"),
        ([*SQL, "--fields", "cents bigint"], "no database is named"),
        ([*SQL, *URL, "--fields", "cents money"], "field cents: 'money' is not a type of fields"),
        ([*SQL, *URL, "--fields", "cents bigint", "--apply", "none.sql"], "the effect none.sql cannot be read"),
        (
            [*SQL, *URL, "--fields", "cents bigint", "--publish-to", "mails"],
            "--publish-to: 'mails' is not a destination",
        ),
        (["billing:worker", "--publish-to", "own:mails"], "leave out --publish-to, or MODULE:NAME"),
        ([*SQL, *URL, "--fields", "cents bigint", "--visibility-seconds", "99999"], "visibility_seconds must be"),
    ],
)
def test_what_cannot_be_a_worker_is_wrong_usage(
    arguments: list[str], fragment: str, txbox: Txbox, tmp_path: Path
) -> None:
    (tmp_path / "account.sql").write_text("INSERT INTO account SELECT cents FROM fresh_event")
    txbox("worker", *arguments).failed_in_one_line(2, fragment)
