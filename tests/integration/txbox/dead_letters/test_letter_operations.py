"""Redrives and discards of many letters: one selection, each letter once, whatever ends in between."""

import dataclasses
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from support.postgres.statements import run
from support.waiting import wait_until
from txbox import BrokerError, DeadLetter, DeadLetters, Inbox, InvalidConfiguration, OperationNotFound, Outbox, Reason
from txbox.dead_letters import LetterFilter, LetterOperation, LetterOperations, LetterResult, OperationKind
from txbox.outbox.lanes import lanes_of

REDRIVE, DISCARD = OperationKind.REDRIVE, OperationKind.DISCARD
LETTER = DeadLetter("billing", "m", Reason.FAILED, "no", 5, "queue", b"{}")


class Killed(BaseException):
    """What a test raises where a process would die: nothing of ours catches it."""


@pytest.fixture
def operations(engine: Engine) -> LetterOperations:
    return LetterOperations(engine)


def park(engine: Engine, count: int, **changes: str) -> list[int]:
    letters = DeadLetters(engine)
    return [
        letters.park(dataclasses.replace(LETTER, message_id=f"m-{number}", **changes)) or 0 for number in range(count)
    ]


def select(operations: LetterOperations, kind: OperationKind = REDRIVE, note: str | None = None) -> LetterOperation:
    operation = operations.select(LetterFilter(subscriber_id="billing"), kind, by="kim", note=note)
    assert operation is not None
    return operation


def outcomes(engine: Engine, operation_id: int) -> dict[int, str | None]:
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            f"SELECT dead_letter_id, outcome FROM dead_letter_selection WHERE operation_id = {operation_id}"
        )
        return {row.dead_letter_id: row.outcome for row in rows}


def redriven(engine: Engine) -> set[int]:
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT dead_letter_id FROM dead_letter WHERE redriven_at IS NOT NULL")
        return set(rows.scalars())


def test_what_is_redriven_is_what_was_selected_in_order_and_it_stays_on_record(
    engine: Engine, operations: LetterOperations
) -> None:
    numbers = park(engine, 7)
    operation = select(operations, note="repaired")
    later = DeadLetters(engine).park(dataclasses.replace(LETTER, message_id="later"))
    other = DeadLetters(engine).park(dataclasses.replace(LETTER, subscriber_id="shipping"))
    assert (operation.pending, operation.finished_at) == (7, None)
    sent: list[int | None] = []
    results: list[LetterResult] = []
    done = operations.carry_out(
        operation.operation_id, lambda letter: sent.append(letter.dead_letter_id), report=results.append
    )
    assert sent == numbers
    assert [result.dead_letter_id for result in results] == numbers
    assert redriven(engine) == set(numbers)
    assert {letter.dead_letter_id for letter in DeadLetters(engine).list()} == {later, other}
    assert DeadLetters(engine).get(numbers[0]).redriven_by == "kim"
    assert done.finished_at is not None
    assert done.requested_at <= done.finished_at
    assert (done.kind, done.filter, done.note, done.requested_by, done.outcomes) == (
        "redrive",
        {"subscriber_id": "billing"},
        "repaired",
        "kim",
        {"redriven": 7},
    )
    assert operations.list() == [done]
    assert operations.list(unfinished=True) == []


def test_nothing_to_do_is_not_on_record(operations: LetterOperations) -> None:
    assert operations.select(LetterFilter(), REDRIVE, by="kim") is None
    assert operations.list() == []
    for call in (operations.get, operations.carry_out):
        with pytest.raises(OperationNotFound, match="operation 404 does not exist"):
            call(404)


def test_a_letter_that_fails_waits_and_is_tried_again_by_a_resume(engine: Engine, operations: LetterOperations) -> None:
    numbers = park(engine, 5)
    operation = select(operations)
    sent: list[int | None] = []

    def send(letter: DeadLetter) -> None:
        if letter.dead_letter_id in numbers[1:3] and len(sent) < 3:
            raise BrokerError("the queue is away")
        sent.append(letter.dead_letter_id)

    results: list[LetterResult] = []
    half = operations.carry_out(operation.operation_id, send, report=results.append)
    assert (half.outcomes, half.finished_at) == ({"redriven": 3, "failed": 2}, None)
    assert results[1].error == f"dead letter {numbers[1]} was not sent: the queue is away"
    assert {letter.dead_letter_id for letter in DeadLetters(engine).list()} == set(numbers[1:3])
    done = operations.carry_out(operation.operation_id, send)
    assert done.outcomes == {"redriven": 5}
    assert done.finished_at is not None
    assert sent == [numbers[0], *numbers[3:], *numbers[1:3]]


@pytest.mark.parametrize("dies", ["before the send", "between the send and the commit", "after the commit"])
def test_a_process_that_dies_leaves_the_rest_and_a_resume_ends_it(
    engine: Engine, operations: LetterOperations, dies: str
) -> None:
    numbers = park(engine, 6)
    operation = select(operations)
    sent: list[int] = []
    deaths = iter([True])

    def send(letter: DeadLetter) -> None:
        number = letter.dead_letter_id or 0
        if number == numbers[2] and dies == "before the send" and next(deaths, False):
            raise Killed
        sent.append(number)
        if number == numbers[2] and dies == "between the send and the commit" and next(deaths, False):
            raise Killed

    def report(result: LetterResult) -> None:
        if result.dead_letter_id == numbers[2] and dies == "after the commit" and next(deaths, False):
            raise Killed

    with pytest.raises(Killed):
        operations.carry_out(operation.operation_id, send, report=report)
    done_before = 3 if dies == "after the commit" else 2
    assert operations.get(operation.operation_id).outcomes == {"redriven": done_before, "pending": 6 - done_before}
    assert redriven(engine) == set(numbers[:done_before])
    operations.carry_out(operation.operation_id, send, report=report)
    assert redriven(engine) == set(numbers)
    twice = [numbers[2]] if dies == "between the send and the commit" else []
    assert sorted(sent) == sorted([*numbers, *twice]), "only what died between its send and its commit is sent again"


def test_processes_that_carry_out_the_same_letters_and_die_send_each_committed_once(
    engine: Engine, operations: LetterOperations
) -> None:
    # Two of one operation, two of another that has the same letters; each dies now and then and is resumed.
    numbers = park(engine, 60)
    first, second = select(operations), select(operations)
    sent: Counter[int] = Counter()
    died: Counter[int] = Counter()
    lock = threading.Lock()

    def run(seed: int, operation_id: int) -> None:
        chance = random.Random(seed)

        def send(letter: DeadLetter) -> None:
            number = letter.dead_letter_id or 0
            before = chance.random() < 0.1
            if before:
                raise Killed
            with lock:
                sent[number] += 1
            if chance.random() < 0.1:
                with lock:
                    died[number] += 1
                raise Killed

        while True:
            try:
                LetterOperations(engine).carry_out(operation_id, send)
            except Killed:
                continue
            return

    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(run, seed, operation.operation_id)
            for seed, operation in enumerate([first, second, first, second])
        ]
        for one in runs:
            one.result(120)
    assert sum(died.values()) > 0, "some died between send and commit"
    assert sent - died == Counter(dict.fromkeys(numbers, 1)), "each was sent once by a process that lived to commit it"
    assert redriven(engine) == set(numbers)
    counts = [operations.get(operation.operation_id).outcomes for operation in (first, second)]
    assert sum(count.get("redriven", 0) for count in counts) == 60
    for operation in (first, second):
        assert operations.get(operation.operation_id).finished_at is not None
        assert set(outcomes(engine, operation.operation_id).values()) <= {"redriven", "gone"}


def test_two_of_one_operation_take_turns_in_order(engine: Engine, operations: LetterOperations) -> None:
    numbers = park(engine, 30)
    operation = select(operations)
    sent: list[int | None] = []
    results: list[LetterResult] = []

    def the_other_waits() -> bool:
        with engine.connect() as connection:
            waits = (
                "SELECT 1 FROM pg_stat_activity WHERE pg_blocking_pids(pid) <> '{}' AND datname = current_database()"
            )
            return connection.exec_driver_sql(waits).all() != []

    def send(letter: DeadLetter) -> None:
        sent.append(letter.dead_letter_id)
        if len(sent) == 1:
            wait_until(the_other_waits)

    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(operations.carry_out, operation.operation_id, send, report=results.append) for _ in range(2)
        ]
        for one in runs:
            one.result(60)
    assert sent == numbers
    assert Counter(result.outcome for result in results) == {"redriven": 30}, "what the other has sent is not gone"
    assert operations.get(operation.operation_id).finished_at is not None


def test_what_was_redriven_discarded_or_processed_meanwhile_is_told_apart_and_not_sent(
    engine: Engine, operations: LetterOperations
) -> None:
    letters = DeadLetters(engine)
    redriven_, discarded, deleted, processed, waiting = park(engine, 5)
    operation = select(operations)
    letters.redrive(redriven_, lambda _: None)
    letters.discard(discarded, note="no")
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DELETE FROM dead_letter WHERE dead_letter_id = {deleted}")
        connection.exec_driver_sql("DELETE FROM processed_message WHERE message_id = 'm-3'")
        assert Inbox("billing").record(connection, "m-3")
    sent: list[int | None] = []
    done = operations.carry_out(operation.operation_id, lambda letter: sent.append(letter.dead_letter_id))
    assert sent == [waiting]
    assert outcomes(engine, operation.operation_id) == {
        redriven_: "gone",
        discarded: "gone",
        deleted: "gone",
        processed: "processed",
        waiting: "redriven",
    }
    assert done.finished_at is not None


def test_letters_are_discarded_with_a_note(engine: Engine, operations: LetterOperations) -> None:
    numbers = park(engine, 3)
    with pytest.raises(InvalidConfiguration, match="takes a note"):
        operations.select(LetterFilter(), DISCARD, by="kim")
    operation = select(operations, DISCARD, note="the customer has left")
    DeadLetters(engine).redrive(numbers[1], lambda _: None)
    done = operations.carry_out(operation.operation_id, by="lee")
    assert done.outcomes == {"discarded": 2, "gone": 1}
    found = DeadLetters(engine).get(numbers[0])
    assert (found.discarded_by, found.note) == ("lee", "the customer has left")
    with engine.begin() as connection:
        assert not Inbox("billing").record(connection, "m-0"), "a copy is not run"
        assert Inbox("billing").record(connection, "m-1")


def test_letters_of_a_relay_go_to_the_outbox(engine: Engine, operations: LetterOperations) -> None:
    with engine.begin() as connection:
        DeadLetters(engine).park_in(
            connection,
            dataclasses.replace(
                LETTER, subscriber_id="txbox:outbox:own:x", source="own:x", envelope={"outbox": {"key": "ann"}}
            ),
        )
    operation = operations.select(LetterFilter(destination="own:x"), REDRIVE, by="kim")
    assert operation is not None
    results: list[LetterResult] = []
    operations.carry_out(operation.operation_id, report=results.append)
    assert [(result.outcome, result.to_outbox) for result in results] == [("redriven", True)]
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT message_id, destination, key FROM outbox_message").all()
    assert [tuple(row) for row in rows] == [("m", "own:x", "ann")]


def waiting(engine: Engine) -> list[tuple[object, ...]]:
    columns = "message_id, destination, key, headers, body, lane"
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(f"SELECT {columns} FROM outbox_message ORDER BY position").all()
    return [(*row[:-1], row.lane in lanes_of(row.destination)) for row in rows]


def test_letters_of_an_inbox_destination_go_to_the_outbox_as_they_were(
    engine: Engine, operations: LetterOperations
) -> None:
    body, headers = b"\x00\xff", {"tenant": "t-1"}
    letter = dataclasses.replace(LETTER, source="inbox:billing", body=body, headers=headers)
    letters = DeadLetters(engine)
    ann = {**headers, "key": "ann"}  # as workers see it
    letters.park(dataclasses.replace(letter, message_id="m-0", headers=ann, envelope={"key": "ann"}))
    letters.park(dataclasses.replace(letter, message_id="m-1", envelope={"key": None}))
    park(engine, 1, subscriber_id="shipping", source="inbox:shipping")
    operation = operations.select(LetterFilter(destination="inbox:billing"), REDRIVE, by="kim")
    assert operation is not None
    results: list[LetterResult] = []
    operations.carry_out(operation.operation_id, report=results.append)
    assert [(result.outcome, result.to_outbox) for result in results] == [("redriven", False)] * 2
    expected = [
        ("m-0", "inbox:billing", "ann", headers, body, True),
        ("m-1", "inbox:billing", None, headers, body, True),
    ]
    assert waiting(engine) == expected
    with engine.begin() as connection:
        assert Inbox("billing", fingerprint=True).record(connection, "m-0", body), "its copy runs"


def test_a_letter_is_marked_and_published_in_one_transaction(
    engine: Engine, operations: LetterOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    (number,) = park(engine, 1, source="inbox:billing")
    operation = select(operations)
    publish = Outbox.publish

    def publish_and_die(*arguments: Any, **options: Any) -> None:
        publish(*arguments, **options)
        raise Killed

    monkeypatch.setattr(Outbox, "publish", publish_and_die)
    with pytest.raises(Killed):
        operations.carry_out(operation.operation_id)
    assert (waiting(engine), redriven(engine)) == ([], set())
    monkeypatch.undo()
    DeadLetters(engine).republish(number, Outbox())
    assert ([row[0] for row in waiting(engine)], redriven(engine)) == (["m-0"], {number})


def test_letters_of_a_key_are_published_in_the_order_of_their_places(
    engine: Engine, operations: LetterOperations
) -> None:
    first, second = park(engine, 2, source="inbox:billing", order_key="ann")
    letters = DeadLetters(engine)
    letters.republish(first, Outbox())
    run(engine, "DELETE FROM outbox_message")
    (again,) = park(engine, 1, source="inbox:billing", order_key="ann")
    assert again > second
    operations.carry_out(select(operations).operation_id)
    assert [row[0] for row in waiting(engine)] == ["m-0", "m-1"]


@pytest.mark.parametrize(
    ("source", "queue_url", "expected"),
    [
        ("inbox:billing", "inbox:other", [("m-0", "inbox:other")]),
        ("inbox:billing", "queue", []),
        ("https://sqs/1/q", "inbox:other", "send it to its source, https://sqs/1/q"),
    ],
)
def test_another_queue_may_be_an_inbox_destination(
    engine: Engine, operations: LetterOperations, source: str, queue_url: str, expected: object
) -> None:
    park(engine, 1, source=source)
    operation = operations.select(LetterFilter(), REDRIVE, by="kim", queue_url=queue_url)
    assert operation is not None
    sent: list[str] = []
    results: list[LetterResult] = []
    operations.carry_out(operation.operation_id, lambda letter: sent.append(letter.message_id), report=results.append)
    if isinstance(expected, str):
        assert expected in (results[0].error or "")
    else:
        assert [row[:2] for row in waiting(engine)] == expected
        assert sent == ([] if expected else ["m-0"])


def test_a_queue_s_letter_without_a_way_back_fails(engine: Engine, operations: LetterOperations) -> None:
    park(engine, 1)
    results: list[LetterResult] = []
    operations.carry_out(select(operations).operation_id, report=results.append)
    assert results[0].outcome == "failed"
    assert "give carry_out the function that sends it there" in (results[0].error or "")


def test_the_pace_is_kept_and_lost_time_is_not_caught_up(
    engine: Engine, operations: LetterOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    park(engine, 6)
    operation = operations.select(LetterFilter(), REDRIVE, by="kim", per_second=0.5)
    assert operation is not None
    now, at = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("txbox.dead_letters.letter_operations.time", clock)

    def send(_: DeadLetter) -> None:
        at.append(now[0])
        now[0] += 7.0 if len(at) == 2 else 0.5  # once longer than three letters' time

    def pause(seconds: float) -> None:
        now[0] += seconds

    operations.carry_out(operation.operation_id, send, pause=pause)
    assert at == [100, 102, 109, 111, 113, 115]
    assert now == [115.5], "after the last letter nothing is waited for"


def test_a_request_to_end_leaves_the_rest(engine: Engine, operations: LetterOperations) -> None:
    numbers = park(engine, 5)
    operation = select(operations)
    sent: list[int | None] = []
    half = operations.carry_out(
        operation.operation_id, lambda letter: sent.append(letter.dead_letter_id), pause=lambda _: len(sent) == 2
    )
    assert sent == numbers[:2]
    assert (half.outcomes, half.finished_at) == ({"redriven": 2, "pending": 3}, None)
    assert operations.list(unfinished=True) == [half]


def test_a_lost_connection_is_no_outcome_of_a_letter(engine: Engine, operations: LetterOperations) -> None:
    numbers = park(engine, 3)
    operation = select(operations)
    sent: list[int] = []

    def send(letter: DeadLetter) -> None:
        sent.append(letter.dead_letter_id or 0)
        if len(sent) == 2:
            with engine.connect() as connection:
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks "
                    "WHERE relation = 'dead_letter_selection'::regclass AND pid <> pg_backend_pid()"
                ).all()

    with pytest.raises(OperationalError):
        operations.carry_out(operation.operation_id, send)
    assert operations.get(operation.operation_id).outcomes == {"redriven": 1, "pending": 2}
    operations.carry_out(operation.operation_id, lambda letter: sent.append(letter.dead_letter_id or 0))
    assert sent == [numbers[0], numbers[1], numbers[1], numbers[2]]
