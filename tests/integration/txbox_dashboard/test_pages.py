"""What the pages show of what is in the tables, read from their text as a person would."""

import re
from collections.abc import Callable
from html import unescape

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from support.postgres.statements import run
from support.txbox.outbox import numbered as outgoing
from support.txbox.outbox import publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make, numbered
from txbox import DeadLetter, DeadLetters, Failures, Inbox, Reason
from txbox.operations.actions import note_action
from txbox.operations.pauses import pause
from txbox.relay import Refused, Relay
from txbox.status import read_status
from txbox_dashboard.pages import inbox_activity
from txbox_dashboard.pages import leases as lease_pages
from txbox_dashboard.pages import outbox as outbox_page
from txbox_workers.memory_source import MemorySource


def text_of(pages: TestClient, path: str) -> str:
    """The words of a page, without its markup."""
    answer = pages.get(path)
    assert answer.status_code == 200
    assert "Some of it is missing" not in answer.text
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", re.sub(r"</?bdi>", "", answer.text))).split())


def row_of(text: str, begin: str, end: str) -> str:
    return begin + text.partition(begin)[2].partition(end)[0]


def test_the_overview_shows_what_workers_do(pages: TestClient, engine: Engine) -> None:
    def handle(_session: object, message: object) -> None:
        if getattr(message, "id", "") == "m0003":
            raise ValueError("no")

    source = MemorySource([*numbered(10), *numbered(2)])
    with at_work(make(source, engine, handle, max_attempts=2)):
        assert source.wait_until_empty(20)
        wait_until(lambda: "1 at work" in text_of(pages, "/"))
        pause(engine, subscriber_id="billing", by="anna", note="the ledger is repaired")
        text = text_of(pages, "/subscriber?id=billing")
    assert "Paused by anna" in text
    assert "the ledger is repaired" in text
    assert "1 failed" in text  # the letter
    overview = text_of(pages, "/")
    assert "billing paused none" in overview
    # processed, duplicates, failures (one attempt failed, one was the last), retrying, letters
    assert re.search(r"billing paused none 0 9 2 2 . 0 1\b", overview)


def test_the_stretch_that_is_not_over_is_shown_and_said(pages: TestClient, engine: Engine) -> None:
    run(
        engine,
        "INSERT INTO reported_activity (kind, name, minute, figure, count) SELECT 'subscriber', name, "
        "date_trunc('minute', now()) - ago * interval '9 minutes', 'processed', 7 - ago "
        "FROM unnest('{a,b}'::text[]) AS name, generate_series(0, 1) AS ago",
    )
    run(
        engine,
        "INSERT INTO paused (kind, name, paused_by) VALUES ('subscriber', 'a', 'me'), ('subscriber', 'b', 'me')",
    )
    overview = pages.get("/").text
    assert "the last one is not over: 14 processed so far" in overview
    assert overview.count("Processed: 13 in all, at most 7 at a time, 7 so far in the last stretch") == 2
    assert len(re.findall(r'<polyline class="so-far" points="118\.0,\S+ 120\.0,1\.0">', overview)) == 2
    assert re.search(r'data-so-far="yes".*, 6, 0, 0, 7\]\]', pages.get("/subscriber?id=a").text)


def test_what_was_processed_since_waits_for_nobody(pages: TestClient, engine: Engine) -> None:
    """As the status and the exporter count."""
    DeadLetters(engine).park(DeadLetter("billing", "parked", Reason.FAILED, "error", 1, "queue", b"{}"))
    run(engine, "DELETE FROM processed_message")  # by hand, and then a copy of it came
    Failures(engine, "billing").fail("failed", ValueError("a full disk"))
    with engine.begin() as connection:
        Inbox("billing").record_many(connection, ["parked", "failed"])
    (line,) = read_status(engine).subscribers
    assert (line.processed, line.retrying, line.dead_letters) == (2, 0, {})
    overview = text_of(pages, "/")
    assert "Dead letters 0" in overview
    assert "Wait for another attempt 0" in overview
    text = text_of(pages, "/subscriber?id=billing")
    assert "None waits." in text
    assert "a full disk" not in text


def test_the_outbox_shows_what_waits_where_and_why(pages: TestClient, engine: Engine) -> None:
    class Refusing(RecordingPublisher):
        def send(self, messages: object) -> list[Refused]:
            return [Refused(one, "full <b>") for one in messages]  # type: ignore[attr-defined]

    publish(engine, *outgoing(3, key="k", to="own:full"), *outgoing(2, to="other:waits"))
    # What was refused is not taken for sent.
    run(
        engine,
        "INSERT INTO reported_activity (kind, name, minute, figure, count) "
        "VALUES ('destination', 'own:full', date_trunc('minute', now()), 'failed', 7777)",
    )
    relay = Relay(engine, {"own": Refusing()})
    with at_work(relay):
        wait_until(lambda: "full <b>" in text_of(pages, "/outbox"))
        text = text_of(pages, "/outbox")
    assert "other:waits 2 0 0" in text
    assert "own:full 0 0 3" in text
    assert "7,777" not in text
    assert "k own:full" in text  # the key that is held


def test_leases_show_who_works_and_who_died(pages: TestClient, engine: Engine) -> None:
    run(
        engine,
        "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, owner, acquired_at, expires_at, "
        "completed_at) SELECT 'mailing', state, 1, 1, 'host 7', now() - interval '1 min', expires, completed "
        "FROM (VALUES ('busy', now() + interval '1 h', NULL), ('dead', now() - interval '1 s', NULL), "
        "('done', NULL, now()), ('free', NULL, NULL::timestamptz)) AS one (state, expires, completed)",
    )
    text = text_of(pages, "/leases")
    assert "mailing 1 1 1 1 1 min" in text
    assert "busy mailing in flight host 7" in text
    assert "dead mailing run out host 7" in text
    assert "free mailing failed host 7" in text
    assert "done mailing" not in text


def test_leases_of_a_part_are_not_taken_for_all(
    pages: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_pages, "LOOKED_AT_BLOCKS", -1)
    run(
        engine,
        "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, failures, owner, acquired_at) "
        "VALUES ('mailing', 'a', 1, 1, 0, 'me', now())",
    )
    text = text_of(pages, "/leases")
    assert text.count("None in the part that was looked at.") == 2, "a part that holds none"


def test_a_load_shows_its_chunks_and_what_became_of_its_rows(pages: TestClient, engine: Engine) -> None:
    run(
        engine,
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds, error) "
        "VALUES ('0a1b2c3d4e5f', 'billing', 'events.jsonl', '', 'copy', 5, '[]', 'the disk is full')",
    )
    run(
        engine,
        "INSERT INTO bulk_load_chunk (run_id, chunk, rows_read, rows_rejected, already_processed, applied) "
        "SELECT '0a1b2c3d4e5f', n, 100, n, 10, 90 - n FROM generate_series(0, 2) AS n",
    )
    text = text_of(pages, "/loads")
    assert "0a1b2c3d4e5f billing failed events.jsonl 3 of 5" in text
    assert "the disk is full" in text
    markup = pages.get("/loads?run=0a1b2c3d4e5f").text
    assert [markup.count(f'<li class="{state}"') for state in ("done", "rejected", "open")] == [1, 2, 2]
    assert "Run" not in text_of(pages, "/loads?run=none").partition("Bulk loads Run")[2]


def test_maintenance_shows_audits_and_what_people_did(pages: TestClient, engine: Engine) -> None:
    with engine.begin() as connection:
        note_action(connection, "pause", "earlier", by="anna")
        for balanced in (*[False] * 60, True):
            detail = {"balanced": balanced, "seconds": 1.5, "counts": {"processed": 7, "sent_again": 1}}
            note_action(connection, "audit", "billing", by="cron", detail=detail)
        note_action(connection, "pause", "billing", by="anna <b>", detail={"note": "repair"})
    text = text_of(pages, "/maintenance")
    assert "Nothing is forgotten here" in text
    assert "billing balanced" in text
    assert "not balanced" not in text  # the last one counts
    assert "7 processed , 1 sent again" in text or "7 processed, 1 sent again" in text
    assert "anna <b> pause billing note: repair" in text
    assert "anna pause earlier" in text  # many audits hide nothing


def test_pages_cost_little_where_there_is_much(
    open_dashboard: Callable[..., TestClient], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans, not times: nothing reads a whole table; two pages read its end. The times are in benchmarks/."""
    monkeypatch.setattr(inbox_activity, "LOOKED_AT_BLOCKS", 10)
    run(
        engine,
        "INSERT INTO processed_message (subscriber_id, message_id) SELECT 's' || mod(n, 3), 'm' || n "
        "FROM generate_series(1, 30000) AS n",
    )
    run(engine, "ANALYZE processed_message")
    pages = open_dashboard()
    before = read_of(engine)
    for path in ("/", "/subscriber?id=s1", "/outbox", "/leases", "/loads", "/maintenance"):
        assert pages.get(path).status_code == 200
    assert read_of(engine) - before < 5000


def read_of(engine: Engine) -> int:
    """How many rows of the inbox were read without its key."""
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
        connection.commit()
        found = connection.exec_driver_sql(
            "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relid = 'processed_message'::regclass"
        )
        return int(found.scalar_one())


def test_what_waits_for_workers_is_no_matter_of_relays(
    pages: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(engine, *outgoing(5, to="inbox:billing"))
    DeadLetters(engine).park(DeadLetter("billing", "m", Reason.FAILED, "no", 3, "inbox:billing", b"{}"))
    row = row_of(text_of(pages, "/outbox"), "inbox:billing 5 0 0", "Held keys")
    assert "no worker is at work start a PostgresWorker of billing" in row
    run(
        engine,
        "INSERT INTO worker_report (worker_id, subscriber_id, source, host, pid, version, state, per_second) "
        "VALUES ('w', 'billing', 'inbox:billing', 'h', 1, '1', 'working', '{\"processed\": 0.5}')",
    )
    pause(engine, subscriber_id="billing", by="anna")
    row = row_of(text_of(pages, "/outbox"), "inbox:billing paused by anna 5 0 0", "Held keys")
    assert "1 at work 0.5 a second; what waits takes 10" in row
    assert 'href="/letters?subscriber=billing">1</a>' in pages.get("/outbox").text
    assert '<div class="tile "><dt>Relays</dt>' in pages.get("/outbox").text, "nothing is wrong without one"
    run(engine, "ANALYZE outbox_message")
    monkeypatch.setattr(outbox_page, "LOOKED_AT", 1)
    row = row_of(text_of(pages, "/outbox"), "inbox:billing paused by anna", "Held keys")
    assert re.search(r"1 at work 0.5 a second; what waits takes \d+", row), "estimated"
