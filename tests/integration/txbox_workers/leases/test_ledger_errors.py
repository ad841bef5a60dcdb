"""Errors of ledgers, the worker's own and those that handlers use: whose fault they are."""

import threading
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine

from support.postgres.statements import run
from support.workers.business import Business, once
from support.workers.ledger_worker import make
from support.workers.memory_worker import AT_ONCE, at_work, delivery, feed, messages, process
from txbox import DeadLetters, Inbox, InFlight, LeaseLost, LedgerError, Message, Outcome, SchemaMissing, idempotent
from txbox.instrumentation import Event
from txbox.leases import Lease, PostgresLedger
from txbox_workers.memory_source import MemorySource
from txbox_workers.processing.outage_errors import DatabaseUnavailable
from txbox_workers.worker import Worker


@pytest.mark.parametrize("moment", ["acquire", "complete"])
def test_a_store_that_fails_is_no_message_s_fault(
    engine: Engine, ledger: PostgresLedger, mails: list[str], moment: str
) -> None:
    def rename(sql: str) -> None:
        run(engine, sql)

    def handle(message: Message) -> None:
        mails.append(message.id)
        if moment == "complete":
            rename("ALTER TABLE message_lease DROP COLUMN result")

    if moment == "acquire":
        rename("ALTER TABLE message_lease DROP COLUMN result")
    worker = make(MemorySource(), ledger, handle, engine)
    with pytest.raises(DatabaseUnavailable) as caught:
        process(worker, delivery("m"))
    assert caught.value.before_handler is (moment == "acquire")
    assert len(mails) == (moment == "complete")
    with pytest.raises(SchemaMissing, match=r"message_lease .*result.*`txbox db upgrade`"):
        worker._processor.check_recording()
    rename("ALTER TABLE message_lease ADD COLUMN result bytea")
    worker._processor.check_recording()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM message_lease WHERE message_id <> 'm'").scalar() == 0


def test_a_worker_waits_out_an_outage_of_its_ledger(engine: Engine, ledger: PostgresLedger, mails: list[str]) -> None:
    source = MemorySource()
    lost = threading.Event()

    def hear(event: Event) -> None:
        if type(event).__name__ == "DatabaseLost":
            lost.set()

    with at_work(make(source, ledger, lambda m: mails.append(m.id), None, hooks=[hear])):
        run(engine, "ALTER TABLE message_lease RENAME TO elsewhere")
        feed(source, messages("a", "b"))
        assert lost.wait(20)
        run(engine, "ALTER TABLE elsewhere RENAME TO message_lease")
        assert source.wait_until_empty(20)
    assert Counter(mails) == once("ab")


@pytest.mark.parametrize(
    ("kept_by", "error"),
    [
        *((kept_by, LedgerError("the other ledger is away")) for kept_by in ("ledger", "inbox", "both")),
        *((kept_by, InFlight("gifts", ["x"], seconds=1)) for kept_by in ("ledger", "inbox", "both")),
        *((kept_by, LeaseLost("gifts", "x", 1)) for kept_by in ("ledger", "both")),
    ],
)
def test_what_another_ledger_says_within_a_handler_is_no_message_s_fault(
    engine: Engine, ledger: PostgresLedger, business: Business, error: Exception, kept_by: str
) -> None:
    def handle(*_: object) -> None:
        raise error

    options: dict[str, Any] = {"ledger": ledger} if kept_by != "inbox" else {}
    beside: dict[str, Any] = {"inbox": Inbox("mailing"), "engine": engine}
    options |= beside if kept_by != "ledger" else {"dead_letters": DeadLetters(engine)}
    worker = Worker(MemorySource(), handler=handle, backoff=AT_ONCE, max_attempts=2, **options)
    for count in range(1, 6):
        assert process(worker, delivery("x", receive_count=count))[0][1] is Outcome.IN_FLIGHT
    assert DeadLetters(engine).list() == []
    assert business.failing() == {}


@pytest.mark.parametrize("beside_inbox", [False, True])
@pytest.mark.parametrize("how", ["terminated", "refused", "prepared elsewhere"])
def test_an_outage_of_a_database_that_the_handler_has_connected_to_is_no_attempt_and_is_told(
    engine: Engine, ledger: PostgresLedger, how: str, beside_inbox: bool
) -> None:
    """The mail is sent before the trouble, or it is not: nobody knows."""
    own = create_engine(engine.url if how != "refused" else engine.url.set(port=1), poolclass=NullPool)
    seen = []

    def handle(*_: object, lease: Lease) -> None:
        seen.append((lease.attempt, lease.unknown_attempts))
        if len(seen) == 4:
            return
        with own.connect() as connection:
            # The second is psycopg's name of a statement that it has prepared on another server, behind a pooler.
            terminate = "SELECT pg_terminate_backend(pg_backend_pid())"
            connection.exec_driver_sql(terminate if how == "terminated" else "EXECUTE _pg3_7")

    options: dict[str, Any] = {"inbox": Inbox("mailing")} if beside_inbox else {}
    worker = make(MemorySource(), ledger, handle, engine, max_attempts=2, **options)
    for count in (1, 2, 3):
        if beside_inbox and how == "prepared elsewhere":  # which connection that was of, nobody knows
            with pytest.raises(DatabaseUnavailable, match="prepare_threshold"):
                process(worker, delivery("x", receive_count=count))
        else:
            assert process(worker, delivery("x", receive_count=count)) == [(f"x-{count}", Outcome.IN_FLIGHT)]
    assert process(worker, delivery("x", receive_count=4)) == [("x-4", Outcome.PROCESSED)]
    assert seen == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert DeadLetters(engine).list() == []


def test_a_handler_whose_ledger_is_misused_for_good_fails(engine: Engine, business: Business) -> None:
    def handle(*_: object) -> None:
        raise LedgerError("no such table", permanent=True)

    worker = Worker(MemorySource(), inbox=Inbox("mailing"), engine=engine, handler=handle, backoff=AT_ONCE)
    assert process(worker, delivery("x")) == [("x-1", Outcome.FAILED)]


def test_an_idempotent_function_with_the_workers_own_ledger_does_not_wait_for_itself(
    engine: Engine, ledger: PostgresLedger
) -> None:
    worker = make(MemorySource(), ledger, idempotent(lambda message: None, ledger=ledger), engine, max_attempts=1)
    assert process(worker, delivery("x")) == [("x-1", Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert "waits for itself" in letter.error


async def coroutine_function(message: Message) -> None: ...


@pytest.mark.parametrize("kept_by", ["ledger", "inbox"])
def test_a_handler_that_returns_something_to_await_has_failed(
    engine: Engine, ledger: PostgresLedger, kept_by: str
) -> None:
    """It returns before its work is done."""
    alone: dict[str, Any] = {"ledger": ledger, "dead_letters": DeadLetters(engine)}
    options = alone if kept_by == "ledger" else {"inbox": Inbox("mailing"), "engine": engine}
    worker = Worker(MemorySource(), handler=lambda *given: coroutine_function(given[-1]), max_attempts=1, **options)
    assert process(worker, delivery("x")) == [("x-1", Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert "so its work is not done" in letter.error
