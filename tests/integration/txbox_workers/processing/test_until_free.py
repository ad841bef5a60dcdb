"""A redrive until its keys are free: it goes on with what is parked behind its letters, and says why it ends."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.waiting import wait_until
from support.workers.business import Business
from support.workers.fifo_source import FifoSource
from support.workers.memory_worker import at_work, make
from support.workers.ordered import by_key, failing, in_group, ordered, outcomes, waiting
from txbox import DeadLetter, Inbox, Message, Outcome, Reason
from txbox.dead_letters import HeldKey, LetterFilter, LetterOperation, LetterOperations, OperationKind

FAILED_ONLY = LetterFilter(reasons=(Reason.FAILED,))


class Killed(BaseException):
    """What a test raises where a process would die: nothing of ours catches it."""


def select(engine: Engine, which: LetterFilter = FAILED_ONLY, seconds: float = 60) -> LetterOperation:
    operation = LetterOperations(engine).select(which, OperationKind.REDRIVE, by="kim", until_free_seconds=seconds)
    assert operation is not None
    return operation


def test_redrivers_that_die_free_the_keys_in_order_while_messages_come(
    engine: Engine, business: Business, leveled: Engine
) -> None:
    """Two of one operation, one of another that has the same letters; each dies at every step, and is resumed."""
    source = FifoSource(batch_size=4, wait_seconds=0.01)
    source.lost_acks = 0.1
    sent = {f"k{key}": [f"k{key}-{number:02}" for number in range(20)] for key in range(3)}
    broken = {ids[0] for ids in sent.values()}

    def handler(session: Session, message: Message) -> None:
        failing(*broken)(session, message)

    def produce(*numbers: int) -> None:
        for number in numbers:
            for key, ids in sent.items():
                wait_until(lambda: len(source._ready) < 8, "the queue being short enough to go on")
                source.send_in(key, ids[number])

    options: dict[str, Any] = {"ordered": True, "max_attempts": 1, "inbox": Inbox("billing", wait_seconds=0.2)}
    operations = LetterOperations(engine)

    def redrive(operation_id: int, chance: random.Random) -> LetterOperation:
        def die() -> None:
            if chance.random() < 0.1:
                raise Killed

        def send(letter: DeadLetter) -> None:
            die()
            source.send_back(letter)
            die()

        def pause(seconds: float) -> None:
            threading.Event().wait(min(seconds, 0.01))
            die()

        while True:
            try:
                ended = operations.carry_out(operation_id, send, report=lambda _: die(), pause=pause)
            except Killed:
                continue
            if ended.finished_at is not None:
                return ended

    with at_work(*(make(source, leveled, handler, **options) for _ in range(2))), ThreadPoolExecutor(4) as pool:
        produce(*range(5))
        wait_until(lambda: len(waiting(engine)) == 15, "all being parked")
        broken.clear()
        first, second = select(engine), select(engine, LetterFilter())
        assert (first.letters, second.letters) == (3, 15)
        producing = pool.submit(produce, *range(5, 20))
        redrives = [pool.submit(redrive, first.operation_id, random.Random(number)) for number in range(2)]
        wait_until(
            lambda: operations.get(first.operation_id).letters >= 15 or any(each.done() for each in redrives),
            "the first operation going on with what is parked behind its letters",
        )
        redrives.append(pool.submit(redrive, second.operation_id, random.Random(2)))
        ended = [each.result(120) for each in redrives]
        producing.result(120)
        assert source.wait_until_empty(60), "something was never acked"
    assert by_key(business.order()) == sent
    assert waiting(engine) == {}
    assert business.rows("SELECT 1 FROM dead_letter WHERE order_position IS NOT NULL OR redriven_at IS NULL") == []
    assert all(each.outcomes.keys() <= {"redriven", "gone"} for each in ended)
    assert ended[0].letters >= 15, "it has gone on with those that were parked behind its three"


@pytest.fixture
def parked(engine: Engine, business: Business) -> Engine:
    outcomes(ordered(engine, failing("m1")), *(in_group(id_) for id_ in ("m1", "m2")))
    assert waiting(engine) == {"m1": "failed", "m2": "behind"}
    return engine


def carry_out(engine: Engine, operation: LetterOperation, **options: Any) -> tuple[list[str], LetterOperation]:
    sent: list[str] = []
    operations = LetterOperations(engine)
    return sent, operations.carry_out(operation.operation_id, lambda it: sent.append(it.message_id), **options)


def test_a_key_whose_letter_fails_again_is_left_to_a_person(parked: Engine) -> None:
    operation = select(parked)

    def fail_again(seconds: float) -> None:
        if seconds and "m1" not in waiting(parked):
            assert outcomes(ordered(parked, failing("m1")), in_group("m1")) == {"m1": Outcome.DEAD}

    sent, ended = carry_out(parked, operation, pause=fail_again)
    assert (sent, ended.finished_at, ended.outcomes) == (["m1"], None, {"redriven": 1, "failed": 1})
    assert LetterOperations(parked).held_keys(operation.operation_id) == [HeldKey("billing", "g", 3, True, True)]
    again, _ = carry_out(parked, ended)
    assert again == [], "its new letter is not part of what was selected, and takes another look"


@pytest.mark.parametrize("traffic", [True, False])
def test_it_ends_after_its_time_if_copies_are_not_processed_or_messages_never_cease(
    parked: Engine, monkeypatch: pytest.MonkeyPatch, traffic: bool
) -> None:
    operation, worker = select(parked, seconds=3), ordered(parked)
    now, newest = [100.0], [2]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("txbox.dead_letters.letter_operations.time", clock)

    def pause(seconds: float) -> None:
        now[0] += seconds
        if seconds and traffic:
            newest[0] += 1
            assert outcomes(worker, in_group(f"m{newest[0]}")) == {f"m{newest[0]}": Outcome.DEAD}

    sent, ended = carry_out(parked, operation, pause=pause)
    assert 103 <= now[0] < 104
    assert sent == [f"m{number + 1}" for number in range(len(sent))]
    assert len(sent) == (newest[0] - 1 if traffic else 2), "what is parked after its time is not sent"
    assert ended.finished_at is None
    (held,) = LetterOperations(parked).held_keys(operation.operation_id)
    assert (held.order_key, held.waits, held.stuck) == ("g", traffic, False)
    found = outcomes(worker, *(in_group(message_id) for message_id in sent))
    assert set(found.values()) == {Outcome.PROCESSED}
    if not traffic:
        assert carry_out(parked, ended)[1].finished_at is not None
