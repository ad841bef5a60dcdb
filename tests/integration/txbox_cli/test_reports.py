"""The commands that report and repair, against a real database and a real queue."""

import json
import os
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

import boto3
import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.aws.queues import held
from support.program import COMMAND, Ended
from support.txbox.leases import acquired, dynamodb_store
from txbox import DeadLetter, DeadLetters, Failures, Inbox, Outbox, Reason
from txbox.backoff import Backoff
from txbox.leases import PostgresLedger
from txbox.maintenance.rotation import generations
from txbox_migrations import LATEST

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

Txbox = Callable[..., Ended]

NOTHING_IN_THE_OUTBOX = """{
  "messages": 0, "exact": true, "removed_rows": 0, "destinations": [], "in_time": true, "relays": [],
  "relays_in_time": true,
  "sent_per_second": 0.0, "kept_messages": 0, "kept_exact": true, "kept_since": null, "snapshot_holders": [],
  "sees_all_sessions": true
}"""

LONG_ERROR = "ValueError: " + "no stock of this one " * 20


def record(engine: Engine, subscriber: str, *message_ids: str) -> None:
    with engine.begin() as connection:
        Inbox(subscriber).record_many(connection, message_ids)


def park(engine: Engine, queue: str, message_id: str = "m-1", *, subscriber: str = "billing") -> int:
    letter = DeadLetter(
        subscriber_id=subscriber,
        message_id=message_id,
        reason=Reason.FAILED,
        error=f"{LONG_ERROR}\nsecond line \x1b[31m",
        attempts=3,
        source=queue,
        body=b'{"n": 7}\n\x1b[2J',
        headers={"trace": "abc"},
    )
    return DeadLetters(engine).park(letter)


@pytest.fixture
def busy(engine: Engine, queue: str) -> int:
    """A database where something has happened; the number of its dead letter."""
    record(engine, "billing", "a", "b", "c")
    record(engine, "shipping", "a")
    Failures(engine, "shipping").fail("s-1", ValueError("no"))
    return park(engine, queue)


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_of_nothing(txbox: Txbox) -> None:
    assert txbox("status") == Ended(0, "inbox: 0 rows\n", "")
    found = json.loads(txbox("status", "--json").out)
    leases = {"rows": 0, "exact": True, "ledgers": []}
    outbox = json.loads(NOTHING_IN_THE_OUTBOX)
    empty = ("subscribers", "blocked_loads", "conflicts", "workers", "pauses", "backlogs")
    of_nothing = {"runway": None, **{name: [] for name in empty}}
    assert found == {"inbox_rows": 0, "exact": True, **of_nothing, "outbox": outbox, "leases": leases}


def test_status_names_conflicts_and_where_they_were(txbox: Txbox, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO handler_conflict VALUES ('billing', '40P01', 'stock', 1200, '2026-01-02Z', '2026-01-03Z'), "
            "('billing', '40001', '', 3, '2026-01-01Z', '2026-01-01Z')"
        )
    lines = [line for line in txbox("status").out.splitlines() if line.startswith("conflicts: ")]
    assert [line.partition(" since ")[0] for line in lines] == [
        "conflicts: billing had 1,200 deadlocks on stock",
        "conflicts: billing had 3 serialization failures",
    ]
    (first, _) = json.loads(txbox("status", "--json").out)["conflicts"]
    assert (first["relation"], first["conflicts"]) == ("stock", 1200)


def test_status_shows_leases_where_there_are_some(txbox: Txbox, engine: Engine) -> None:
    ledger = PostgresLedger("mailing", engine=engine)
    ledger.complete(acquired(ledger, "a"))
    acquired(ledger, "b", lease_seconds=600)
    lines = [line.split() for line in txbox("status").out.splitlines()]
    assert lines[:2] == [
        ["inbox:", "0", "rows"],
        ["ledger", "completed", "in", "flight", "run", "out", "failed", "longest"],
    ]
    assert lines[2][:5] == ["mailing", "1", "1", "0", "0"]
    (found,) = json.loads(txbox("status", "--json").out)["leases"]["ledgers"]
    assert (found["subscriber_id"], found["completed"], found["in_flight"]) == ("mailing", 1, 1)


def test_status_shows_the_leases_of_a_table_in_dynamodb(txbox: Txbox, aws: object) -> None:
    client = boto3.client("dynamodb")
    store = dynamodb_store(client)
    table = store.arguments["table"]
    ledger = store.ledger()
    ledger.complete(acquired(ledger, "a"))
    acquired(ledger, "b", lease_seconds=600)
    assert "DynamoDB" not in txbox("status").out
    lines = [line.split() for line in txbox("status", "--lease-table", table).out.splitlines()]
    assert lines == [
        ["inbox:", "0", "rows"],
        ["ledger", "in", "DynamoDB", "completed", "in", "flight", "run", "out", "failed", "longest"],
        ["mailing", "1", "1", "0", "0"],
    ]
    found = json.loads(txbox("status", "--json", "--lease-table", table).out)
    assert found["lease_table"]["ledgers"][0]["completed"] == 1
    txbox("status", "--lease-table", "none").failed_in_one_line(1, "create the table none, or correct its name")
    client.close()


def test_status_has_a_line_for_each_subscriber(
    txbox: Txbox, busy: int, queue: str, sqs: "SQSClient", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # each row is one line all the same, which can be searched
    heading, billing, shipping, inbox = (line.split() for line in txbox("status").out.splitlines())
    assert heading == ["subscriber", "processed", "last", "retrying", "dead", "letters"]
    assert (billing[0], billing[1], billing[4:]) == ("billing", "3", ["0", "1", "failed"])
    assert (shipping[0], shipping[1], shipping[4:]) == ("shipping", "1", ["1", "0"])
    assert inbox == ["inbox:", "4", "rows"], "the letter's row is none that was processed"
    assert "ValueError: no stock" in txbox("dead-letters", "list").out.splitlines()[1]
    sqs.send_message(QueueUrl=queue, MessageBody="{}")
    found = json.loads(txbox("status", "--json", "--queue", queue).out)
    assert found["inbox_rows"] == 4
    billing, shipping = found["subscribers"]
    assert (billing["subscriber_id"], billing["processed"], billing["dead_letters"]) == ("billing", 3, {"failed": 1})
    assert (shipping["processed"], shipping["retrying"]) == (1, 1)
    assert found["queue"] == {"waiting": 1, "delivered": 0, "delayed": 0}
    assert "queue: 1 waiting, 0 delivered, 0 delayed\n" in txbox("status", "--queue", queue).out


def test_a_reader_that_has_read_enough_is_no_error(schema_url: str, engine: Engine, queue: str) -> None:
    # More than a pipe holds, so that the write fails while the command runs.
    for number in range(300):
        park(engine, queue, f"m-{number}")
    for command in (["dead-letters", "list"], ["dead-letters", "list", "--json"]):  # a table, and a text
        ended = subprocess.run(
            ["/bin/bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", *COMMAND, *command],
            capture_output=True,
            text=True,
            env={**os.environ, "TXBOX_DATABASE_URL": schema_url},
            timeout=60,
            check=False,
        )
        assert (ended.stderr, ended.stdout.count("\n")) == ("", 1), command


# --- db --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def empty(fresh_database: str, monkeypatch: pytest.MonkeyPatch, txbox: Txbox) -> Txbox:
    """The program on a database without our tables."""
    monkeypatch.setenv("TXBOX_DATABASE_URL", fresh_database)
    return txbox


@pytest.mark.parametrize("place", [[], ["--schema", "Odd schema", "--prefix", "p_"]], ids=str)
def test_up_check_and_down(place: list[str], empty: Txbox) -> None:
    assert empty("db", "check", *place).status == 1
    assert empty("db", "upgrade", *place).out == f"version 0 → {LATEST}\n"
    assert empty("db", "upgrade", *place).out == f"already at version {LATEST}\n"
    assert empty("db", "check", *place) == Ended(0, "the tables are right\n", "")
    assert json.loads(empty("db", "check", "--json", *place).out) == {"ok": True, "differences": []}
    assert empty("status", *place).out == "inbox: 0 rows\n"
    assert empty("dead-letters", "list", *place).out == "no dead letters\n"
    assert empty("db", "upgrade", "--to", str(LATEST), *place).out == f"already at version {LATEST}\n"
    assert empty("db", "downgrade", "--to", "0", "--yes", *place).out == f"version {LATEST} → 0\n"
    assert empty("status", *place).status == 1


def test_the_environment_names_the_place_too(empty: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXBOX_DATABASE_SCHEMA", "ours")
    monkeypatch.setenv("TXBOX_TABLE_PREFIX", "tx_")
    empty("db", "upgrade")
    monkeypatch.delenv("TXBOX_DATABASE_SCHEMA")
    monkeypatch.delenv("TXBOX_TABLE_PREFIX")
    assert empty("db", "check", "--schema", "ours", "--prefix", "tx_").status == 0
    elsewhere = empty("db", "check", "--schema", "theirs")
    assert elsewhere.status == 1
    assert "no tables that this role can see; run `txbox db upgrade --schema theirs`, or your own mi" in elsewhere.out


def test_a_table_that_was_changed_is_found(empty: Txbox, fresh_database: str) -> None:
    empty("db", "upgrade")
    engine = create_engine(fresh_database)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE processed_message ALTER COLUMN processed_at DROP NOT NULL")
    engine.dispose()
    ended = empty("db", "check")
    assert ended.status == 1
    assert "processed_at" in ended.out
    assert ended.out.endswith("the tables differ; repair them, or run `txbox db upgrade`\n")
    with engine.begin() as connection:  # as if the host's own history had made them
        connection.exec_driver_sql("DROP TABLE txbox_version")
    engine.dispose()
    ended_elsewhere = empty("db", "check")
    assert ended_elsewhere.out.endswith("the tables differ; repair them, or upgrade them in your own migrations\n")
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE processed_message RENAME TO mislaid")
    engine.dispose()
    assert "\nthe tables differ; repair them, or " in empty("db", "check").out, "one is missing, the others are there"
    found = json.loads(empty("db", "check", "--json").out)
    assert found["ok"] is False
    assert found["differences"]


# --- dead letters ----------------------------------------------------------------------------------------------------


def test_letters_are_listed(txbox: Txbox, engine: Engine, queue: str) -> None:
    first, second = park(engine, queue, "m-1"), park(engine, queue, "m-2", subscriber="shipping")
    lines = txbox("dead-letters", "list").out.splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
        [str(first), "billing", "m-1", "failed", "3"],
        [str(second), "shipping", "m-2", "failed", "3"],
    ]
    assert txbox("dead-letters", "list", "--subscriber", "shipping").out.count("\n") == 2
    assert txbox("dead-letters", "list", "--limit", "1").out.endswith(f"there may be more: --after {first}\n")
    assert "m-1" not in txbox("dead-letters", "list", "--after", str(first)).out
    found = json.loads(txbox("dead-letters", "list", "--json").out)
    assert [letter["message_id"] for letter in found] == ["m-1", "m-2"]
    assert "body" not in found[0]


def test_a_letter_is_shown_whole(txbox: Txbox, busy: int) -> None:
    shown = txbox("dead-letters", "show", str(busy)).out
    assert f"dead_letter_id: {busy}\n" in shown
    assert "second line \\x1b[31m" in shown
    assert "{'trace': 'abc'}" in shown
    assert shown.endswith('body (13 bytes):\n{"n": 7}\n\\x1b[2J\n')
    assert "\x1b" not in shown
    found = json.loads(txbox("dead-letters", "show", str(busy), "--json").out)
    assert (found["message_id"], found["headers"], found["body"]) == ("m-1", {"trace": "abc"}, '{"n": 7}\n\x1b[2J')


def test_a_letter_that_does_not_exist(txbox: Txbox) -> None:
    txbox("dead-letters", "show", "99").failed_in_one_line(1, "dead letter 99 does not exist; see `txbox dead-letters")
    ended = txbox("dead-letters", "redrive", "99")
    ended.failed_in_one_line(1, "dead letter 99 does not exist; see `txbox dead-letters list --all`")
    assert ended.out == "0 sent through again\n"
    txbox("dead-letters", "resume", "99").failed_in_one_line(
        1, "operation 99 does not exist; see `txbox dead-letters op"
    )


def test_a_letter_is_sent_through_again_once(txbox: Txbox, busy: int, queue: str, sqs: "SQSClient") -> None:
    assert txbox("dead-letters", "redrive", str(busy)) == Ended(0, "1 sent through again\n", "")
    (message,) = sqs.receive_message(QueueUrl=queue, MessageAttributeNames=["All"])["Messages"]
    assert message["MessageAttributes"]["message-id"]["StringValue"] == "m-1"
    assert txbox("dead-letters", "list").out == "no dead letters\n"
    assert "m-1" in txbox("dead-letters", "list", "--all").out
    txbox("dead-letters", "redrive", str(busy)).failed_in_one_line(1, f"dead letter {busy} was redriven before, at 2")
    found = json.loads(txbox("dead-letters", "redrive", str(busy), "--json").out)
    assert found["redriven"] == []
    assert list(found["failed"]) == [str(busy)]


def test_all_letters_of_a_subscriber_go_to_another_queue(
    txbox: Txbox, engine: Engine, make_queue: Callable[..., str], sqs: "SQSClient"
) -> None:
    other = make_queue()
    numbers = [park(engine, f"{other}-deleted", f"m-{n}") for n in range(2)]
    park(engine, f"{other}-deleted", "not this one", subscriber="shipping")
    ended = txbox("dead-letters", "redrive", "--all", "--subscriber", "billing", "--queue", other, "--json")
    found = json.loads(ended.out)
    assert (found["redriven"], found["failed"], found["pending"]) == (numbers, {}, 0)
    assert held(sqs, other)["waiting"] == 2
    assert "not this one" in txbox("dead-letters", "list").out


def test_a_name_in_the_url_is_not_taken_for_a_password(txbox: Txbox, schema_url: str) -> None:
    postgres = make_url(schema_url).set(drivername="postgres").render_as_string(hide_password=False)
    assert txbox("status", "--url", postgres).status == 0


# --- a rotating inbox ------------------------------------------------------------------------------------------------


def test_an_inbox_is_turned_into_a_rotating_one_and_back(
    empty: Txbox, fresh_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "AGAIN", Backoff(first_seconds=0.01, longest_seconds=0.02))  # else 40 s while busy
    place = ("--schema", "ours", "--prefix", "tx_")
    assert empty("db", "rotate-inbox", *place).status == 1, "there is none"
    empty("db", "upgrade", *place)
    assert empty("db", "rotate-inbox", "--back", *place).out == "the inbox is one table already\n"
    assert empty("db", "rotate-inbox", "--status", *place).out == "the inbox is one table\n"
    assert empty("db", "rotate-inbox", *place).out.endswith("the inbox rotates\n")
    assert empty("db", "rotate-inbox", *place).out == "the inbox rotates already\n"
    assert "generation 1: current" in empty("db", "rotate-inbox", "--status", *place).out
    found = json.loads(empty("db", "rotate-inbox", "--status", "--json", *place).out)
    assert (found["rotating"], found["ok"], found["generations"][0]["closed_at"]) == (True, True, None)
    assert empty("db", "check", *place).status == 0
    engine = create_engine(fresh_database)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE VIEW ours.report AS SELECT message_id FROM ours.tx_processed_message")
    in_the_way = empty("db", "rotate-inbox", "--status", *place)
    assert (in_the_way.status, "in the way: view ours.report" in in_the_way.out) == (1, True)
    assert "view ours.report" in empty("db", "rotate-inbox", "--back", *place).err
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP VIEW ours.report")
    with engine.begin() as connection:
        connection.exec_driver_sql("SELECT FROM ours.tx_processed_message")
        busy = empty("db", "rotate-inbox", "--back", *place)
        assert (busy.status, "run it again" in busy.err) == (1, True)
    engine.dispose()
    assert empty("db", "rotate-inbox", "--back", *place).out == "the inbox is one table\n"


def test_what_waits_for_workers_of_the_database_needs_no_relay(txbox: Txbox, engine: Engine) -> None:
    with engine.begin() as connection:
        Outbox().publish(connection, "inbox:billing", "{}")
    said = txbox("status").out
    assert "outbox: 1 message\n" in said, "nothing of relays"
    start = "start a PostgresWorker of billing, or `txbox worker --queue inbox:billing`"
    assert f"inbox:billing: no worker is at work; {start}\n" in said
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO worker_report (worker_id, subscriber_id, source, host, pid, version, state, per_second) "
            "VALUES ('w', 'billing', 'inbox:billing', 'h', 1, '1', 'working', '{\"processed\": 0.5}')"
        )
        Outbox().publish(connection, "own:a", "{}")
    said = txbox("status").out
    assert "inbox:billing: 1 worker, 0.5 per second; 1 message, done in 2 s\n" in said
    assert "outbox: 2 messages; no relay is at work\n" in said
