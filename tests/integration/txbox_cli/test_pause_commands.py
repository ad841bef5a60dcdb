"""``txbox pause`` and ``resume``, and the status of workers and pauses."""

import json
from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from support.program import Ended
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make, messages
from txbox import Inbox, Outbox
from txbox.maintenance.rotation import InboxConversion
from txbox.postgres import transactions
from txbox_workers import reporter
from txbox_workers.memory_source import MemorySource

Txbox = Callable[..., Ended]


@pytest.fixture
def inbox(engine: Engine) -> None:
    with engine.begin() as connection:
        Inbox("billing").record(connection, "m")


def test_a_worker_and_its_pause_in_the_status(txbox: Txbox, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 0.05)
    source = MemorySource(messages("a", "b", "a"))
    with at_work(make(source, engine, lambda *_: None)):
        assert source.wait_until_empty(20)
        wait_until(lambda: "1 duplicate, 2 processed" in txbox("status").out)
        said = txbox("pause", "billing", "--note", "repairs\x1b[2J", "--by", "anna").out
        assert said == "paused: subscriber billing; `txbox status` says when it is drained, `txbox resume` ends it\n"
        line = wait_until(
            lambda: [one for one in txbox("status").out.splitlines() if one.endswith("1 of 1 worker drained")]
        )[0]
        assert line.startswith("paused: subscriber billing, by anna since ")
        assert r"(repairs\x1b[2J)" in line
        found = json.loads(txbox("status", "--json").out)
        assert [worker["state"] for worker in found["workers"]] == ["drained"]
        assert [(one["name"], one["paused_by"]) for one in found["pauses"]] == [("billing", "anna")]
        assert txbox("pause", "billing").out.startswith("already paused: subscriber billing, by anna since 2")
        assert txbox("resume", "billing").out == "resumed: subscriber billing\n"
        wait_until(lambda: json.loads(txbox("status", "--json").out)["workers"][0]["state"] == "working")
    assert json.loads(txbox("status", "--json").out)["workers"] == []


def test_a_worker_that_is_gone_is_one_line(txbox: Txbox, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO worker_report (worker_id, subscriber_id, source, host, pid, version, state, seen_at) "
            "VALUES ('w', 'billing', 'queue', 'host', 7, '1', 'working', now() - interval '61 s')"
        )
    assert "gone: the worker host 7, seen 1 min 1 s ago" in txbox("status").out
    assert "is it gone?" in txbox("status", "--all").out


@pytest.mark.usefixtures("inbox")
def test_who_asks_is_this_user_unless_told(txbox: Txbox, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ben")
    assert json.loads(txbox("pause", "billing", "--json").out) == {
        "kind": "subscriber",
        "name": "billing",
        "paused": True,
        "new": True,
    }
    (pause,) = json.loads(txbox("status", "--json").out)["pauses"]
    assert pause["paused_by"].startswith("ben@")


@pytest.mark.usefixtures("inbox")
def test_a_name_that_left_no_trace_is_refused_unless_forced(txbox: Txbox) -> None:
    txbox("pause", "biling").failed_in_one_line(2, "no subscriber or destination biling has left a trace", "--force")
    txbox("pause", "billing", "--destination").failed_in_one_line(2, "no destination billing has left a trace")
    txbox("pause", "biling", "--force").failed_in_one_line(2, "--subscriber --force")
    assert txbox("pause", "print:new", "--destination", "--force").out.startswith("paused: destination print:new;")
    txbox("resume", "print:new", "--subscriber").failed_in_one_line(1, "print:new is not paused")
    assert txbox("resume", "print:new").out == "resumed: destination print:new\n"
    txbox("resume", "print:new").failed_in_one_line(1, "print:new is not paused; `txbox status` shows what is")


@pytest.mark.usefixtures("inbox")
def test_a_name_that_both_have_needs_to_say_which(txbox: Txbox, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO outbox_relay (relay_id, host, pid, destinations) VALUES ('r', 'h', 1, '{\"billing\": 3}')"
        )
    txbox("pause", "billing").failed_in_one_line(2, "add --subscriber or --destination")
    for kind in ("subscriber", "destination"):
        assert txbox("pause", "billing", f"--{kind}").out.startswith(f"paused: {kind} billing;")
    txbox("resume", "billing").failed_in_one_line(2, "add --subscriber or --destination")
    assert txbox("resume", "billing", "--destination").out == "resumed: destination billing\n"
    assert txbox("resume", "billing").out == "resumed: subscriber billing\n"


@pytest.mark.parametrize(
    ("lock", "commands"),
    [
        ("LOCK TABLE paused", ("pause", "resume", "status")),
        ("LOCK TABLE worker_report", ("pause", "status")),
        ("LOCK TABLE processed_message", ("pause", "status")),
        ("LOCK TABLE message_lease", ("status",)),
        ("LOCK TABLE inbox_horizon", ("status",)),
        ("SELECT FROM paused FOR UPDATE", ("resume",)),
    ],
)
def test_what_another_session_has_locked_is_named(
    txbox: Txbox, engine: Engine, inbox: None, monkeypatch: pytest.MonkeyPatch, lock: str, commands: tuple[str, ...]
) -> None:
    txbox("pause", "billing")
    monkeypatch.setattr(transactions, "LOCK_SECONDS", 0.1)
    with engine.connect() as other:
        other.exec_driver_sql(lock)
        for command in commands:
            arguments = () if command == "status" else ("billing",)
            txbox(command, *arguments).failed_in_one_line(1, f"{lock.split()[2]} is locked by another session")
    assert txbox("resume", "billing").status == 0


def test_a_generation_that_another_session_has_locked_bounds_a_status(
    txbox: Txbox, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    InboxConversion(engine).forward()
    with engine.connect() as other, monkeypatch.context() as patch:
        patch.setattr(transactions, "LOCK_SECONDS", 0.1)
        other.exec_driver_sql("LOCK TABLE processed_message_g1 IN ACCESS EXCLUSIVE MODE")
        txbox("status").failed_in_one_line(1, "processed_message is locked by another session")
    assert txbox("status").status == 0


def test_no_relay_to_pause_sends_to_an_inbox_destination(txbox: Txbox, engine: Engine) -> None:
    with engine.begin() as connection:
        Outbox().publish(connection, "inbox:billing", "{}")
    for options in ((), ("--destination",), ("--destination", "--force")):
        txbox("pause", "inbox:billing", *options).failed_in_one_line(1, "pause the subscriber billing")
    assert txbox("pause", "billing").out.startswith("paused: subscriber billing;"), "what waits for it is its trace"
