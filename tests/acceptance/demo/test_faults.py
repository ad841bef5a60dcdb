"""``txbox demo`` is seen to fail: it finds an effect that is lost or doubled, and ends when it cannot go on."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine

from support import broken_demo
from support.broken_demo import ORDER, OTHER_ORDER, noted, take_place
from support.waiting import wait_until
from txbox import TxboxError
from txbox_cli.app import run as run_here
from txbox_demo import processes, sandbox, spark_stage, supervisor
from txbox_demo.checker import DemoReport
from txbox_demo.processes import DemoTask
from txbox_demo.sandbox import Progress, Sandbox
from txbox_demo.supervisor import DemoSupervisor
from txbox_migrations import upgrade_database

if TYPE_CHECKING:
    from txbox_local import LocalAws

pytestmark = pytest.mark.chaos

RunQuickly = Callable[..., DemoReport]


def found(report: DemoReport) -> dict[str, list[str]]:
    """What is wrong."""
    return {what: ids for what, ids in report.wrong.items() if ids}


def test_a_mail_that_is_lost_and_one_that_is_sent_twice_are_found(
    run_quickly: RunQuickly, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_place(monkeypatch, broken_demo.careless_notification)
    assert found(run_quickly(50)) == {"mails missing": [ORDER], "mails repeated": [OTHER_ORDER]}


def test_a_ledger_that_forgets_is_found(
    run_quickly: RunQuickly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_place(monkeypatch, broken_demo.forgetful_notification, moments=(processes.COMMITTED,))
    report = run_quickly(100, kills=8)
    repeated = sorted(order for order, mails in noted(tmp_path, "mail").items() if mails > 1)
    assert repeated
    assert found(report) == {"mails repeated": repeated}  # a killed worker had completed its message: no excuse


def test_without_the_inboxs_key_accounts_and_mails_are_wrong_and_it_says_so(
    database_url: str,
    aws: "LocalAws",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    upgrade = sandbox.upgrade_database

    def upgrade_without_key(engine: Engine, *, schema: str) -> None:
        upgrade(engine, schema=schema)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {schema}.processed_message DROP CONSTRAINT processed_message_pkey")

    monkeypatch.setattr(sandbox, "upgrade_database", upgrade_without_key)
    monkeypatch.setattr(supervisor, "LOST_SECONDS", 2.0)
    file = tmp_path / "figures.json"
    arguments = ["--purchases", "100", "--kills", "0", "--url", database_url, "--json", str(file)]
    assert run_here(["demo", "--without-spark", *arguments]) == 1
    report = json.loads(file.read_text())
    assert report["exact"] is False
    assert report["cents"]["in the accounts"] > report["cents"]["by the file"]
    for what in ("accounts", "billed not once", "mails repeated", "audit of billing"):
        assert report["wrong"][what], what
    printed = capsys.readouterr().out
    assert "THE ACCOUNTS ARE WRONG, THE NOTIFICATIONS ARE WRONG" in printed
    assert f"WRONG: BILLED NOT ONCE: {len(report['wrong']['billed not once'])}, such as cdnow-" in printed


def test_what_is_published_outside_of_the_transaction_is_found(
    run_quickly: RunQuickly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_place(monkeypatch, broken_demo.careless_shop)
    take_place(monkeypatch, broken_demo.careless_billing)
    # One worker at a time: each of the two that are to be killed meets more messages than its life has.
    report = run_quickly(100, workers=1, kills=6)
    wrong = found(report)
    # Rolled back and sent all the same.
    assert report.cents["in the accounts"] > report.cents["by the file"]
    assert wrong["billed not once"] == sorted(set(wrong["mails wrong"]))
    assert all(order.endswith("-declined") for order in wrong["mails wrong"])
    assert "orders" not in wrong
    # Killed before its commit, billing has published, and publishes again: an order, or one that was declined.
    assert report.kills["billing"][processes.INSERTED] == 1
    twice = sorted(order for order, times in noted(tmp_path, "published").items() if times > 1)
    assert twice
    assert wrong["mails repeated"] == twice


def test_what_a_relay_confirms_and_has_not_sent_is_found_and_an_effect_without_its_record_too(
    run_quickly: RunQuickly, left: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_place(monkeypatch, broken_demo.losing_relay)
    monkeypatch.setattr(
        sandbox.services, "TABLES", f"{sandbox.services.TABLES}; INSERT INTO account VALUES ('00001', 0, 0, 1)"
    )
    before = left()
    wrong = found(run_quickly(50))
    audited = {"audit of billing": [ORDER]}
    assert wrong == audited | {"accounts": ["00001", "00003"], "billed not once": [ORDER], "mails missing": [ORDER]}
    assert left() == before


def test_a_process_that_ends_by_itself_ends_the_run(
    run_quickly: RunQuickly, left: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_place(monkeypatch, broken_demo.failing_relay)
    before = left()
    with pytest.raises(TxboxError, match=r"^relay \d ended by itself with status 1: ValueError: no relay in slot \d$"):
        run_quickly(50)
    assert left() == before


def test_a_run_that_stands_still_ends_and_says_where(run_quickly: RunQuickly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(Sandbox, "progress", lambda _, stage, killed: Progress(stage, 0, 50, billed=7, waiting=43))
    with pytest.raises(TxboxError, match=r"no progress for 0\.5 s: .*placed=50, billed=7, .*waiting=43"):
        run_quickly(50)


def test_a_run_whose_tables_cannot_be_created_leaves_no_schema(
    run_quickly: RunQuickly, left: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def upgrade_half(engine: Engine, *, schema: str) -> None:
        upgrade_database(engine, schema=schema)
        raise TxboxError(f"{schema} is not complete")

    monkeypatch.setattr(sandbox, "upgrade_database", upgrade_half)
    before = left()
    with pytest.raises(TxboxError, match="is not complete"):
        run_quickly(1)
    assert left() == before


def test_a_directory_too_deep_for_the_sockets_of_processes_has_a_remedy(
    run_quickly: RunQuickly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(TxboxError, match=f"^{deep} is too long .*: set TMPDIR to a shorter path$"):
        run_quickly(1)


def test_the_final_stage_has_a_directory_of_its_own_and_its_load_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs are named after processes, and both stages have a billing 1."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nread -r typed\necho "read: $typed."\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(spark_stage, "_publish", lambda *_: None)

    def drive(its: DemoSupervisor, *_: object) -> None:
        answer = its._directory / "load.json"
        wait_until(answer.read_text, "the load has answered")
        raise TxboxError(f"{answer.relative_to(tmp_path)}: {answer.read_text()}")

    monkeypatch.setattr(DemoSupervisor, "drive", drive)
    nothing: Any = None
    task = DemoTask(database_url="", queue_urls=("", ""), purchases=1, smtp_port=1, environment={}, seed=1)
    reading, writing = os.pipe()
    os.write(writing, b"what is typed\n")
    terminal = os.dup(0)
    os.dup2(reading, 0)
    try:
        with ExitStack() as cleanup, pytest.raises(TxboxError, match=r"^final-stage/load\.json: read: \.$"):
            spark_stage.run_spark_stage(nothing, task, tmp_path, cleanup, nothing)
    finally:
        os.dup2(terminal, 0)
        for descriptor in (reading, writing, terminal):
            os.close(descriptor)
