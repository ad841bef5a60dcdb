"""What an operator asks of the outbox and does about it, against a real database."""

import json
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from support.postgres.blocking import backend_pid
from support.postgres.statements import run
from support.program import PASSWORD, Ended
from support.txbox.outbox import publish
from support.waiting import wait_until
from support.workers.memory_worker import at_work
from txbox import DeadLetters
from txbox.backoff import Backoff
from txbox.outbox import Outgoing
from txbox.outbox.sent_messages import SentMessages
from txbox.relay import OutboxMessage, Refused, Relay

Txbox = Callable[..., Ended]

LATER = Backoff(first_seconds=600, longest_seconds=600)


class Refuses:
    def send(self, messages: "list[OutboxMessage]") -> list[Refused]:
        return [Refused(message, f"no \x1b[31mstock\nof {message.body!r}") for message in messages]


def outbox_rows(engine: Engine) -> list[tuple[object, ...]]:
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT message_id, destination, key, headers, body FROM outbox_message ORDER BY position"
        )
        return [tuple(row) for row in found]


def refuse(engine: Engine, *messages: Outgoing, max_attempts: int | None = 1) -> list[str]:
    """Publish messages and have a relay try each of them once."""
    message_ids = publish(engine, *messages)
    relay = Relay(engine, {"own": Refuses()}, max_attempts=max_attempts, backoff=LATER, listen=False)
    with at_work(relay):
        wait_until(lambda: relay.failed == len(messages), "every message was tried")
    return message_ids


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_has_a_line_for_each_destination_and_each_relay(txbox: Txbox, engine: Engine) -> None:
    refuse(engine, Outgoing("own:a", "1"), max_attempts=None)
    refuse(engine, Outgoing("own:b", "1"))
    publish(engine, Outgoing("own:a", "2"), Outgoing("own:a", "3", delay=3600), Outgoing("own:c", "4"))
    run(engine, "UPDATE outbox_message SET published_at = now() - interval '130 minutes' WHERE body = '1'")
    run(
        engine,
        "INSERT INTO outbox_relay (relay_id, host, pid, sent, failed, sent_per_second, started_at, seen_at) VALUES "
        "('1', 'host-a', 11, 1234, 2, 50.25, now() - interval '1 day', now()), "
        "('2', 'host-b', 12, 20, 0, 7, now() - interval '1 day', now() - interval '125 min')",
    )
    ended = txbox("status", "--all")
    assert (ended.status, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    inbox, headings, a, b, c, of_relays, alive, stale, outbox = (line.split() for line in ended.out.splitlines())
    assert inbox == ["inbox:", "0", "rows"]
    assert headings == ["destination", "waiting", "delayed", "retrying", "oldest", "dead", "letters", "error"]
    assert a == ["own:a", "1", "1", "1", "2", "h", "10", "min", "0", "no", "\\x1b[31mstock", "(refused", "1", "time)"]
    assert (b, c[:4], c[-1]) == (["own:b", "0", "0", "0", "1"], ["own:c", "1", "0", "0"], "0")
    assert of_relays == ["relay", "state", "sent", "refused", "per", "second", "version", "seen"]
    assert alive[:5] == ["host-a", "11", "1,234", "2", "50.2"]
    assert stale == ["host-b", "12", "20", "0", "7.0", "2", "h", "5", "min", "ago:", "is", "it", "gone?"]
    assert " ".join(outbox) == "outbox: 4 messages; 1 relay, 50.2 sent per second"
    found = json.loads(txbox("status", "--json").out)["outbox"]
    assert [line["dead_letters"] for line in found["destinations"]] == [0, 1, 0]
    assert [line["stale"] for line in found["relays"]] == [False, True]


def test_relays_that_are_gone_are_one_line(txbox: Txbox, engine: Engine) -> None:
    add = "INSERT INTO outbox_relay (relay_id, host, pid, started_at, seen_at) "
    run(engine, f"{add} VALUES ('1', 'host-b', 12, now() - interval '1 day', now() - interval '125 min')")
    out = txbox("status").out
    assert out.splitlines()[1:] == [
        "gone: the relay host-b 12, seen 2 h 5 min ago",
        "outbox: 0 messages; no relay is at work",
    ]
    run(
        engine, f"{add} SELECT 'x' || n, 'host-c', n, now(), now() - n * interval '1 h' FROM generate_series(3, 6) AS n"
    )
    run(engine, f"{add} VALUES ('9', 'host-a', 11, now(), now())")
    _, headings, alive, gone, summary = txbox("status").out.splitlines()
    assert headings.split()[0] == "relay"
    assert alive.split()[:5] == ["host-a", "11", "0", "0", "–"]  # noqa: RUF001
    assert gone == "gone: 5 relays, the last of them seen 2 h 5 min ago; --all shows them"
    assert summary == "outbox: 0 messages; 1 relay, – sent per second"  # noqa: RUF001
    assert len(json.loads(txbox("status", "--json").out)["outbox"]["relays"]) == 6
    assert txbox("status", "--all").out.count("is it gone?") == 5


def test_status_says_why_a_destination_gets_nothing(txbox: Txbox, engine: Engine) -> None:
    said = json.dumps({"own:a": f"no such queue\n at x://u:{PASSWORD}@h/q", "own:b": "nothing waits there"})
    run(
        engine,
        "INSERT INTO outbox_relay (relay_id, host, pid, seen_at, outages) VALUES "
        f"('1', 'a', 1, now(), '{said}'), ('2', 'b', 2, now(), '{{}}'), "
        f"('3', 'c', 3, now() - interval '5 min', '{{\"own:a\": \"stale\"}}')",
    )
    publish(engine, Outgoing("own:a", "1"))
    out = txbox("status").out
    assert [line for line in out.splitlines() if line.startswith("unreachable")] == [
        "unreachable: own:a: no such queue\\n at x://u:***@h/q (1 of 2 relays)"
    ]
    as_json = txbox("status", "--json").out
    assert PASSWORD not in out + as_json
    found = json.loads(as_json)["outbox"]
    (line,) = found["destinations"]
    assert (line["unreachable"], line["unreachable_relays"]) == ("no such queue\n at x://u:***@h/q", 1)
    assert found["relays"][0]["outages"]["own:b"] == "nothing waits there"


def test_status_says_what_it_has_not_counted(txbox: Txbox, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbox.outbox.status.COUNTED_MESSAGES", 10)
    publish(engine, *(Outgoing("own:a", "1", key="k") for _ in range(100)))
    run(
        engine, "INSERT INTO outbox_sent SELECT n::text, n, 'a', NULL, '{}', '', now() FROM generate_series(1, 20) AS n"
    )
    run(engine, "ANALYZE outbox_message")
    run(engine, "ANALYZE outbox_sent")
    ended = wait_until(lambda: (found := txbox("status")).out.endswith("about 20 sent messages kept\n") and found)
    assert ended.out.splitlines()[2].split()[:5] == ["own:a", "≥", "10", "0", "0"]
    assert "outbox: about 100 messages; no relay is at work; about 20 sent" in ended.out


def test_status_says_who_blocks(txbox: Txbox, engine: Engine, schema_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_SECONDS", 0.0)
    monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_TRANSACTIONS", 5)
    blocker = create_engine(schema_url, isolation_level="REPEATABLE READ")
    with blocker.connect() as connection:
        pid = backend_pid(connection)
        connection.exec_driver_sql(f"SELECT '{PASSWORD}' AS password")
        for _ in range(6):
            run(engine, "SELECT pg_current_xact_id()")
        out = txbox("status").out
        assert f"blocks: session {pid} (of " in out
        assert "idle in transaction) has kept Postgres from cleaning up for " in out
        assert f": SELECT ? AS password; to end it: SELECT pg_terminate_backend({pid})\n" in out
        assert PASSWORD not in out
        found = json.loads(txbox("status", "--json").out)["outbox"]["snapshot_holders"]
        assert pid in [holder["pid"] for holder in found]
    blocker.dispose()


# --- dead letters of the relay ---------------------------------------------------------------------------------------


def test_letters_of_a_relay_go_back_into_the_outbox(txbox: Txbox, engine: Engine) -> None:
    first, other = refuse(
        engine, Outgoing("own:a", b"\x00body", key="k", headers={"h": "1"}), Outgoing("own:b", "other")
    )
    lines = txbox("dead-letters", "list").out.splitlines()
    assert {line.split()[1] for line in lines[1:]} == {"txbox:outbox:own:a", "txbox:outbox:own:b"}
    (line,) = txbox("dead-letters", "list", "--destination", "own:a").out.splitlines()[1:]
    number = line.split()[0]
    assert first in line
    shown = txbox("dead-letters", "show", number).out
    assert "key:            k\n" in shown
    assert "source:         own:a\n" in shown
    said = "1 put into the outbox again; a relay sends it\n"
    nobody = "txbox: no relay is at work; start one: txbox relay\n"
    assert txbox("dead-letters", "redrive", number, number) == Ended(0, said, nobody)
    assert outbox_rows(engine) == [(first, "own:a", "k", {"h": "1"}, b"\x00body")]
    txbox("dead-letters", "redrive", number).failed_in_one_line(1, f"dead letter {number} was redriven before, at 2")
    headings, line = txbox("dead-letters", "list", "--all", "--destination", "own:a").out.splitlines()
    assert headings.split()[-2:] == ["state", "error"]
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  *redriven \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)
    run(engine, "INSERT INTO outbox_relay (relay_id, host, pid) VALUES ('1', 'a', 1)")
    ended = txbox("dead-letters", "redrive", "--all", "--destination", "own:b", "--json")
    assert ended.err == ""
    assert len(json.loads(ended.out)["redriven"]) == 1
    assert [row[0] for row in outbox_rows(engine)] == [first, other]
    assert DeadLetters(engine).list() == []


def test_a_letter_of_a_relay_has_no_queue(txbox: Txbox, engine: Engine, queue: str) -> None:
    refuse(engine, Outgoing("own:a", "1"))
    txbox("dead-letters", "redrive", "--all", "--queue", queue).failed_in_one_line(
        1, "was never sent, so it has no queue; leave out --queue"
    )
    assert outbox_rows(engine) == []
    txbox("dead-letters", "list", "--subscriber", "a", "--destination", "own:a").failed_in_one_line(2, "give one of")


# --- what was sent ---------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(engine: Engine) -> Engine:
    """A database where 2,500 messages were sent and kept, one in each second of the last hour."""
    run(
        engine,
        "INSERT INTO outbox_sent SELECT 'm-' || n, n, CASE n %% 2 WHEN 0 THEN 'own:even' ELSE 'own:odd' END, "
        "'k' || n %% 10, '{\"h\": \"secret\"}', convert_to('secret ' || n, 'UTF8'), now(), "
        "now() - interval '1 hour' + n * interval '1 s' FROM generate_series(1, 2500) AS n",
    )
    return engine


def test_what_was_sent_is_listed_without_what_is_in_it(txbox: Txbox, kept: Engine) -> None:
    lines = txbox("outbox", "sent", "--limit", "2").out.splitlines()
    assert lines[0].split() == ["sent", "position", "destination", "key", "message", "bytes"]
    assert [line.split()[1:] for line in lines[1:3]] == [
        ["2500", "own:even", "k0", "m-2500", "11"],
        ["2499", "own:odd", "k9", "m-2499", "11"],
    ]
    assert lines[3] == f"there may be more: --until {lines[2].split()[0]} --before 2499, or a larger --limit"
    assert "secret" not in txbox("outbox", "sent").out + txbox("outbox", "sent", "--json").out


def test_pages_leave_nothing_out_where_all_were_sent_at_one_time(txbox: Txbox, kept: Engine) -> None:
    run(kept, "DELETE FROM outbox_sent WHERE position > 6")
    run(kept, "UPDATE outbox_sent SET sent_at = CASE position WHEN 1 THEN now() ELSE now() - interval '1 min' END")
    seen: list[str] = []
    options: list[str] = []
    while len(seen) < 6:
        out = txbox("outbox", "sent", "--limit", "2", *options).out
        found = re.findall(r"m-\d", out)
        assert found
        seen += found
        options = out.splitlines()[-1].removeprefix("there may be more: ").partition(",")[0].split()
    assert seen == ["m-1", "m-6", "m-5", "m-4", "m-3", "m-2"]
    txbox("outbox", "sent", "--before", "4").failed_in_one_line(2, "--before goes with --until TIME")


def test_what_was_sent_is_found(txbox: Txbox, kept: Engine) -> None:
    def positions(*options: str) -> list[int]:
        return [one["position"] for one in json.loads(txbox("outbox", "sent", "--json", *options).out)]

    assert positions("--message-id", "m-7") == [7]
    assert positions("--key", "k3", "--limit", "2") == [2493, 2483]
    assert positions("--destination", "own:even", "--limit", "2") == [2500, 2498]
    assert positions("--since", "1s") == []
    assert len(positions("--since", "2h", "--limit", "3000")) == 2500
    assert txbox("outbox", "sent", "--key", "none") == Ended(0, "no such message is kept\n", "")
    assert txbox("outbox", "sent", "--message-id", "m-7", "--bodies").out.endswith("body:\nsecret 7\n\n")
    (whole,) = json.loads(txbox("outbox", "sent", "--message-id", "m-7", "--bodies", "--json").out)
    assert (whole["body"], whole["headers"]) == ("secret 7", {"h": "secret"})


def test_a_replay_only_counts_until_it_is_told_to_go(txbox: Txbox, kept: Engine) -> None:
    ended = txbox("outbox", "replay", "--key", "k3")
    assert ended.status == 0
    assert ended.out.startswith("250 messages, sent from 2")
    assert ended.out.endswith("; --yes puts them into the outbox again\n")
    assert outbox_rows(kept) == []
    assert txbox("outbox", "replay", "--key", "none") == Ended(0, "no such message is kept\n", "")
    assert txbox("outbox", "replay", "--key", "none", "--yes") == Ended(0, "no such message is kept\n", "")
    assert txbox("outbox", "replay", "--key", "k3", "--yes") == Ended(0, "250 messages are in the outbox again\n", "")
    rows = outbox_rows(kept)
    assert rows[0] == ("m-3", "own:odd", "k3", {"h": "secret"}, b"secret 3")
    assert [row[0] for row in rows] == [f"m-{number}" for number in range(3, 2500, 10)]
    assert json.loads(txbox("outbox", "replay", "--json").out) == {
        "found": 2500,
        "copies_left_out": 0,
        "published": 0,
    }


def test_copies_of_an_earlier_replay_are_left_out_and_counted(txbox: Txbox, kept: Engine) -> None:
    run(
        kept,
        "INSERT INTO outbox_sent SELECT message_id, position + 3000, destination, key, headers, body, published_at, "
        "now() FROM outbox_sent WHERE key = 'k3' LIMIT 100",
    )
    ended = txbox("outbox", "replay", "--key", "k3")
    assert "250 messages, sent from " in ended.out
    assert ended.out.endswith("; 100 later copies of the same left out; --yes puts them into the outbox again\n")
    ended = txbox("outbox", "replay", "--key", "k3", "--yes")
    assert ended.out == "250 messages are in the outbox again; 100 later copies of the same left out\n"
    assert len(outbox_rows(kept)) == 250


def test_where_nothing_is_kept_it_says_how_to_keep(txbox: Txbox) -> None:
    nothing = Ended(0, "nothing is kept; `txbox relay --keep-sent 7d` keeps what it sends\n", "")
    assert txbox("outbox", "sent") == nothing
    assert txbox("outbox", "replay", "--yes") == nothing


def test_a_replay_that_is_stopped_says_how_far_it_came_and_goes_on(
    txbox: Txbox, kept: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = SentMessages.replay
    asked: list[int] = []

    def stopped(self: SentMessages, *arguments: Any) -> int:
        if not asked:
            asked.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # while the chunk is under way
        return replay(self, *arguments)

    monkeypatch.setattr(SentMessages, "replay", stopped)
    txbox("outbox", "replay", "--yes").failed_in_one_line(
        130, "interrupted; 1,000 messages are in the outbox again; continue with --after 1000 and the same filters"
    )
    monkeypatch.setattr(SentMessages, "replay", replay)
    ended = txbox("outbox", "replay", "--yes", "--after", "1000", "--json")
    assert json.loads(ended.out) == {"found": 1500, "copies_left_out": 0, "published": 1500}
    assert [row[0] for row in outbox_rows(kept)] == [f"m-{number}" for number in range(1, 2501)]


def test_a_replay_that_fails_says_how_far_it_came(txbox: Txbox, kept: Engine) -> None:
    run(kept, "UPDATE outbox_sent SET destination = 'nowhere' WHERE position = 1700")
    ended = txbox("outbox", "replay", "--yes")
    ended.failed_in_one_line(1, "nowhere' is not a destination", "1,000 messages are in the outbox again; continue")
    txbox("outbox", "replay", "--yes", "--after", "1699").failed_in_one_line(1, "nowhere' is not a destination")
    assert len(outbox_rows(kept)) == 1000


@pytest.mark.parametrize("command", ["sent", "replay"])
def test_times_that_cannot_be_meant(command: str, txbox: Txbox) -> None:
    txbox("outbox", command, "--since", "2026-03-01").failed_in_one_line(2, "--since needs a zone")
    txbox("outbox", command, "--until", "soon").failed_in_one_line(2, "--until must be a time with its zone")
    txbox("outbox", command, "--since", "99999999d").failed_in_one_line(2, "--since must be a time with its zone")
    for since, until in (("1h", "2h"), ("1h", "2026-01-01T00:00Z"), ("2026-01-02T00:00Z", "2026-01-01T00:00Z")):
        ended = txbox("outbox", command, "--since", since, "--until", until)
        ended.failed_in_one_line(2, "--until is not after --since")
