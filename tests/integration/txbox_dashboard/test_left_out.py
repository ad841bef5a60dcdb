"""What a page says where a table cannot be read: that, and nothing that is not so."""

import re
from collections.abc import Callable, Mapping
from html import unescape
from typing import Any

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from support.postgres.roles import restricted
from support.postgres.statements import run
from support.txbox.outbox import numbered as outgoing
from support.txbox.outbox import publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make, numbered
from txbox.maintenance import Maintainer, Retention
from txbox.operations.actions import note_action
from txbox.operations.pauses import pause
from txbox.relay import Relay
from txbox.schema import tables
from txbox_dashboard import dashboard, reader
from txbox_dashboard.view import NONE
from txbox_workers.memory_source import MemorySource

PATHS = (
    "/", "/subscriber?id=billing", "/message?id=m0001", "/message?id=m0003", "/letters", "/letters?subscriber=billing",
    "/letter?number=1", "/letters/confirm?action=redrive", "/outbox", "/leases", "/loads", "/maintenance",
)  # fmt: skip

TABLES = sorted(tables().metadata.tables)

EMPTY = {"0", "0 0", NONE, "none", "≈ 0", "0 B"}
UNREAD = "Not read: see above."
MARKS = ("Some of it is missing", UNREAD, 'title="not read"')


@pytest.fixture(autouse=True)
def filled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is in each table, and a machine that is slow leaves nothing out."""
    monkeypatch.setattr(reader, "LOCK_MILLISECONDS", 5)
    monkeypatch.setattr(reader, "STATEMENT_MILLISECONDS", 60_000)
    _fill(engine)


def test_of_a_table_that_is_locked_or_may_not_be_read_nothing_is_said(engine: Engine) -> None:
    with restricted(engine) as limited, TestClient(dashboard(limited)) as pages:
        shown = _shown(pages)
        with limited.connect() as connection:
            role = connection.exec_driver_sql("SELECT current_user").scalar_one()
        for table in TABLES:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"LOCK TABLE {table}")
                readers = _check(pages, shown, table, "another session has locked the table")
            run(engine, f"REVOKE ALL ON {table} FROM {role}")
            assert _check(pages, readers, table, table) == readers
            run(engine, f"GRANT ALL ON {table} TO {role}")


def test_of_what_is_not_read_in_time_nothing_is_said(
    pages: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = _shown(pages)
    monkeypatch.setattr(reader, "LOCK_MILLISECONDS", 60_000)
    monkeypatch.setattr(reader, "STATEMENT_MILLISECONDS", 20)
    for table in ("processed_message", "dead_letter", "outbox_message", "worker_report"):
        with engine.begin() as connection:
            connection.exec_driver_sql(f"LOCK TABLE {table}")
            _check(pages, shown, table, "not read in time")


def _shown(pages: TestClient) -> Mapping[str, str]:
    return {path: pages.get(path).text for path in PATHS}


def _check(pages: TestClient, shown: Mapping[str, str], table: str, why: str) -> Mapping[str, str]:
    """Check what pages say now in place of what they have shown; return those that have noticed."""
    noticed = {}
    for path, whole in shown.items():
        answer = pages.get(path)
        where = f"{path} without {table}"
        assert answer.status_code in (200, 503), where
        if answer.status_code == 503 or any(mark in answer.text for mark in MARKS):
            assert why in unescape(answer.text), where
            noticed[path] = whole
        assert _said(answer.text) <= {*_said(whole), UNREAD}, where
        before = _figures(whole)
        for name, figure in _figures(answer.text).items():
            assert figure not in EMPTY or before.get(name) == figure, f"{where}: {name} is {figure}"
    return noticed


def _said(page: str) -> set[str]:
    """What is said in place of tables that would be empty."""
    return {_words(one) for one in re.findall(r'<p class="nothing">(.*?)</p>', page, re.DOTALL)}


def _figures(page: str) -> dict[tuple[str, str], str]:
    """The tiles by their title, and the cells of tables by row and column."""
    figures = {
        ("tile", _words(title)): _words(value)
        for title, value in re.findall(r'<div class="tile[^>]*><dt>(.*?)</dt><dd>(.*?)</dd>', page, re.DOTALL)
    }
    for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL):
        header = re.search(r'<th scope="row">(.*?)</th>', row, re.DOTALL)
        for column, cell in enumerate(re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)):
            figures[(_words(header.group(1)).split()[0] if header else "", str(column))] = _words(cell)
    return figures


def _words(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def _fill(engine: Engine) -> None:
    def handle(_session: object, message: Any) -> None:
        if message.id == "m0003":
            raise ValueError("no")

    source = MemorySource([*numbered(10), *numbered(2)])
    publish(engine, *outgoing(3, key="k", to="own:full"))
    relay = Relay(engine, {"own": RecordingPublisher(lambda _: "full")})
    with at_work(make(source, engine, handle, max_attempts=1), relay):
        assert source.wait_until_empty(20)
        for table in ("worker_report", "outbox_relay"):
            wait_until(_has(engine, table))
        wait_until(_has(engine, "outbox_message WHERE held"))
        run(engine, "CREATE TABLE kept_worker AS SELECT * FROM worker_report")
        run(engine, "CREATE TABLE kept_relay AS SELECT * FROM outbox_relay")
    run(engine, "INSERT INTO worker_report SELECT * FROM kept_worker ON CONFLICT DO NOTHING; DROP TABLE kept_worker")
    run(engine, "INSERT INTO outbox_relay SELECT * FROM kept_relay ON CONFLICT DO NOTHING; DROP TABLE kept_relay")
    later = "now() + interval '1 hour'"  # none is gone, however long the test takes
    run(engine, f"UPDATE worker_report SET seen_at = {later}, per_second = '{{\"processed\": 2}}'")
    run(engine, f"UPDATE outbox_relay SET seen_at = {later}, sent_per_second = 2, backend_pid = NULL")
    run(
        engine,
        "INSERT INTO reported_activity (kind, name, minute, figure, count) "
        "VALUES ('destination', 'own:full', date_trunc('minute', now()) - interval '5 minutes', 'sent', 7)",
    )
    run(
        engine,
        "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, failures, owner, acquired_at, "
        "expires_at) SELECT 'billing', 'm000' || n, 1, 1, 0, 'me', now(), now() + ends FROM (VALUES "
        "(1, interval '1 hour'), (2, interval '-1 hour'), (3, NULL)) AS one (n, ends)",
    )
    run(
        engine,
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds) "
        "VALUES ('r1', 'billing', 'a.jsonl', '', 'copy', 2, '[]')",
    )
    run(
        engine,
        "INSERT INTO bulk_load_chunk (run_id, chunk, rows_read, rows_rejected, already_processed, applied) "
        "VALUES ('r1', 0, 10, 1, 2, 7)",
    )
    run(
        engine,
        "INSERT INTO message_failure (subscriber_id, message_id, attempts, error, history) "
        "VALUES ('billing', 'm0001', 1, 'no', '[]')",
    )
    Maintainer(engine, Retention()).run_once()
    run(engine, "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now() - interval '1 day')")
    run(
        engine,
        "WITH asked AS (INSERT INTO dead_letter_operation (kind, filter, requested_by) VALUES ('redrive', '{}', 'me') "
        "RETURNING operation_id) INSERT INTO dead_letter_selection (operation_id, dead_letter_id) "
        "SELECT operation_id, dead_letter_id FROM asked, dead_letter",
    )
    with engine.begin() as connection:
        note_action(
            connection, "audit", "billing", by="me", detail={"balanced": True, "seconds": 1, "counts": {"a": 1}}
        )
        note_action(connection, "pause", "own:full", by="me", detail={})
    pause(engine, subscriber_id="billing", by="me", note="so")
    run(engine, "ANALYZE")


def _has(engine: Engine, rows: str) -> Callable[[], bool]:
    def ask() -> bool:
        with engine.connect() as connection:
            return bool(connection.exec_driver_sql(f"SELECT EXISTS (SELECT FROM {rows})").scalar_one())

    return ask
