"""What is too old to judge, under leases: completed leases are forgotten, and their messages are not run again."""

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from support.postgres.statements import run
from support.txbox.horizon import LONG_AGO, forget, id_of, move_horizon
from support.txbox.leases import acquired
from support.workers.business import Business
from support.workers.ledger_worker import beside, make, noting
from support.workers.memory_worker import delivery, process
from txbox import DeadLetters, Expired, MalformedMessage, Message, Outcome, Reason, idempotent
from txbox.leases import PostgresLedger
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource


def old(message_id: str, receive_count: int = 1) -> Delivery:
    made = delivery(message_id, receive_count=receive_count)
    return replace(made, message=replace(made.message, sent_at=LONG_AGO))


def forget_lease(engine: Engine, message_id: str, days_ago: float = 7) -> None:
    move_horizon(engine, days_ago, "mailing")
    forget(engine, message_id, days_ago=days_ago, table="message_lease")


def test_a_completed_lease_that_was_forgotten_is_not_given_again(
    engine: Engine, ledger: PostgresLedger, mails: list[str], business: Business
) -> None:
    worker = make(MemorySource(), ledger, lambda message: mails.append(message.id), engine)
    assert process(worker, old("a"), old("b")) == [("a-1", Outcome.PROCESSED), ("b-1", Outcome.PROCESSED)]
    forget_lease(engine, "a")
    assert process(worker, old("a"), old("b"), delivery("c")) == [
        ("a-1", Outcome.EXPIRED),
        ("b-1", Outcome.DUPLICATE),
        ("c-1", Outcome.PROCESSED),
    ]
    assert process(worker, old("a")) == [("a-1", Outcome.DEAD)], "it is parked once"
    assert mails == ["a", "b", "c"]
    assert business.letters() == {"a": "expired"}


def test_an_expired_letter_that_is_redriven_runs_once_and_is_expired_again_after_its_own_window(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    move_horizon(engine, subscriber_id="mailing")
    worker = make(MemorySource(), ledger, lambda message: mails.append(message.id), engine)
    assert process(worker, old("a")) == [("a-1", Outcome.EXPIRED)]
    letters = DeadLetters(engine)
    (letter,) = letters.list()
    letters.redrive(letter.dead_letter_id or 0, lambda _: None, expired=True)
    assert process(worker, old("a")) == [("a-1", Outcome.PROCESSED)]
    assert process(worker, old("a")) == [("a-1", Outcome.DUPLICATE)]
    with engine.begin() as connection:  # time passes
        connection.exec_driver_sql("UPDATE dead_letter SET redriven_at = redriven_at - interval '20 days'")
    forget_lease(engine, "a")
    assert process(worker, old("a")) == [("a-1", Outcome.EXPIRED)]
    assert mails == ["a"]
    assert [letter.reason for letter in letters.list()] == [Reason.EXPIRED]


def test_without_dead_letters_it_is_handed_back_and_never_run(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    move_horizon(engine, subscriber_id="mailing")
    worker = make(MemorySource(), ledger, lambda message: mails.append(message.id), None)
    for count in (1, 2, 3):
        assert process(worker, old("a", count)) == [(f"a-{count}", Outcome.FAILED)]
    assert mails == []


def test_beside_an_inbox_the_inbox_judges(engine: Engine, ledger: PostgresLedger, business: Business) -> None:
    move_horizon(engine, subscriber_id="mailing")
    seen: list[tuple[int, int]] = []
    worker = beside(engine, ledger, noting(seen))
    assert process(worker, old("a"), delivery("b")) == [("a-1", Outcome.EXPIRED), ("b-1", Outcome.PROCESSED)]
    assert process(worker, old("a", 2)) == [("a-2", Outcome.DEAD)]
    assert (business.applied(), seen) == ({"b": 1}, [(1, 0)])


@pytest.mark.parametrize(("attempts", "max_attempts"), [(1, 10), (3, 10), (1, 1), (3, 2)])
def test_an_owner_that_was_killed_before_it_judged_leaves_the_message_to_be_judged(
    engine: Engine,
    ledger: PostgresLedger,
    mails: list[str],
    business: Business,
    attempts: int,
    max_attempts: int,
) -> None:
    worker = make(MemorySource(), ledger, lambda message: mails.append(message.id), engine, max_attempts=max_attempts)
    assert process(worker, old("a")) == [("a-1", Outcome.PROCESSED)]
    forget_lease(engine, "a")
    for _ in range(attempts):
        acquired(ledger, "a")
        run(engine, "UPDATE message_lease SET expires_at = now() - interval '1 second'")
    assert process(worker, old("a")) == [("a-1", Outcome.EXPIRED)]
    assert (mails, business.letters()) == (["a"], {"a": "expired"})


def test_a_copy_that_cannot_be_read_any_more_is_judged_too(
    engine: Engine, ledger: PostgresLedger, mails: list[str], business: Business
) -> None:
    worker = make(MemorySource(), ledger, lambda message: mails.append(message.id), engine)
    assert process(worker, old("a")) == [("a-1", Outcome.PROCESSED)]
    forget_lease(engine, "a")
    unread = replace(old("a"), problem=MalformedMessage("its envelope is another one"))
    assert process(worker, unread) == [("a-1", Outcome.EXPIRED)]
    assert (mails, business.letters()) == (["a"], {"a": "expired"})


def test_a_message_that_has_failed_before_the_horizon_is_known_and_runs(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    ledger.release(acquired(ledger, "a"))
    move_horizon(engine, subscriber_id="mailing")
    worker = make(MemorySource(), ledger, lambda message: mails.append(message.id), engine)
    assert process(worker, old("a")) == [("a-1", Outcome.PROCESSED)]
    assert mails == ["a"]


def test_a_function_that_runs_once_refuses_what_it_cannot_judge(engine: Engine, ledger: PostgresLedger) -> None:
    ran: list[str] = []
    send = idempotent(lambda message: ran.append(message.id), ledger=ledger)

    @idempotent(ledger=ledger, identify=lambda name, _: str(name))
    def of_old_message(name: str, _: Message) -> None:
        ran.append(name)

    @idempotent(ledger=PostgresLedger("mailing", engine=engine, unknown_age="park"), identify=lambda name: str(name))
    async def send_async(name: str) -> None:
        ran.append(name)

    move_horizon(engine, subscriber_id="mailing")
    for _ in range(3):
        with pytest.raises(Expired):
            send(Message("a", b"", sent_at=LONG_AGO))
        with pytest.raises(Expired):
            of_old_message("b", Message(id_of(LONG_AGO), b""))
        with pytest.raises(Expired, match="age unknown"):
            asyncio.run(send_async("b"))
    assert ran == []
    send(Message("c", b""))
    assert ran == ["c"]
