"""``txbox audit``, against real tables."""

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from support.postgres.statements import run
from support.postgres.tables import make_tables
from support.program import PASSWORD, Ended
from support.txbox.outbox import numbered, publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.memory_worker import at_work
from txbox.operations.actions import read_actions
from txbox.outbox.sent_messages import SentMessages
from txbox.relay import Relay

Txbox = Callable[..., Ended]
TO = ("--destination", "own:somewhere", "--subscriber", "billing")


def printed(ended: Ended, status: int, *fragments: str) -> None:
    assert ended.status == status, (ended.out, ended.err)
    for fragment in fragments:
        assert fragment in ended.out
    assert PASSWORD not in ended.out


@pytest.fixture
def sent(engine: Engine) -> list[str]:
    """Three messages that were sent an hour ago; the first two are processed."""
    message_ids = publish(engine, *numbered(3))
    with at_work(Relay(engine, {"own": RecordingPublisher()}, keep_sent=timedelta(days=1), listen=False)):
        wait_until(lambda: len(SentMessages(engine).find()) == 3, "all are sent and kept")
    run(engine, "UPDATE outbox_sent SET sent_at = sent_at - interval '1 hour'")
    for message_id in message_ids[:2]:
        run(engine, "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', %s)", (message_id,))
    return message_ids


def test_what_is_missing_is_named_and_the_status_is_1(txbox: Txbox, sent: list[str]) -> None:
    ended = txbox("audit", *TO)
    printed(ended, 1, "own:somewhere → billing", f"missing: {sent[2]}, sent 2", "NOT BALANCED: 1 fault", "differs: ")
    found = json.loads(txbox("audit", *TO, "--json").out)
    assert found["balanced"] is False
    assert found["counts"]["sent"] == 3
    assert [(one["kind"], one["message_id"]) for one in found["findings"]] == [("missing", sent[2])]


def test_what_is_all_there_is_balanced(txbox: Txbox, engine: Engine, sent: list[str]) -> None:
    run(engine, "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', %s)", (sent[2],))
    printed(txbox("audit", *TO), 0, "balanced; 1 stretch in", "sent messages are kept since")
    ended = txbox("audit", *TO, "--json")
    assert ended.status == 0
    assert json.loads(ended.out)["counts"]["processed"] == 3
    printed(txbox("audit", *TO[:2], "--subscriber", "nobody", "--in-flight", "2h"), 0, "in flight")


def test_a_result_can_be_put_on_record(txbox: Txbox, engine: Engine, sent: list[str]) -> None:
    for record, rows in ((), 0), (("--record",), 1):
        txbox("audit", *TO, *record)
        with engine.connect() as connection:
            found = read_actions(connection)
        assert len(found) == rows
    assert (found[0].action, found[0].target, found[0].detail["balanced"]) == ("audit", "billing", False)
    assert found[0].detail["counts"]["missing"] > 0


def test_where_nothing_was_sent_nothing_is_proved(txbox: Txbox, sent: list[str]) -> None:
    elsewhere = ("audit", "--destination", "own:typo", "--subscriber", "billing", "--shared")
    for arguments in ((), ("--since", "2h"), ("--since", "2h", "--json")):
        txbox(*elsewhere, *arguments).failed_in_one_line(1, "nothing was compared for own:typo:")
    txbox("audit", *TO, "--since", "2100-01-01T00:00Z").failed_in_one_line(1, "nothing was compared for own:somewhere:")


def test_each_destination_has_to_have_something_to_compare(txbox: Txbox, engine: Engine, sent: list[str]) -> None:
    both = ("audit", *TO, "--destination", "own:typo")
    printed(txbox(*both), 1, "missing: ", "nothing was compared for own:typo:", "NOT BALANCED: 1 fault")
    run(engine, "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', %s)", (sent[2],))
    txbox(*both).failed_in_one_line(1, "nothing was compared for own:typo:")
    txbox(*both, "--shared", "--since", "2h").failed_in_one_line(1, "nothing was compared for own:typo:")


def test_the_inbox_may_be_elsewhere(txbox: Txbox, sent: list[str], fresh_engine: Engine) -> None:
    make_tables(fresh_engine, "there", "its_")
    url = fresh_engine.url.render_as_string(hide_password=False)
    elsewhere = ("--inbox-url", url, "--inbox-schema", "there", "--inbox-prefix", "its_")
    printed(txbox("audit", *TO, *elsewhere, "--limit", "1"), 1, "3 faults", "2 more are not named")
    insert = "INSERT INTO there.its_processed_message (subscriber_id, message_id) VALUES ('billing', %s)"
    for message_id in sent:
        run(fresh_engine, insert, (message_id,))
    printed(txbox("audit", *TO, *elsewhere), 0, "balanced")


def test_the_inbox_is_balanced_by_itself(txbox: Txbox, engine: Engine, sent: list[str]) -> None:
    for arguments in ((), (*TO, "--inbox-only")):
        not_compared = "not compared with what was sent: messages that are missing, overdue or foreign are not found"
        printed(txbox("audit", *arguments), 0, "billing", not_compared, "balanced")
    run(engine, "UPDATE processed_message SET dead_letter_id = 77 WHERE message_id = %s", (sent[0],))
    printed(txbox("audit", "--subscriber", "billing"), 1, f"unparked: {sent[0]}", "NOT BALANCED")
    [found] = json.loads(txbox("audit", "--json").out)
    assert found["counts"]["unparked"] == 1
    assert found["not_judged"] == ["missing", "overdue", "foreign"]
    run(engine, "DELETE FROM processed_message")
    printed(txbox("audit"), 0, not_compared, "the inbox is empty")


@pytest.mark.parametrize(
    ("arguments", "status", "fragment"),
    [
        (("--destination", "own:x"), 2, "--subscriber is missing"),
        (("--shared",), 2, "--shared"),
        ((*TO, "--in-flight", "soon"), 2, "--in-flight"),
        ((*TO, "--since", "yesterday"), 2, "--since"),
        (TO, 1, "--keep-sent"),
        (("--subscriber", "biling"), 1, "no subscriber biling has left a trace"),
        (("--schema", "nowhere"), 1, "txbox db upgrade --schema nowhere"),
    ],
    ids=["subscriber", "shared", "in flight", "since", "nothing kept", "unknown", "no tables"],
)
def test_what_cannot_be_audited_is_one_line(
    txbox: Txbox, arguments: tuple[str, ...], status: int, fragment: str
) -> None:
    txbox("audit", *arguments).failed_in_one_line(status, fragment)


def test_passwords_stay_out_of_what_is_said(txbox: Txbox) -> None:
    url = f"postgresql://someone:{PASSWORD}@127.0.0.1:1/none"
    txbox("audit", *TO, "--inbox-url", url).failed_in_one_line(1)
