"""Redrives keep the order of a key: of letters, their copies, and what comes meanwhile."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.postgres.statements import run
from support.workers.business import Business, apply, once
from support.workers.fifo_source import FifoSource
from support.workers.memory_worker import at_work, make, process
from support.workers.ordered import by_key, failing, in_group, ordered, outcomes, park_m1, redrive, waiting, with_key
from txbox import DeadLetter, DeadLetters, Inbox, LetterNotFound, Message, Outcome, OutOfOrder, Reason
from txbox.dead_letters import LetterFilter, LetterOperation, LetterOperations, LetterOutcome, OperationKind
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource


def park_three(engine: Engine) -> None:
    outcomes(ordered(engine, failing("m1")), *(in_group(id_) for id_ in ("m1", "m2", "m3")))
    assert waiting(engine) == {"m1": "failed", "m2": "behind", "m3": "behind"}


def test_letters_are_redriven_in_order_and_a_newer_message_does_not_overtake(
    leveled: Engine, business: Business
) -> None:
    park_three(leveled)
    assert redrive(leveled) == ["m1", "m2", "m3"]
    worker = ordered(leveled)
    assert outcomes(worker, in_group("m4")) == {"m4": Outcome.DEAD}, "it was in the queue before the copies"
    found = outcomes(worker, *(in_group(id_) for id_ in ("m1", "m2", "m3", "m5")))
    assert found == dict.fromkeys(("m1", "m2", "m3"), Outcome.PROCESSED) | {"m5": Outcome.DEAD}
    assert redrive(leveled) == ["m4", "m5"]
    assert outcomes(worker, *(in_group(id_) for id_ in ("m4", "m5", "m6"))) == dict.fromkeys(
        ("m4", "m5", "m6"), Outcome.PROCESSED
    )
    assert business.order() == ["m1", "m2", "m3", "m4", "m5", "m6"]
    assert waiting(leveled) == {}


def test_a_letter_is_not_redriven_before_those_it_waits_for(engine: Engine, business: Business) -> None:
    park_three(engine)
    letters = DeadLetters(engine)
    with pytest.raises(OutOfOrder, match="dead letter 3 waits behind 1 of its key 'g'; redrive or discard 1 first"):
        letters.redrive(3, lambda _: pytest.fail("it was sent"))
    letters.redrive(1, lambda _: None)
    with pytest.raises(OutOfOrder) as refused:
        letters.redrive(3, lambda _: pytest.fail("it was sent"))
    assert refused.value.before == 2


def test_a_letter_whose_sending_failed_keeps_those_behind_it(engine: Engine, business: Business) -> None:
    park_three(engine)
    letters = DeadLetters(engine)

    def fail(_: DeadLetter) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        letters.redrive(1, fail)
    with pytest.raises(OutOfOrder):
        letters.redrive(2, lambda _: None)
    assert outcomes(ordered(engine), in_group("m1"), in_group("m4")) == {"m1": Outcome.DEAD, "m4": Outcome.DEAD}


def test_a_message_that_fails_again_comes_before_those_that_were_behind_it(leveled: Engine, business: Business) -> None:
    park_three(leveled)
    redrive(leveled)
    found = outcomes(ordered(leveled, failing("m1")), *(in_group(id_) for id_ in ("m1", "m2", "m3", "m4")))
    assert set(found.values()) == {Outcome.DEAD}
    assert list(waiting(leveled).items()) == [("m1", "failed"), ("m2", "behind"), ("m3", "behind"), ("m4", "behind")]
    assert redrive(leveled) == ["m1", "m2", "m3", "m4"]
    outcomes(ordered(leveled), *(in_group(id_) for id_ in ("m1", "m2", "m3", "m4", "m5")))
    assert business.order() == ["m1", "m2", "m3", "m4", "m5"]


def test_a_message_that_failed_again_and_is_discarded_holds_nothing_by_its_older_letter(
    engine: Engine, business: Business
) -> None:
    park_m1(engine)
    redrive(engine)
    park_m1(engine)
    DeadLetters(engine).discard(2, note="given up")
    assert outcomes(ordered(engine), in_group("m2")) == {"m2": Outcome.PROCESSED}


def test_a_copy_that_is_early_is_handed_back_and_its_turn_comes(leveled: Engine, business: Business) -> None:
    """A standard queue delivers copies in any order."""
    park_three(leveled)
    redrive(leveled)
    worker = ordered(leveled, max_attempts=10)
    copies = [with_key(id_) for id_ in ("m3", "m2", "m1")]
    assert outcomes(worker, *copies) == {"m3": Outcome.IN_FLIGHT, "m2": Outcome.IN_FLIGHT, "m1": Outcome.PROCESSED}
    again = [with_key(id_, receive_count=2) for id_ in ("m3", "m2")]
    assert outcomes(worker, *again) == {"m3": Outcome.IN_FLIGHT, "m2": Outcome.PROCESSED}
    assert business.failing() == {}, "what is handed back has made no attempt"
    assert outcomes(worker, with_key("m3", receive_count=3)) == {"m3": Outcome.PROCESSED}
    assert business.order() == ["m1", "m2", "m3"]


def test_a_copy_is_parked_again_at_once_while_a_letter_before_it_waits(engine: Engine, business: Business) -> None:
    """On a standard queue it would only go round until that one is redriven."""
    park_three(engine)
    redrive(engine)
    worker = ordered(engine, failing("m1"))
    assert outcomes(worker, with_key("m1"), with_key("m2")) == {"m1": Outcome.DEAD, "m2": Outcome.DEAD}
    assert waiting(engine) == {"m1": "failed", "m2": "behind"}


def test_a_copy_whose_predecessor_never_comes_is_parked_again_with_its_place(
    engine: Engine, business: Business
) -> None:
    park_three(engine)
    redrive(engine)
    worker = ordered(engine, max_attempts=10)
    assert outcomes(worker, with_key("m3", receive_count=9)) == {"m3": Outcome.IN_FLIGHT}
    assert outcomes(worker, with_key("m3", receive_count=10)) == {"m3": Outcome.DEAD}
    assert outcomes(worker, in_group("m2")) == {"m2": Outcome.DEAD}, "in a FIFO group it would keep the copy away"
    assert list(waiting(engine)) == ["m2", "m3"]


def test_what_was_processed_by_another_way_holds_nothing(engine: Engine, business: Business) -> None:
    """As by a bulk load; and a letter that is older than what the inbox keeps holds nothing either."""
    park_m1(engine)
    redrive(engine)
    worker = ordered(engine)
    with engine.begin() as connection:
        assert Inbox("billing").record(connection, "m1")
    assert outcomes(worker, in_group("m2")) == {"m2": Outcome.PROCESSED}
    with engine.begin() as connection:  # forgotten, as the horizon was moved before
        connection.exec_driver_sql("INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now())")
        connection.exec_driver_sql("DELETE FROM processed_message")
    assert outcomes(worker, in_group("m3")) == {"m3": Outcome.PROCESSED}
    run(engine, "DELETE FROM inbox_horizon")
    assert outcomes(worker, in_group("m4")) == {"m4": Outcome.DEAD}


def test_a_rotating_inbox_keeps_the_order_too(leveled: Engine, engine: Engine, business: Business) -> None:
    """Parked in one generation, redriven in the next: what this transaction has recorded is in neither's past."""
    assert InboxConversion(engine).forward()
    park_three(leveled)
    Generations(engine).rotate()
    redrive(leveled)
    worker = ordered(leveled)
    found = outcomes(worker, *(in_group(id_) for id_ in ("m4", "m1", "m2", "m3")))
    assert found == {"m4": Outcome.DEAD} | dict.fromkeys(("m1", "m2", "m3"), Outcome.PROCESSED)
    redrive(leveled)
    assert outcomes(worker, in_group("m4"), in_group("m5")) == {"m4": Outcome.PROCESSED, "m5": Outcome.PROCESSED}
    assert business.order() == ["m1", "m2", "m3", "m4", "m5"]


def test_what_is_discarded_holds_nothing_and_the_next_one_may_go(engine: Engine, business: Business) -> None:
    park_three(engine)
    letters = DeadLetters(engine)
    letters.discard(1, note="given up")
    worker = ordered(engine)
    assert outcomes(worker, in_group("m4")) == {"m4": Outcome.DEAD}
    for number in (2, 3, 4):
        letters.redrive(number, lambda _: None)
    outcomes(worker, *(in_group(id_) for id_ in ("m2", "m3", "m4", "m5")))
    assert business.order() == ["m2", "m3", "m4", "m5"]


def test_a_letter_whose_copy_is_lost_can_be_discarded_and_a_copy_that_comes_late_is_not_run(
    leveled: Engine, business: Business
) -> None:
    park_three(leveled)
    redrive(leveled)
    letters, worker = DeadLetters(leveled), ordered(leveled)
    assert outcomes(worker, in_group("m2")) == {"m2": Outcome.DEAD}
    letters.discard(1, note="lost")
    with pytest.raises(LetterNotFound, match="before"):
        letters.discard(1, note="again")
    letters.redrive(4, lambda _: None)
    found = outcomes(worker, in_group("m1"), in_group("m2"), in_group("m3"))
    assert found == {"m1": Outcome.DEAD, "m2": Outcome.PROCESSED, "m3": Outcome.PROCESSED}
    assert business.order() == ["m2", "m3"]
    with pytest.raises(LetterNotFound, match="redriven before"):
        letters.discard(4, note="it was processed")


@pytest.mark.parametrize("named", [True, False])
def test_a_discard_by_filter_leaves_out_what_was_redriven_since_it_was_selected(
    engine: Engine, business: Business, named: bool
) -> None:
    """Its copy is on its way; only a letter that is named by its number is given up then."""
    park_m1(engine)
    operations = LetterOperations(engine)
    which = LetterFilter(numbers=(1,)) if named else LetterFilter()
    operation = operations.select(which, OperationKind.DISCARD, by="me", note="no")
    assert operation is not None
    redrive(engine)
    ended = operations.carry_out(operation.operation_id)
    assert ended.outcomes == {"discarded" if named else "gone": 1}
    assert outcomes(ordered(engine), in_group("m1")) == {"m1": Outcome.DEAD if named else Outcome.PROCESSED}


def test_an_operation_redrives_by_places_what_it_has_and_nothing_out_of_order(
    engine: Engine, business: Business
) -> None:
    """Letters 4, 5 and 6 are of m1, m4 and m5, and of the places 1, 5 and 6; those of m2 and m3 are 2 and 3."""
    park_three(engine)
    letters, operations = DeadLetters(engine), LetterOperations(engine)
    letters.redrive(1, lambda _: None)
    outcomes(ordered(engine, failing("m1")), *(in_group(id_) for id_ in ("m1", "m4", "m5")))
    assert list(waiting(engine)) == ["m1", "m2", "m3", "m4", "m5"]
    sent: list[str] = []

    def carry_out(**which: Any) -> tuple[list[tuple[int, LetterOutcome]], LetterOperation]:
        operation = operations.select(LetterFilter(**which), OperationKind.REDRIVE, by="me")
        assert operation is not None
        results: list[tuple[int, LetterOutcome]] = []
        ended = operations.carry_out(
            operation.operation_id,
            lambda letter: sent.append(letter.message_id),
            report=lambda result: results.append((result.dead_letter_id, result.outcome)),
        )
        return results, ended

    some, ended = carry_out(numbers=(2, 5))
    assert some == [(2, LetterOutcome.FAILED), (5, LetterOutcome.FAILED)]
    assert (sent, ended.finished_at) == ([], None)
    every, ended = carry_out(numbers=(2, 4, 5, 6))
    assert every == [
        (4, LetterOutcome.REDRIVEN),
        (2, LetterOutcome.REDRIVEN),
        (5, LetterOutcome.FAILED),
        (6, LetterOutcome.FAILED),
    ]
    assert carry_out(numbers=(3,))[0] == [(3, LetterOutcome.REDRIVEN)]
    operations.carry_out(ended.operation_id, lambda letter: sent.append(letter.message_id))
    assert sent == ["m1", "m2", "m3", "m4", "m5"]
    assert operations.get(ended.operation_id).finished_at is not None


@pytest.mark.parametrize(
    ("which", "expired", "sent"),
    [
        (LetterFilter(), False, ["m1", "m2", "m3", "n1", "n2", "o2"]),
        (LetterFilter(reasons=(Reason.BEHIND,)), False, ["o2"]),
        (LetterFilter(reasons=(Reason.FAILED, Reason.EXPIRED)), False, ["m1", "n1"]),
        (LetterFilter(message_ids=("m1", "m3")), False, ["m1"]),
        (LetterFilter(message_ids=("n2", "e1", "e2")), True, ["e1", "e2"]),
        (LetterFilter(message_ids=("e1", "e2")), False, []),
        (LetterFilter(subscriber_id="billing", json_path="$.nothing"), False, []),
    ],
)
def test_what_a_redrive_would_send_is_counted_as_it_is_sent(
    engine: Engine, business: Business, which: LetterFilter, expired: bool, sent: list[str]
) -> None:
    """Of the key o, the first letter is on its way; of e, the first is expired."""
    park_three(engine)
    for first in ("n1", "e1", "o1"):
        outcomes(ordered(engine, failing(first)), with_key(first, first[0]), with_key(f"{first[0]}2", first[0]))
    letters = {letter.message_id: letter.dead_letter_id or 0 for letter in DeadLetters(engine).list()}
    run(engine, "UPDATE dead_letter SET reason = 'expired' WHERE message_id = 'e1'")
    DeadLetters(engine).redrive(letters["o1"], lambda _: None)
    operations = LetterOperations(engine)
    counts = operations.counts(which, expired=expired)
    done: list[str] = []
    operation = operations.select(which, OperationKind.REDRIVE, by="me", expired=expired)
    if operation is not None:
        operations.carry_out(operation.operation_id, lambda letter: done.append(letter.message_id))
        assert operation.letters == sum(count.letters for count in counts)
    sendable = [count for count in counts if expired or count.reason is not Reason.EXPIRED]
    assert sorted(done) == sent
    assert sum(count.letters - count.behind for count in sendable) == len(sent)


def test_the_body_that_is_redriven_in_place_of_another_takes_over_its_place(engine: Engine, business: Business) -> None:
    park_three(engine)
    other = Message("m1", b"another body", {})
    process(ordered(engine), Delivery(other, "again", group="g", body=b"another body"))
    letters = DeadLetters(engine)
    letters.redrive(4, lambda _: None)
    assert list(waiting(engine)) == ["m2", "m3"]
    assert outcomes(ordered(engine), in_group("m2")) == {"m2": Outcome.DEAD}
    assert process(ordered(engine), Delivery(other, "copy", group="g", body=b"another body")) == [
        ("copy", Outcome.PROCESSED)
    ]
    assert business.order("body") == ["another body"]


# --- side by side ----------------------------------------------------------------------------------------------------


def test_a_newer_message_during_a_redrive_is_held_and_the_copy_runs(leveled: Engine, business: Business) -> None:
    """The redrive is held between its sending and its commit; both the copy and a newer message are received."""
    park_m1(leveled)
    sent, go_on = threading.Event(), threading.Event()

    def send(_: DeadLetter) -> None:
        sent.set()
        assert go_on.wait(20)

    with ThreadPoolExecutor(2) as pool:
        redriving = pool.submit(DeadLetters(leveled).redrive, 1, send)
        assert sent.wait(20)
        worker = ordered(leveled, max_attempts=10, inbox=Inbox("billing", wait_seconds=20))
        assert outcomes(worker, with_key("m2")) == {"m2": Outcome.DEAD}
        copy = pool.submit(outcomes, worker, with_key("m1"))
        business.wait_for_waiter()
        go_on.set()
        redriving.result(20)
        assert copy.result(20) == {"m1": Outcome.PROCESSED}
    assert waiting(leveled) == {"m2": "behind"}
    assert business.order() == ["m1"]


# --- at random -------------------------------------------------------------------------------------------------------


SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in (1, 2))])


class Lottery:
    """A handler that fails at random, less and less often, and never in the end; seeded."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.probability = 0.7

    def __call__(self, session: Session, message: Message) -> None:
        apply(session, message)
        if self._random.random() < self.probability:
            raise ValueError("by lot")


@SEEDS
def test_each_key_is_applied_in_the_order_it_was_sent_through_failures_parkings_and_redrives(
    engine: Engine, business: Business, seed: int, leveled: Engine
) -> None:
    """Two workers share a FIFO queue in memory, and some acks are lost; some redrives die after the sending."""
    lots = random.Random(seed)
    source, handler = FifoSource(batch_size=4, wait_seconds=0.01), Lottery(seed)
    source.lost_acks = 0.1
    workers = [
        make(source, leveled, handler, ordered=True, max_attempts=2, inbox=Inbox("billing", wait_seconds=0.2))
        for _ in range(2)
    ]
    sent = {f"k{key}": [f"k{key}-{number:02}" for number in range(12)] for key in range(3)}
    letters = DeadLetters(engine)

    def redrive_some() -> None:
        def send(letter: DeadLetter) -> None:
            source.send_back(letter)
            if lots.random() < 0.2:
                raise ConnectionError("after it was sent")

        for letter in sorted(letters.list(), key=lambda each: each.order_position or 0):
            with suppress(ConnectionError, OutOfOrder, LetterNotFound):
                letters.redrive(letter.dead_letter_id or 0, send)

    with at_work(*workers):
        for number in range(12):
            for key, ids in sent.items():
                source.send_in(key, ids[number])
            if lots.random() < 0.5:
                redrive_some()
        for left in range(40):
            handler.probability = max(0.7 - left / 20, 0.0)
            assert source.wait_until_empty(30), "something was never acked"
            redrive_some()
            if not letters.list() and source.wait_until_empty(30) and not letters.list():
                break
    assert by_key(business.order()) == sent
    assert waiting(engine) == {}
    assert business.rows("SELECT 1 FROM dead_letter WHERE order_position IS NOT NULL") == []
    assert business.rows("SELECT 1 FROM dead_letter WHERE reason = 'behind'"), "nothing was held: it shows nothing"


@SEEDS
def test_on_a_standard_queue_nothing_is_lost_and_no_copy_goes_round_for_ever(
    engine: Engine, business: Business, seed: int
) -> None:
    """Redrives send the copies in any order, as a standard queue may deliver them."""
    lots = random.Random(seed)
    source, handler = MemorySource(batch_size=3, wait_seconds=0.01), Lottery(seed)
    workers = [make(source, engine, handler, ordered=True, max_attempts=2) for _ in range(2)]
    ids = [f"k{number % 2}-{number:02}" for number in range(30)]
    letters = DeadLetters(engine)

    def keyed(message_id: str) -> Message:
        return Message(message_id, b"body", {"key": message_id.partition("-")[0]})

    with at_work(*workers):
        for id_ in ids:
            source.send(keyed(id_))
        for left in range(40):
            handler.probability = max(0.7 - left / 20, 0.0)
            assert source.wait_until_empty(60), "something was never acked"
            copies = redrive(engine)
            lots.shuffle(copies)
            for id_ in copies:
                source.send(keyed(id_))
            if not copies:
                break
    assert business.applied() == once(ids)
    assert letters.list() == []
    assert business.rows("SELECT 1 FROM dead_letter WHERE reason = 'behind'"), "nothing was held: it shows nothing"
