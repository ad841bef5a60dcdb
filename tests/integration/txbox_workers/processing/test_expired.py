"""What is too old to judge, in a worker: it is parked whole, once, and not run."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.postgres.statements import run
from support.txbox.events import Kept
from support.txbox.horizon import LONG_AGO, forget, id_of, move_horizon
from support.workers.business import Business, apply
from support.workers.memory_worker import delivery, make, messages, process, work_off
from txbox import DeadLetters, Inbox, InvalidConfiguration, MalformedMessage, Message, Outcome, Reason
from txbox.dead_letters import LetterFilter, LetterOperations, OperationKind
from txbox.instrumentation import Settled
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource


def old(message_id: str, **more: Any) -> Delivery:
    """A delivery of a message that was sent long ago."""
    made = delivery(message_id, **more)
    return replace(made, message=replace(made.message, sent_at=LONG_AGO), body=b"<" + made.message.body + b">")


def sent_now(message_id: str) -> Delivery:
    made = delivery(message_id)
    return replace(made, message=replace(made.message, sent_at=datetime.now(UTC)))


@pytest.mark.parametrize("options", [{}, {"transactions": "message"}, {"max_attempts": 1}, {"max_attempts": None}])
def test_a_message_that_was_forgotten_and_comes_again_is_parked_and_not_run(
    engine: Engine, leveled: Engine, business: Business, options: dict[str, Any]
) -> None:
    kept = Kept()
    worker = make(MemorySource(), leveled, hooks=[kept], **options)
    assert process(worker, old("a"), old("b")) == [("a-1", Outcome.PROCESSED), ("b-1", Outcome.PROCESSED)]
    forget(engine, "a")
    assert sorted(process(worker, old("a", receive_count=2), old("b"), delivery("c"))) == [
        ("a-2", Outcome.EXPIRED),
        ("b-1", Outcome.DUPLICATE),
        ("c-1", Outcome.PROCESSED),
    ]
    assert business.applied() == {"a": 1, "b": 1, "c": 1}
    (letter,) = DeadLetters(engine).list()
    assert (letter.message_id, letter.reason, letter.attempts) == ("a", Reason.EXPIRED, 0)
    assert letter.body == b"<body of a>", "whole, as the broker delivered it"
    assert f"{LONG_AGO:%Y-%m-%d %H:%M:%S}" in letter.error
    assert business.failing() == {}
    assert process(worker, old("a"), old("d")) == [("a-1", Outcome.DEAD), ("d-1", Outcome.EXPIRED)]
    assert business.letters() == {"a": "expired", "d": "expired"}
    assert business.recorded() == {"b", "c"}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("one", [old("a"), delivery(id_of(LONG_AGO)), sent_now(id_of(LONG_AGO))])
def test_a_message_that_is_forgotten_between_its_last_attempt_and_its_parking_is_expired(
    engine: Engine, leveled: Engine, business: Business, one: Delivery, ordered: bool
) -> None:
    """Its worker was suspended after its attempt: another one may have processed it, and a redrive would, too."""

    def fail(session: Session, message: Message) -> None:
        move_horizon(engine)
        raise ValueError("the last attempt")

    worker = make(MemorySource(), leveled, fail, max_attempts=1, ordered=ordered)
    assert process(worker, one) == [(one.receipt, Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert letter.reason is Reason.EXPIRED
    assert "the last attempt" in letter.error
    assert business.letters() == {one.message.id: "expired"}


def test_a_batch_runs_what_is_young_and_parks_what_is_old_in_one_transaction(
    engine: Engine, leveled: Engine, business: Business
) -> None:
    seen: list[list[str]] = []

    def together(session: Session, several: list[Message]) -> None:
        seen.append([message.id for message in several])
        for message in several:
            apply(session, message)

    move_horizon(engine)
    young = sent_now("b")
    worker = make(MemorySource(), leveled, batch_handler=together)
    assert process(worker, old("a"), young, old("c"), delivery("unknown"), old("a", receive_count=2)) == [
        ("a-1", Outcome.EXPIRED),
        ("b-1", Outcome.PROCESSED),
        ("c-1", Outcome.EXPIRED),
        ("unknown-1", Outcome.PROCESSED),
        ("a-2", Outcome.EXPIRED),
    ]
    assert seen == [["b", "unknown"]]
    assert business.letters() == {"a": "expired", "c": "expired"}


def test_a_worker_acks_it_and_tells(engine: Engine, business: Business) -> None:
    move_horizon(engine)
    kept = Kept()
    (message,) = messages("a")
    worker = work_off(MemorySource([replace(message, sent_at=LONG_AGO)]), engine, hooks=[kept])
    assert worker.counts == {Outcome.EXPIRED: 1}
    (settled,) = kept.of(Settled)
    assert (settled.outcome, settled.acked) == (Outcome.EXPIRED, True)
    assert "redrive it as expired" in str(settled.error)
    assert business.applied() == {}


def test_unknown_age_is_the_inboxs_policy(engine: Engine, business: Business) -> None:
    move_horizon(engine)
    worker = make(MemorySource(), engine, inbox=Inbox("billing", unknown_age="park"))
    assert process(worker, delivery("a"), delivery("b")) == [("a-1", Outcome.EXPIRED), ("b-1", Outcome.EXPIRED)]
    assert business.applied() == {}


def test_unknown_age_is_the_policy_of_what_is_parked_without_having_run_too(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, inbox=Inbox("billing", unknown_age="park"))
    assert process(worker, delivery("a")) == [("a-1", Outcome.PROCESSED)]
    forget(engine, "a")
    unread = replace(delivery("a"), problem=MalformedMessage("its envelope is another one"))
    assert process(worker, unread) == [("a-1", Outcome.DEAD)]
    assert business.letters() == {"a": "expired"}


# --- redrive ---------------------------------------------------------------------------------------------------------


def pass_time(engine: Engine, days: int) -> None:
    """Let time pass for what is in the tables, and a maintainer forget what is older than a week then."""
    with engine.begin() as connection:
        past = f"interval '{days} days'"
        connection.exec_driver_sql(f"UPDATE dead_letter SET redriven_at = redriven_at - {past}")
        connection.exec_driver_sql(f"UPDATE processed_message SET processed_at = processed_at - {past}")
    move_horizon(engine)
    run(
        engine,
        "DELETE FROM processed_message USING inbox_horizon AS horizon WHERE dead_letter_id IS NULL "
        "AND processed_message.subscriber_id = horizon.subscriber_id "
        "AND processed_at < horizon.horizon - interval '1 hour'",
    )


def failing(_session: Session, _message: Message) -> None:
    raise ValueError("no")


def only_letter(engine: Engine) -> int:
    (letter,) = DeadLetters(engine).list()
    return letter.dead_letter_id or 0


def test_an_old_letter_that_is_redriven_was_not_processed_so_it_runs_once(
    engine: Engine, leveled: Engine, business: Business
) -> None:
    assert process(make(MemorySource(), leveled, failing, max_attempts=1), old("a")) == [("a-1", Outcome.DEAD)]
    pass_time(engine, days=20)
    worker = make(MemorySource(), leveled)
    assert process(worker, old("a")) == [("a-1", Outcome.DEAD)], "it is parked, whatever its age"
    DeadLetters(engine).redrive(only_letter(engine), lambda _: None)
    assert process(worker, old("a"), old("b")) == [("a-1", Outcome.PROCESSED), ("b-1", Outcome.EXPIRED)]
    assert process(worker, old("a")) == [("a-1", Outcome.DUPLICATE)]
    pass_time(engine, days=5)
    assert process(worker, old("a")) == [("a-1", Outcome.DUPLICATE)], "while the redrive counts, its id is kept"
    pass_time(engine, days=5)
    assert process(worker, old("a")) == [("a-1", Outcome.EXPIRED)]
    assert business.applied() == {"a": 1}


def test_an_expired_letter_is_redriven_only_by_someone_who_says_so(
    engine: Engine, leveled: Engine, business: Business
) -> None:
    move_horizon(engine)
    worker = make(MemorySource(), leveled)
    assert process(worker, old("a")) == [("a-1", Outcome.EXPIRED)]
    letters = DeadLetters(engine)
    with pytest.raises(InvalidConfiguration, match=r"is too old to tell .* redrive it with --expired"):
        letters.redrive(only_letter(engine), lambda _: pytest.fail("it is not sent"))
    assert process(worker, old("a")) == [("a-1", Outcome.DEAD)], "it waits as before"
    letters.redrive(only_letter(engine), lambda _: None, expired=True)
    assert process(worker, old("a", receive_count=3)) == [("a-3", Outcome.PROCESSED)]
    assert process(worker, old("a")) == [("a-1", Outcome.DUPLICATE)]
    pass_time(engine, days=8)
    assert process(worker, old("a")) == [("a-1", Outcome.EXPIRED)], "after the window of its own"
    assert business.applied() == {"a": 1}


def test_an_operation_leaves_expired_letters_waiting_unless_it_is_to_redrive_them(engine: Engine) -> None:
    move_horizon(engine)
    process(make(MemorySource(), engine), old("a"))
    operations, sent = LetterOperations(engine), []
    for expired in (False, True):
        operation = operations.select(LetterFilter(), OperationKind.REDRIVE, by="ann", expired=expired)
        assert operation is not None
        done = operations.carry_out(operation.operation_id, lambda letter: sent.append(letter.message_id))
        assert done.outcomes == {"redriven": 1} if expired else {"failed": 1}
    assert sent == ["a"]


def test_a_copy_that_meets_a_redrive_which_its_snapshot_does_not_see_is_handed_back(
    engine: Engine, business: Business, pool: ThreadPoolExecutor
) -> None:
    """At REPEATABLE READ: the copy waits for the redrive's transaction, and its own snapshot is older."""
    move_horizon(engine)
    repeatable = engine.execution_options(isolation_level="REPEATABLE READ")
    worker = make(MemorySource(), repeatable, inbox=Inbox("billing", wait_seconds=20))
    assert process(worker, old("a")) == [("a-1", Outcome.EXPIRED)]
    found = []

    def send(_letter: object) -> None:
        found.append(pool.submit(process, worker, old("a")))
        business.wait_for_waiter()

    DeadLetters(engine).redrive(only_letter(engine), send, expired=True)
    ((_, outcome),) = found[0].result(20)
    assert outcome in (Outcome.IN_FLIGHT, Outcome.PROCESSED)
    if outcome is Outcome.IN_FLIGHT:
        assert process(worker, old("a")) == [("a-1", Outcome.PROCESSED)]
    assert business.applied() == {"a": 1}
