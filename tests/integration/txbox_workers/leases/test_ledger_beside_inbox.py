"""A worker with a ledger beside its inbox: effects commit with their record, and under a lease."""

from collections import Counter

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from support.txbox.leases import acquired
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.ledger_worker import beside, expire, noting
from support.workers.memory_worker import delivery, process
from txbox import DeadLetters, Inbox, Message, Outcome
from txbox.leases import Lease, LeaseState, PostgresLedger
from txbox_workers.processing.outage_errors import DatabaseUnavailable


def test_beside_an_inbox_effects_commit_with_their_record_and_under_a_lease(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    fences: list[int] = []

    def handle(session: Session, message: Message, lease: Lease) -> None:
        fences.append(lease.fence)
        apply(session, message)

    worker = beside(engine, ledger, handle)
    assert process(worker, delivery("a"), delivery("b")) == [("a-1", Outcome.PROCESSED), ("b-1", Outcome.PROCESSED)]
    assert process(worker, delivery("a", receive_count=2)) == [("a-2", Outcome.DUPLICATE)]
    assert business.applied() == once("ab")
    assert business.recorded("mailing") == {"a", "b"}
    assert fences == sorted(set(fences))


def test_who_is_killed_between_commit_and_completion_leaves_a_duplicate(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    acquired(ledger, "a")
    with Session(engine) as session, session.begin():
        assert Inbox("mailing").record(session, "a")
        apply(session, Message("a", b""))
    worker = beside(engine, ledger, lambda session, message: apply(session, message))
    assert process(worker, delivery("a")) == [("a-1", Outcome.IN_FLIGHT)]
    expire(engine, "a")
    assert process(worker, delivery("a", receive_count=2)) == [("a-2", Outcome.DUPLICATE)]
    assert business.applied() == once("a")
    assert ledger.acquire("a").state is LeaseState.COMPLETED


def test_beside_an_inbox_a_failure_rolls_back_and_releases(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        raise ValueError("no")

    worker = beside(engine, ledger, handle, max_attempts=2)
    assert process(worker, delivery("a")) == [("a-1", Outcome.FAILED)]
    assert process(worker, delivery("a")) == [("a-1", Outcome.DEAD)]
    assert (business.applied(), business.recorded("mailing")) == (Counter(), set())


def test_beside_an_inbox_a_message_that_is_in_flight_there_is_no_attempt(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    worker = beside(engine, ledger, lambda session, message: apply(session, message), max_attempts=2)
    with Session(engine) as session, session.begin():
        Inbox("mailing").record(session, "a")
        for count in range(1, 5):
            assert process(worker, delivery("a", receive_count=count))[0][1] is Outcome.IN_FLIGHT
        session.rollback()
    assert process(worker, delivery("a", receive_count=5)) == [("a-5", Outcome.PROCESSED)]
    assert DeadLetters(engine).list() == []


def test_beside_an_inbox_a_handler_that_was_done_and_not_committed_may_have_had_its_effect(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    seen: list[tuple[int, int]] = []
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE effect ADD UNIQUE (body) DEFERRABLE INITIALLY DEFERRED")
        connection.exec_driver_sql("INSERT INTO effect (message_id, body) VALUES ('before', 'body of a')")
    worker = beside(engine, ledger, noting(seen))
    for count in (1, 2):
        assert process(worker, delivery("a", receive_count=count))[0][1] is Outcome.FAILED
    assert seen == [(1, 0), (2, 1)]


def has_to_run_again(session: Session) -> None:
    session.connection().exec_driver_sql("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")


def test_beside_an_inbox_a_transaction_that_is_run_again_is_told_of_its_first_run(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    seen: list[tuple[int, int]] = []

    def once_more(session: Session, run: int) -> None:
        if run == 1:
            has_to_run_again(session)

    assert process(beside(engine, ledger, noting(seen, once_more)), delivery("a")) == [("a-1", Outcome.PROCESSED)]
    assert seen == [(1, 0), (1, 1)]
    assert business.applied() == once("a")


def test_beside_an_inbox_a_failure_of_the_second_run_tells_the_next_attempt_of_the_first_run(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    seen: list[tuple[int, int]] = []

    def once_more_and_fail(session: Session, run: int) -> None:
        if run == 1:
            has_to_run_again(session)
        if run == 2:
            raise ValueError("no")

    worker = beside(engine, ledger, noting(seen, once_more_and_fail))
    assert process(worker, delivery("a")) == [("a-1", Outcome.FAILED)]
    assert process(worker, delivery("a", receive_count=2)) == [("a-2", Outcome.PROCESSED)]
    assert seen == [(1, 0), (1, 1), (2, 1)]


def test_beside_an_inbox_lost_connections_are_no_attempts_and_are_told(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    seen: list[tuple[int, int]] = []

    def lose_the_connection(session: Session, run: int) -> None:
        if run <= 4:
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    worker = beside(engine, ledger, noting(seen, lose_the_connection), max_attempts=2)
    for count in range(1, 5):
        with pytest.raises(DatabaseUnavailable):
            process(worker, delivery("a", receive_count=count))
    assert process(worker, delivery("a", receive_count=5)) == [("a-5", Outcome.PROCESSED)]
    assert seen == [(1, unknown) for unknown in range(5)]
    assert business.applied() == once("a")
    assert DeadLetters(engine).list() == []


def test_beside_an_inbox_a_transaction_that_took_too_long_is_an_attempt_and_is_told(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    seen: list[tuple[int, int]] = []

    def take_too_long(session: Session, run: int) -> None:
        if run == 1:
            pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
            session.execute(text("SET LOCAL idle_in_transaction_session_timeout = '10ms'"))
            wait_until(lambda: business.rows(f"SELECT pid FROM pg_stat_activity WHERE pid = {pid}") == [])
            session.execute(text("SELECT 1"))

    worker = beside(engine, ledger, noting(seen, take_too_long))
    assert process(worker, delivery("a")) == [("a-1", Outcome.FAILED)]
    assert process(worker, delivery("a", receive_count=2)) == [("a-2", Outcome.PROCESSED)]
    assert seen == [(1, 0), (2, 1)]
    assert business.applied() == once("a")
