"""``txbox dead-letters`` by filter: what is meant, what is done, what stays on record."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine

from support.aws.queues import held, send
from support.postgres.statements import bytes_fetched
from support.program import Ended, Running
from support.waiting import wait_until
from txbox import DeadLetter, DeadLetters, Inbox, Reason
from txbox.dead_letters import LetterFilter, LetterOperations, OperationKind
from txbox_cli.commands.dead_letters.letters import BODY_BYTES, PART_BYTES

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

Txbox = Callable[..., Ended]


def park(engine: Engine, queue: str, message_id: str, **changes: object) -> int:
    letter = {
        "subscriber_id": "billing",
        "message_id": message_id,
        "reason": Reason.FAILED,
        "error": "ValueError: no stock",
        "attempts": 3,
        "source": queue,
        "body": b'{"customer": 7}',
        **changes,
    }
    return DeadLetters(engine).park(DeadLetter(**letter)) or 0  # type: ignore[arg-type]


@pytest.fixture
def numbers(engine: Engine, queue: str) -> list[int]:
    """Four letters that differ in what filters ask for."""
    return [
        park(engine, queue, "a", headers={"tenant": "t-1"}),
        park(engine, queue, "b", body=b'{"customer": 8}'),
        park(engine, queue, "c", reason=Reason.CRASHED, error="it died"),
        park(engine, queue, "d", subscriber_id="shipping"),
    ]


EVERY_FILTER = [
    *("--subscriber", "billing", "--reason", "failed", "--reason", "crashed", "--error", "STOCK", "--since", "1h"),
    *("--until", "2999-01-01T00:00Z", "--message-id", "a", "--message-id", "b", "--header", "Tenant=t-1"),
    *("--json-path", "$.customer == 7"),
]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("list",), "no dead letters\n"),
        (("redrive", "--dry-run"), "0 letters would be sent through again\n"),
        (("redrive",), "0 sent through again\n"),
        (("discard", "--note", "x"), "0 discarded\n"),
    ],
)
def test_a_json_path_says_what_it_passes_over(
    txbox: Txbox, engine: Engine, queue: str, command: tuple[str, ...], says: str
) -> None:
    park(engine, queue, "a", body=b"customer=7")
    park(engine, queue, "b", body=b'{"customer": 7, "note": "\\u0000"}')
    park(engine, queue, "c", body=b'{"customer": 8}')
    told = "txbox: --json-path passes over 2 letters, whose bodies Postgres cannot read as JSON\n"
    assert txbox("dead-letters", *command, "--json-path", "$.customer == 7") == Ended(0, says, told)
    assert txbox("dead-letters", *command, "--message-id", "no").err == ""


def test_a_dry_run_counts_and_shows_and_does_nothing(txbox: Txbox, engine: Engine, numbers: list[int]) -> None:
    ended = txbox("dead-letters", "redrive", "--error", "stock", "--dry-run")
    lines = [line.split() for line in ended.out.splitlines()]
    assert lines[0] == ["subscriber", "reason", "letters", "oldest"]
    assert [line[:3] for line in lines[1:3]] == [["billing", "failed", "2"], ["shipping", "failed", "1"]]
    assert [line[:3] for line in lines[4:7]] == [
        [str(numbers[0]), "billing", "a"],
        [str(numbers[1]), "billing", "b"],
        [str(numbers[3]), "shipping", "d"],
    ]
    assert ended.out.endswith("3 letters would be sent through again\n")
    found = json.loads(txbox("dead-letters", "discard", "--reason", "crashed", "--dry-run", "--json").out)
    assert found["letters"] == 1
    assert [letter["message_id"] for letter in found["first"]] == ["c"]
    assert len(DeadLetters(engine).list()) == 4
    assert txbox("dead-letters", "operations").out == "no operations\n"


def test_a_dry_run_leaves_out_what_the_redrive_would(txbox: Txbox, engine: Engine, queue: str) -> None:
    for id_, reason in (("a", Reason.FAILED), ("x", Reason.BEHIND), ("y", Reason.BEHIND)):
        park(engine, queue, id_, order_key="ann", reason=reason)
    park(engine, queue, "old", reason=Reason.EXPIRED)
    redrive, discard = (("dead-letters", action, "--dry-run") for action in ("redrive", "discard"))
    assert txbox(*redrive, "--reason", "behind").out.endswith(
        "0 letters would be sent through again; 2 letters not, behind others of the same key that are not sent\n"
    )
    assert json.loads(txbox(*redrive, "--reason", "behind", "--json").out)["letters"] == 0
    assert "2 letters would be discarded\n" in txbox(*discard, "--reason", "behind").out
    out = txbox(*redrive, "--all").out
    assert out.endswith("\n3 letters would be sent through again; 1 expired letter only with --expired\n")
    assert txbox(*redrive, "--all", "--expired").out.endswith("\n4 letters would be sent through again\n")
    assert txbox(*discard, "--all").out.endswith("\n4 letters would be discarded\n")


def test_a_redrive_by_filter_is_on_record(
    txbox: Txbox, engine: Engine, queue: str, sqs: "SQSClient", numbers: list[int]
) -> None:
    which = [*EVERY_FILTER, "--source", queue]
    listed = json.loads(txbox("dead-letters", "list", *which, "--json").out)
    assert [letter["dead_letter_id"] for letter in listed] == numbers[:1]
    arguments = [*which, "--note", "repaired", "--by", "kim", "--per-second", "50"]
    assert txbox("dead-letters", "redrive", *arguments) == Ended(0, "1 sent through again\n", "")
    assert held(sqs, queue)["waiting"] == 1
    assert [letter.message_id for letter in DeadLetters(engine).list()] == ["b", "c", "d"]
    assert f"redriven {DeadLetters(engine).get(numbers[0]).redriven_at:%Y-%m-%d %H:%M:%S} by kim" in (
        txbox("dead-letters", "list", "--all").out
    )
    heading, line = txbox("dead-letters", "operations").out.splitlines()
    assert heading.split() == ["no.", "kind", "requested", "by", "letters", "finished", "filter", "note"]
    assert "redrive" in line
    assert " kim " in line
    assert " 1 redriven " in line
    assert line.rstrip().endswith("repaired")
    (found,) = json.loads(txbox("dead-letters", "operations", "--json").out)
    assert found["filter"] == {
        "subscriber_id": "billing",
        "reasons": ["failed", "crashed"],
        "error": "STOCK",
        "since": f"{timedelta(hours=1)} ago",
        "until": "2999-01-01T00:00:00+00:00",
        "source": queue,
        "message_ids": ["a", "b"],
        "headers": {"Tenant": "t-1"},
        "json_path": "$.customer == 7",
    }
    assert found["options"] == {"per_second": 50}
    assert txbox("dead-letters", "operations", "--unfinished").out == "no operations\n"
    done = json.loads(txbox("dead-letters", "resume", str(found["operation_id"]), "--json").out)
    assert (done["redriven"], done["pending"]) == ([], 0), "nothing is left of it"
    assert held(sqs, queue)["waiting"] == 1


def test_a_discard_takes_a_note_and_is_final(txbox: Txbox, engine: Engine, numbers: list[int]) -> None:
    txbox("dead-letters", "discard", "--subscriber", "billing").failed_in_one_line(2, "--note TEXT")
    ended = txbox("dead-letters", "discard", "--reason", "crashed", "--note", "it is known")
    assert ended == Ended(0, "1 discarded\n", "")
    assert len(DeadLetters(engine).list()) == 3
    user = f"@{os.uname().nodename}"
    state = txbox("dead-letters", "show", str(numbers[2])).out
    assert f"{user}: it is known\n" in state
    assert "discarded" in state
    txbox("dead-letters", "redrive", str(numbers[2])).failed_in_one_line(
        1, f"dead letter {numbers[2]} was discarded before, at 2"
    )
    txbox("dead-letters", "discard", str(numbers[2]), "--note", "again").failed_in_one_line(1, "was discarded before")


def test_of_a_letter_of_50_mb_no_more_is_read_than_is_printed(txbox: Txbox, engine: Engine, tmp_path: Path) -> None:
    body = b"\xff\0 a body\n" * 5_000_000
    number = str(park(engine, "queue", "a", body=body))
    for arguments in (["list"], ["redrive", "--all", "--dry-run"], ["list", "--json"]):
        with bytes_fetched(Engine) as fetched:
            assert txbox("dead-letters", *arguments).status == 0
        assert sum(fetched) < 2000, arguments
    with bytes_fetched(Engine) as fetched:
        shown = txbox("dead-letters", "show", number).out
    assert sum(fetched) < 2 * BODY_BYTES + 2000
    assert f"body (50000000 bytes; its first {BODY_BYTES}, --body-to FILE writes all):\n\\xff\\x00 a body\n" in shown
    assert shown.endswith("\\x00 a b\n")
    file = tmp_path / "body"
    with bytes_fetched(Engine) as fetched:
        ended = txbox("dead-letters", "show", number, "--body-to", str(file))
    assert f"body (50000000 bytes): in {file}\n" in ended.out
    assert file.read_bytes() == body
    assert max(fetched) < 2 * PART_BYTES + 2000
    assert json.loads(txbox("dead-letters", "show", number, "--json").out)["body_size"] == 50_000_000
    with bytes_fetched(Engine) as fetched:
        assert txbox("dead-letters", "discard", number, "--note", "it is too large").out == "1 discarded\n"
    assert sum(fetched) < 5000


def test_a_body_of_any_size_is_written_as_it_is(txbox: Txbox, engine: Engine, tmp_path: Path) -> None:
    for number, body in enumerate((b"", b"\xff", "\u202e é\r\n".encode()), 1):
        letter, file = str(park(engine, "queue", f"a{number}", body=body)), tmp_path / str(number)
        assert txbox("dead-letters", "show", letter, "--body-to", str(file)).status == 0
        assert file.read_bytes() == body
    missing = str(tmp_path / "none" / "body")
    txbox("dead-letters", "show", letter, "--body-to", missing).failed_in_one_line(1, "cannot write", missing)
    txbox("dead-letters", "show", "99", "--body-to", str(tmp_path / "99")).failed_in_one_line(1, "99")
    assert not (tmp_path / "99").exists()


def test_what_was_processed_since_is_said_and_not_sent(
    txbox: Txbox, engine: Engine, queue: str, sqs: "SQSClient", numbers: list[int]
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM processed_message WHERE message_id = 'a'")
        assert Inbox("billing").record(connection, "a")
    ended = txbox("dead-letters", "redrive", str(numbers[0]), str(numbers[1]))
    assert ended == Ended(0, "1 sent through again\n1 not sent: processed since\n", "")
    assert held(sqs, queue)["waiting"] == 1
    assert " processed since " in txbox("dead-letters", "list", "--all").out
    assert "state:          processed since\n" in txbox("dead-letters", "show", str(numbers[0])).out


def test_a_signal_ends_it_after_a_letter_and_a_resume_sends_the_rest(
    txbox: Txbox, engine: Engine, queue: str, sqs: "SQSClient"
) -> None:
    for number in range(5):
        park(engine, queue, f"m-{number}")

    def end_it() -> None:
        wait_until(lambda: len(DeadLetters(engine).list()) < 5, "the first letter being sent")
        os.kill(os.getpid(), signal.SIGTERM)

    ender = threading.Thread(target=end_it)
    ender.start()
    ended = txbox("dead-letters", "redrive", "--all", "--per-second", "0.2")
    ender.join()
    (operation,) = LetterOperations(engine).list(unfinished=True)
    left = operation.pending
    assert 0 < left < 5
    ended.failed_in_one_line(
        130, f"interrupted, {left} letters left; `txbox dead-letters resume {operation.operation_id}` goes on"
    )
    assert held(sqs, queue)["waiting"] == 5 - left
    park(engine, queue, "later")
    assert txbox("dead-letters", "resume", str(operation.operation_id), "--per-second", "1000").out == (
        f"{left} sent through again\n"
    )
    assert held(sqs, queue)["waiting"] == 5
    assert [letter.message_id for letter in DeadLetters(engine).list()] == ["later"]


def test_what_has_failed_is_tried_again_by_a_resume(
    txbox: Txbox, engine: Engine, make_queue: Callable[..., str], sqs: "SQSClient"
) -> None:
    gone = f"{make_queue()}-deleted"
    number = park(engine, gone, "m")
    ended = txbox("dead-letters", "redrive", "--subscriber", "billing")
    ended.failed_in_one_line(1, f"dead letter {number} was not sent: ", "create the queue")
    (operation,) = LetterOperations(engine).list()
    again = f"`txbox dead-letters resume {operation.operation_id}` tries what has failed again\n"
    assert ended.out == f"0 sent through again\n{again}"
    sqs.create_queue(QueueName=gone.rpartition("/")[2])
    assert txbox("dead-letters", "resume", str(operation.operation_id)) == Ended(0, "1 sent through again\n", "")


def test_letters_of_a_key_are_sent_in_order_and_the_key_is_seen_to_be_held(
    txbox: Txbox, engine: Engine, queue: str, sqs: "SQSClient"
) -> None:
    first, second = (park(engine, queue, id_, order_key="ann") for id_ in ("a", "b"))
    heading, *_ = txbox("dead-letters", "list").out.splitlines()
    assert heading.split()[:5] == ["no.", "subscriber", "message", "key", "reason"]
    ended = txbox("dead-letters", "redrive", str(second))
    ended.failed_in_one_line(1, f"dead letter {second} waits behind {first} of its key 'ann'; redrive or discard")
    assert txbox("dead-letters", "redrive", str(second), str(first)).out.startswith("2 sent through again\n")
    assert held(sqs, queue)["waiting"] == 2
    sent = [DeadLetters(engine).get(number).redriven_at for number in (first, second)]
    assert sent == sorted(filter(None, sent))
    assert txbox("dead-letters", "list", "--all").out.count(", holds its key") == 2
    assert "order: dead letters hold 1 key of billing since 2" in txbox("status").out
    assert txbox("dead-letters", "discard", str(first), str(second), "--note", "lost").out == "2 discarded\n"
    assert "order:" not in txbox("status").out


def test_a_redrive_until_free_sends_what_waits_behind_and_says_which_keys_are_not_free(
    txbox: Txbox, engine: Engine, queue: str
) -> None:
    park(engine, queue, "a", order_key="ann")
    park(engine, queue, "x", order_key="ann", reason=Reason.BEHIND)
    bob = park(engine, queue, "b", order_key="bob")
    arguments = ["dead-letters", "redrive", "--reason", "failed", "--until-free"]
    txbox(*arguments, "soon").failed_in_one_line(2, "--until-free must be a span of time")
    ended = txbox(*arguments, "0.1s")
    (operation,) = LetterOperations(engine).list(unfinished=True)
    assert ended.status == 1
    assert ended.out.endswith(f"sent through again\n`txbox dead-letters resume {operation.operation_id}` goes on\n")
    for key in ("ann", "bob"):
        assert f"txbox: key '{key}' of billing is not free: dead letter " in ended.err
    DeadLetters(engine).discard(bob, note="lost")
    found = json.loads(txbox("dead-letters", "resume", str(operation.operation_id), "--json").out)
    assert [key["order_key"] for key in found["held_keys"]] == ["ann"]


def test_an_operation_of_an_embedding_program_can_be_resumed(
    txbox: Txbox, engine: Engine, queue: str, numbers: list[int]
) -> None:
    which = LetterFilter(subscriber_id="billing")
    operation = LetterOperations(engine).select(which, OperationKind.DISCARD, by="kim", note="no")
    assert operation is not None
    assert txbox("dead-letters", "resume", str(operation.operation_id), "--by", "lee").out == "3 discarded\n"
    assert DeadLetters(engine).get(numbers[0]).discarded_by == "lee"
    assert txbox("dead-letters", "discard", str(numbers[3]), "--note", "\0", "--by", "\udcff").out == "1 discarded\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["redrive", "1", "--error", "x"], "by their numbers, or by a filter or --all, not by both"),
        (["redrive", "--header", "tenant"], "--header must be NAME=VALUE, not 'tenant'"),
        (["list", "--json-path", "$.a =="], "is not a JSON path as Postgres reads it: "),
        (["redrive", "--json-path", "$.a =="], "is not a JSON path as Postgres reads it: "),
        (["redrive", "--json-path", "$.a ==", "--dry-run"], "is not a JSON path as Postgres reads it: "),
        (["redrive", "--all", "--per-second", "0"], "per_second must be a number from 0.001 on"),
        (["redrive", "--since", "1d", "--until", "2d"], "--until is not after --since"),
        (["redrive", "--reason", "bored"], "bored"),
        (["discard", "--all", "--note", " "], "say why they are given up"),
        (["discard"], "say which letters"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(txbox: Txbox, engine: Engine, arguments: list[str], why: str) -> None:
    park(engine, "queue", "a")
    txbox("dead-letters", *arguments).failed_in_one_line(2, why)
    assert txbox("dead-letters", "operations").out == "no operations\n"


# --- SQS's own dead-letter queues ------------------------------------------------------------------------------------


@pytest.fixture
def dead_letter_queue(sqs: "SQSClient", make_queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A dead-letter queue with three messages, of which SQS does not tell where they were sent to."""
    monkeypatch.setattr("txbox_aws.sqs.dead_letter_queue.IMPORT_WAIT_SECONDS", 0)
    dead = make_queue()
    send(sqs, dead, ["a", "b", "done"])
    return dead


def test_a_queue_is_imported_and_its_letters_are_redriven(
    txbox: Txbox, engine: Engine, queue: str, sqs: "SQSClient", dead_letter_queue: str
) -> None:
    with engine.begin() as connection:
        assert Inbox("billing").record(connection, "done")
    arguments = ["dead-letters", "import", dead_letter_queue, "--subscriber", "billing"]
    txbox(*arguments).failed_in_one_line(1, "SQS knows none? Name it with --source")
    assert txbox(*arguments, "--source", queue) == Ended(0, "2 parked, 1 processed before\n", "")
    again = json.loads(txbox(*arguments, "--source", queue, "--json").out)
    assert again == {"parked": 0, "processed": 0, "in_flight": 0, "copies": 0, "undeleted": 0}
    assert txbox("dead-letters", "redrive", "--subscriber", "billing").out == "2 sent through again\n"
    assert held(sqs, queue)["waiting"] == 2
    send(sqs, dead_letter_queue, ["c", "c"])
    ended = txbox(*arguments, "--source", queue)
    assert ended == Ended(0, "1 parked (and 1 copy of them), 0 processed before\n", "")


def test_sqs_is_not_asked_to_move_anything_unless_new_ids_are_accepted(txbox: Txbox, dead_letter_queue: str) -> None:
    txbox("dead-letters", "redrive-queue", dead_letter_queue).failed_in_one_line(2, "new MessageIds", "--yes")
    # The local SQS has no such call, and says so.
    txbox("dead-letters", "redrive-queue", dead_letter_queue, "--yes").failed_in_one_line(1, "StartMessageMoveTask")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["import", "orders", "--subscriber", "billing"], "URL must be the URL of a queue"),
        (["import", "http://h/1/q", "--subscriber", "billing", "--source", "orders"], "--source must be the URL of"),
        (["import", "http://h/1/q", "--subscriber", "billing", "--identify", "os:sep"], "not a function"),
        (["redrive-queue", "http://h/1/q", "--to", "orders"], "--to must be the URL of a queue"),
    ],
    ids=str,
)
def test_a_queue_that_cannot_be_meant_is_refused(txbox: Txbox, arguments: list[str], why: str) -> None:
    txbox("dead-letters", *arguments).failed_in_one_line(2, why)


LETTERS = 150
KILLS = 3
SLOWLY = ("--per-second", "5")
"""All three processes are killed long before the last letter, also where the machine stands still for seconds."""


def at_work(engine: Engine) -> int:
    """How many sessions have letters of an operation in hand."""
    with engine.connect() as connection:
        return int(
            connection.exec_driver_sql(
                "SELECT count(*) FROM pg_locks "
                "WHERE relation = 'dead_letter_selection'::regclass AND pid <> pg_backend_pid()"
            ).scalar_one()
        )


def drained(sqs: "SQSClient", queue: str) -> Counter[str]:
    """All ids that the queue holds, with how often."""
    found: Counter[str] = Counter()
    while messages := sqs.receive_message(
        QueueUrl=queue, MaxNumberOfMessages=10, MessageAttributeNames=["All"], VisibilityTimeout=600
    ).get("Messages"):
        found.update(message["MessageAttributes"]["message-id"]["StringValue"] for message in messages)
    return found


@pytest.mark.chaos
def test_processes_that_are_killed_send_no_committed_letter_twice(
    txbox: Callable[..., Ended], schema_url: str, engine: Engine, queue: str, sqs: "SQSClient"
) -> None:
    letters = DeadLetters(engine)
    ids = [f"m-{number:03}" for number in range(LETTERS)]
    for id_ in ids:
        letters.park(DeadLetter("billing", id_, Reason.FAILED, "no", 3, queue, b"{}"))
    env = {"TXBOX_DATABASE_URL": schema_url}

    def redriven() -> int:
        with engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT count(redriven_at) FROM dead_letter").scalar_one())

    with Running("dead-letters", "redrive", "--all", *SLOWLY, env=env) as first:
        wait_until(lambda: redriven() >= 1, "the first letter being sent", timeout=60)
        (operation,) = LetterOperations(engine).list()
        with Running("dead-letters", "resume", str(operation.operation_id), *SLOWLY, env=env) as second:
            wait_until(lambda: redriven() >= 10, "both being at work", timeout=60)
            first.signal(signal.SIGKILL)
            first.wait()
            wait_until(lambda: redriven() >= 20, "the other one going on", timeout=60)
            second.signal(signal.SIGKILL)
            second.wait()
    before = redriven()
    with Running("dead-letters", "resume", str(operation.operation_id), *SLOWLY, env=env) as third:
        wait_until(lambda: redriven() > before, "a third one going on", timeout=60)
        third.signal(signal.SIGKILL)
        third.wait()
    wait_until(lambda: not at_work(engine), "the server ending what the killed ones had begun", timeout=60)
    left = LETTERS - redriven()
    assert left > 0, "all three were killed at work"
    ended = json.loads(txbox("dead-letters", "resume", str(operation.operation_id), "--json").out)
    assert (len(ended["redriven"]), ended["gone"], ended["failed"], ended["pending"]) == (left, [], {}, 0)
    sent = drained(sqs, queue)
    assert set(sent) == set(ids), "every letter was sent"
    assert sum(sent.values()) - LETTERS <= KILLS, "only what was in the hands of a killed process was sent again"
    assert redriven() == LETTERS
    assert LetterOperations(engine).get(operation.operation_id).outcomes == {"redriven": LETTERS}


def test_letters_of_an_inbox_destination_need_no_relay(txbox: Txbox, engine: Engine) -> None:
    letter = DeadLetter("billing", "m", Reason.FAILED, "no", 3, "inbox:billing", b"{}", envelope={"key": "ann"})
    DeadLetters(engine).park(letter)
    done = txbox("dead-letters", "redrive", "--destination", "inbox:billing", "--all")
    assert (done.status, done.out, done.err) == (0, "1 sent through again\n", "")
    assert "queue: 1 waiting, 0 delayed\n" in txbox("status", "--queue", "inbox:billing").out
