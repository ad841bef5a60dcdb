"""The page of one message: its whole way."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from support.postgres.statements import run
from support.txbox.outbox import publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make
from txbox import Failures, Inbox, Message, Outgoing
from txbox.leases import PostgresLedger
from txbox.relay import Relay
from txbox_dashboard.pages import messages
from txbox_workers.memory_source import MemorySource

from .test_letters import park
from .test_pages import text_of


def test_an_id_that_nothing_knows(pages: TestClient) -> None:
    assert "Nothing is known of this id" in text_of(pages, "/message?id=none")


def test_the_way_of_a_message_over_outbox_inbox_lease_and_letters(pages: TestClient, engine: Engine) -> None:
    publish(engine, Outgoing("own:shop", "{}", key="k7", message_id="order-1"))
    assert "published, waits own:shop" in text_of(pages, "/message?id=order-1")
    relay = Relay(engine, {"own": RecordingPublisher()}, keep_sent=timedelta(days=1))
    with at_work(relay):
        wait_until(lambda: "sent own:shop key k7" in text_of(pages, "/message?id=order-1"))
    with engine.begin() as connection:
        Inbox("billing").record(connection, "order-1")
    PostgresLedger("mailing", engine=engine).acquire("order-1")
    Failures(engine, "audit").fail("order-1", ValueError("not yet"))
    (number,) = park(engine, "order-1", subscriber_id="stock", error="no such item")
    text = text_of(pages, "/message?id=order-1")
    for words in (
        "processed billing",
        "lease acquired mailing by",
        "waits for another attempt, 1 counted audit ValueError: not yet",
        f"parked: failed stock no such item dead letter {number}",
    ):
        assert words in text
    assert text.index("sent own:shop") < text.index("processed billing") < text.index("lease acquired")


def test_a_parked_message_leads_to_its_letter(pages: TestClient, engine: Engine) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no")

    source = MemorySource([Message("a", b"")])
    with at_work(make(source, engine, refuse, max_attempts=2)):
        assert source.wait_until_empty(20)
    text = text_of(pages, "/message?id=a")
    assert "recorded as parked billing dead letter" in text
    assert "parked: failed billing ValueError: no" in text
    assert text.index("failed, delivery 1 billing") < text.index("failed, delivery 2 billing") < text.index("parked: ")


def test_a_letter_of_a_relay_is_known_also_when_it_does_not_wait_any_more(pages: TestClient, engine: Engine) -> None:
    (number,) = park(engine, "a", subscriber_id="txbox:outbox:own:shop", error="too large")
    run(engine, "UPDATE dead_letter SET discarded_at = now(), discarded_by = 'anna'")
    text = text_of(pages, "/message?id=a")
    assert f"parked: failed own:shop too large dead letter {number}" in text
    assert "discarded own:shop by anna" in text


def test_what_was_not_searched_is_not_taken_for_unknown(
    pages: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(engine, Outgoing("own:shop", "{}", message_id="waits"), Outgoing("own:shop", "{}"))
    run(engine, "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('a', 'other'), ('b', 'done')")
    run(engine, "ANALYZE outbox_message")
    monkeypatch.setattr(messages, "SEARCHED", 1)
    text = text_of(pages, "/message?id=waits")
    assert "it was never processed or parked or leased here, or that is forgotten" in text
    assert "whether it waits there is not known" in text
    monkeypatch.setattr(messages, "SUBSCRIBERS", 1)
    text = text_of(pages, "/message?id=done")
    assert "Nothing is known of this id. Too many messages" in text
    assert "Only the first 1 subscribers were asked." in text
    monkeypatch.setattr(messages, "SEARCHED", 100)
    assert "it was never published here, or that" in text_of(pages, "/message?id=done")


def test_the_key_of_a_letter_is_shown(pages: TestClient, engine: Engine) -> None:
    park(engine, "a", order_key="k7")
    assert "parked: failed billing key k7 ValueError: no" in text_of(pages, "/message?id=a")


def test_a_load_that_ran_then_is_named(pages: TestClient, engine: Engine) -> None:
    run(
        engine,
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds) "
        "VALUES ('0a1b2c3d4e5f', 'billing', 'events.jsonl', '', 'copy', 5, '[]')",
    )
    run(engine, "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', 'a'), ('other', 'a')")
    text = text_of(pages, "/message?id=a")
    assert text.count("a bulk load was running billing of events.jsonl") == 1
