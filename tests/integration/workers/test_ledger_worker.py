"""A worker with a ledger, in place of an inbox or beside it."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.business import Business, apply, once
from support.leases import acquired
from support.memory_worker import AT_ONCE, at_work, delivery, messages, numbered, process
from support.waiting import wait_until
from txbox import (
    DeadLetters,
    EffectUnknown,
    Inbox,
    InFlight,
    InvalidConfiguration,
    LeaseLost,
    LedgerError,
    MalformedMessage,
    Message,
    Outcome,
    idempotent,
)
from txbox.failures import NO_OUTCOME
from txbox.instrumentation import Committed, Event, HeartbeatFailed, Settled
from txbox.ledgers import Lease, LeaseState, PostgresLedger
from txbox.message import fingerprint
from txbox_workers.delivery import Delivery
from txbox_workers.memory import MemorySource
from txbox_workers.outages import DatabaseUnavailable
from txbox_workers.sqs import SqsWorker
from txbox_workers.worker import Worker

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture
def ledger(engine: Engine) -> PostgresLedger:
    return PostgresLedger(engine, "mailing")


@pytest.fixture
def mails() -> list[str]:
    """What was sent: an effect that no transaction takes back."""
    return []


def make(source: MemorySource, ledger: PostgresLedger, handler: Any, engine: Engine | None, **options: Any) -> Worker:
    return Worker(source, ledger=ledger, engine=engine, handler=handler, **{"backoff": AT_ONCE, **options})


def expire(engine: Engine, message_id: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE message_lease SET expires_at = clock_timestamp() WHERE message_id = %s AND expires_at IS NOT NULL",
            (message_id,),
        )


def test_each_message_is_handled_once_whatever_comes_twice(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    source = MemorySource([*numbered(30), *numbered(30)])
    heard: list[Event] = []
    workers = [make(source, ledger, lambda m: mails.append(m.id), None, threads=2, hooks=[heard.append]) for _ in "ab"]
    with at_work(*workers):
        assert source.wait_until_empty(30)
    assert Counter(mails) == once(m.id for m in numbered(30))
    outcomes = Counter(event.outcome for event in heard if isinstance(event, Settled) and event.acked)
    assert outcomes == {Outcome.PROCESSED: 30, Outcome.DUPLICATE: 30}
    committed = [event for event in heard if isinstance(event, Committed)]
    assert sum(event.first for event in committed) == 30
    assert all(ledger.acquire(m.id).state is LeaseState.COMPLETED for m in numbered(30))


def test_a_failed_message_is_free_at_once_and_after_its_last_attempt_it_is_parked_whole(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    attempts = []

    def handle(message: Message, lease: Lease) -> None:
        if message.id == "bad":
            attempts.append((lease.attempt, lease.unknown_attempts))
            raise ValueError("no such address")
        mails.append(message.id)

    source = MemorySource(messages("a", "bad", "c"), name="queue-7")
    with at_work(make(source, ledger, handle, engine, max_attempts=3)):
        assert source.wait_until_empty(30)
    assert Counter(mails) == once("ac")
    assert attempts == [(1, 0), (2, 0), (3, 0)]
    (letter,) = DeadLetters(engine).list()
    assert (letter.subscriber_id, letter.message_id, letter.reason) == ("mailing", "bad", "failed")
    assert (letter.attempts, letter.source, letter.body) == (3, "queue-7", b"body of bad")
    assert letter.error == "ValueError: no such address"
    assert acquired(ledger, "bad").attempt == 1, "a redriven letter begins anew"


def test_a_message_that_takes_its_process_down_is_parked_and_not_run_again(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    for _ in range(3):
        acquired(ledger, "deadly")
        expire(engine, "deadly")
    worker = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine, max_attempts=3)
    assert process(worker, delivery("deadly", receive_count=4)) == [("deadly-4", Outcome.DEAD)]
    assert mails == []
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts, letter.error) == ("crashed", 3, NO_OUTCOME)
    # The ack was lost, and so was the release: it is found parked.
    for _ in range(3):
        acquired(ledger, "deadly")
        expire(engine, "deadly")
    assert process(worker, delivery("deadly", receive_count=5)) == [("deadly-5", Outcome.DEAD)]
    assert len(DeadLetters(engine).list()) == 1
    assert mails == []


def test_without_an_engine_dead_letters_are_left_to_the_broker(ledger: PostgresLedger) -> None:
    def handle(_: Message) -> None:
        raise ValueError("again")

    worker = make(MemorySource(), ledger, handle, None, max_attempts=2)
    outcomes = [process(worker, delivery("x", receive_count=count))[0][1] for count in range(1, 6)]
    assert outcomes == [Outcome.FAILED] * 5
    lease = acquired(ledger, "x")
    assert (lease.attempt, lease.unknown_attempts) == (6, 0)


def test_what_another_owner_works_on_is_handed_back_for_no_longer_than_its_lease(
    engine: Engine, ledger: PostgresLedger, mails: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from txbox.backoff import Backoff
    from txbox_workers import processor

    monkeypatch.setattr(processor, "IN_FLIGHT_BACKOFF", Backoff(3_600, 3_600))
    lease = acquired(PostgresLedger(engine, "mailing"), "m", seconds=20)
    worker = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine)
    ((settlement,),) = worker._processor.process([delivery("m")])
    assert (settlement.outcome, mails) == (Outcome.IN_FLIGHT, [])
    assert 0 < settlement.delay_seconds <= 20
    ledger.complete(lease)
    assert process(worker, delivery("m", receive_count=2)) == [("m-2", Outcome.DUPLICATE)]
    assert mails == []


def test_who_loses_its_lease_while_it_works_acks_nothing(engine: Engine, ledger: PostgresLedger) -> None:
    def handle(message: Message, lease: Lease) -> None:
        expire(engine, message.id)
        other = acquired(PostgresLedger(engine, "mailing"), message.id)
        assert other.fence > lease.fence

    worker = make(MemorySource(), ledger, handle, engine)
    assert process(worker, delivery("m")) == [("m-1", Outcome.IN_FLIGHT)]
    assert ledger.acquire("m").state is LeaseState.IN_FLIGHT, "it is the other one's to complete"


def test_a_slow_handler_keeps_its_lease(ledger: PostgresLedger) -> None:
    finish, seen = threading.Event(), []

    def handle(message: Message, lease: Lease) -> None:
        begun = time.monotonic()
        # Until it must have been renewed: the lease is longer ago than it is long, and still ours.
        wait_until(lambda: time.monotonic() - begun > 1.5, "the first lease is over")
        seen.append((ledger.acquire(message.id).state, lease.seconds_left > 0))
        finish.set()

    source = MemorySource(messages("slow"))
    with at_work(make(source, ledger, handle, None, lease_seconds=1.0)):
        assert finish.wait(20)
        assert source.wait_until_empty(20)
    assert seen == [(LeaseState.IN_FLIGHT, True)]


def test_a_renewal_that_fails_is_told(engine: Engine, ledger: PostgresLedger) -> None:
    heard: list[Event] = []

    def handle(message: Message) -> None:
        expire(engine, message.id)
        acquired(PostgresLedger(engine, "mailing"), message.id)
        wait_until(lambda: [e for e in heard if isinstance(e, HeartbeatFailed)], "the renewal has failed")

    worker = make(MemorySource(), ledger, handle, None, lease_seconds=0.5, hooks=[heard.append])
    assert process(worker, delivery("m")) == [("m-1", Outcome.IN_FLIGHT)]
    (failed,) = [event for event in heard if isinstance(event, HeartbeatFailed)]
    assert failed.message_id == "m"
    assert "has run out" in failed.why


def test_another_body_under_the_same_id_is_parked_and_never_run(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    ledger.complete(acquired(ledger, "m", fingerprint=fingerprint(b"another body")))
    worker = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine, fingerprint=True)
    assert process(worker, delivery("m")) == [("m-1", Outcome.MISMATCH)]
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, mails) == ("mismatch", [])
    unparked = make(MemorySource(), ledger, lambda m: mails.append(m.id), None, fingerprint=True)
    assert process(unparked, delivery("m")) == [("m-1", Outcome.FAILED)]
    careless = make(MemorySource(), ledger, lambda m: mails.append(m.id), None)
    assert process(careless, delivery("m")) == [("m-1", Outcome.DUPLICATE)]


def test_a_message_that_cannot_be_read_has_its_attempts_and_is_parked(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    worker = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine, max_attempts=2)
    unreadable = Delivery(Message("x", b"{"), receipt="r", body=b"{", problem=MalformedMessage("not JSON"))
    assert process(worker, unreadable) == [("r", Outcome.FAILED)]
    assert process(worker, unreadable) == [("r", Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts, mails) == ("malformed", 2, [])


def test_what_follows_a_failure_in_its_group_is_not_begun(ledger: PostgresLedger, mails: list[str]) -> None:
    def handle(message: Message) -> None:
        if message.id == "a1":
            raise ValueError("later")
        mails.append(message.id)

    worker = make(MemorySource(), ledger, handle, None)
    deliveries = [delivery(id_, group=id_[0]) for id_ in ("a1", "b1", "a2", "b2")]
    assert process(worker, *deliveries) == [
        ("a1-1", Outcome.FAILED),
        ("b1-1", Outcome.PROCESSED),
        ("a2-1", Outcome.IN_FLIGHT),
        ("b2-1", Outcome.PROCESSED),
    ]
    assert mails == ["b1", "b2"]


@pytest.mark.parametrize("moment", ["acquire", "complete"])
def test_a_store_that_fails_is_no_message_s_fault(
    engine: Engine, ledger: PostgresLedger, mails: list[str], moment: str
) -> None:
    def rename(sql: str) -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(sql)

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
    with pytest.raises(LedgerError):
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
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE message_lease RENAME TO elsewhere")
        for message in messages("a", "b"):
            source.send(message)
        assert lost.wait(20)
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO message_lease")
        assert source.wait_until_empty(20)
    assert Counter(mails) == once("ab")


def test_a_parked_message_whose_ack_was_lost_is_not_run_again(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    def handle(message: Message) -> None:
        mails.append(message.id)
        raise ValueError("no such address")

    worker = make(MemorySource(), ledger, handle, engine, max_attempts=2)
    outcomes = [process(worker, delivery("x", receive_count=count))[0][1] for count in range(1, 6)]
    assert outcomes == [Outcome.FAILED, Outcome.DEAD, Outcome.DEAD, Outcome.DEAD, Outcome.DEAD]
    assert mails == ["x", "x"]
    letters = DeadLetters(engine)
    (letter,) = letters.list()
    letters.redrive(letter.dead_letter_id or 0, lambda _: None)
    assert process(worker, delivery("x", receive_count=6)) == [("x-6", Outcome.FAILED)], "redriven, it has its attempts"


def test_a_redriven_letter_whose_effect_may_have_happened_is_told_so(engine: Engine, ledger: PostgresLedger) -> None:
    seen = []

    def handle(message: Message, lease: Lease) -> None:
        seen.append((lease.attempt, lease.unknown_attempts))
        raise EffectUnknown("no answer")

    worker = make(MemorySource(), ledger, handle, engine, max_attempts=2)
    assert process(worker, delivery("x")) == [("x-1", Outcome.FAILED)]
    assert process(worker, delivery("x", receive_count=2)) == [("x-2", Outcome.DEAD)]
    letters = DeadLetters(engine)
    (letter,) = letters.list()
    letters.redrive(letter.dead_letter_id or 0, lambda _: None)
    process(worker, delivery("x"))
    assert seen == [(1, 0), (2, 1), (1, 2)]


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
    options |= {"inbox": Inbox("mailing")} if kept_by != "ledger" else {}
    worker = Worker(MemorySource(), engine=engine, handler=handle, backoff=AT_ONCE, max_attempts=2, **options)
    for count in range(1, 6):
        assert process(worker, delivery("x", receive_count=count))[0][1] is Outcome.IN_FLIGHT
    assert DeadLetters(engine).list() == []
    assert business.failing() == {}


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


# --- beside an inbox -------------------------------------------------------------------------------------------------


def beside(engine: Engine, ledger: PostgresLedger, handler: Any, **options: Any) -> Worker:
    return make(MemorySource(), ledger, handler, engine, inbox=Inbox("mailing", wait_seconds=0.2), **options)


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
    seen = []
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE effect ADD UNIQUE (body) DEFERRABLE INITIALLY DEFERRED")
        connection.exec_driver_sql("INSERT INTO effect (message_id, body) VALUES ('before', 'body of a')")

    def handle(session: Session, message: Message, lease: Lease) -> None:
        seen.append((lease.attempt, lease.unknown_attempts))
        apply(session, message)

    worker = beside(engine, ledger, handle)
    for count in (1, 2):
        assert process(worker, delivery("a", receive_count=count))[0][1] is Outcome.FAILED
    assert seen == [(1, 0), (2, 1)]


def test_beside_an_inbox_a_transaction_that_is_run_again_is_told_of_its_first_run(
    engine: Engine, ledger: PostgresLedger, business: Business
) -> None:
    seen = []

    def handle(session: Session, message: Message, lease: Lease) -> None:
        seen.append((lease.attempt, lease.unknown_attempts))
        apply(session, message)
        if len(seen) == 1:
            session.connection().exec_driver_sql("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    assert process(beside(engine, ledger, handle), delivery("a")) == [("a-1", Outcome.PROCESSED)]
    assert seen == [(1, 0), (1, 1)]
    assert business.applied() == once("a")


# --- over SQS --------------------------------------------------------------------------------------------------------


def test_a_queue_can_be_worked_off_without_any_database_but_the_ledger_s(
    sqs: "SQSClient", queue: str, aws: Any, mails: list[str]
) -> None:
    import boto3

    from support.leases import dynamodb_store
    from support.queues import send, wait_until_empty

    store = dynamodb_store(boto3.client("dynamodb"))
    ids = [f"m-{number}" for number in range(12)]
    send(sqs, queue, ids + ids)
    worker = SqsWorker(
        queue, ledger=store.ledger(), handler=lambda m: mails.append(m.id), wait_seconds=1, backoff=AT_ONCE, threads=2
    )
    with at_work(worker):
        wait_until_empty(sqs, queue)
    assert Counter(mails) == once(ids)
    assert worker.counts[Outcome.PROCESSED] == len(ids)


# --- what cannot work ------------------------------------------------------------------------------------------------


async def coroutine_function(message: Message) -> None: ...


def generator_function(session: Session, message: Message) -> Any:
    yield


class CallableCoroutine:
    async def __call__(self, message: Message) -> None: ...


@pytest.mark.parametrize("kept_by", ["ledger", "inbox"])
def test_a_handler_that_returns_something_to_await_has_failed(
    engine: Engine, ledger: PostgresLedger, kept_by: str
) -> None:
    options: dict[str, Any] = {"ledger": ledger} if kept_by == "ledger" else {"inbox": Inbox("mailing")}
    worker = Worker(
        MemorySource(),
        engine=engine,
        handler=lambda *given: coroutine_function(given[-1]),
        max_attempts=1,
        **options,
    )
    assert process(worker, delivery("x")) == [("x-1", Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert "so its work is not done" in letter.error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ledger": None}, "needs an inbox, or a ledger, or both"),
        ({"ledger": None, "inbox": Inbox("mailing")}, "needs the engine of its inbox"),
        ({"handler": None}, "either handler or batch_handler"),
        ({"handler": "mail"}, r"Worker\.handler must be a function, not str"),
        ({"handler": coroutine_function}, "must be a plain function"),
        ({"handler": generator_function}, "must be a plain function"),
        ({"handler": CallableCoroutine()}, "must be a plain function"),
        ({"handler": lambda session, message: None}, r"is called with \(message\) here"),
        ({"handler": lambda lease, message: None}, "has to be its last one"),
        ({"inbox": Inbox("mailing"), "engine": "any", "handler": lambda message: None}, r"\(session, message\)"),
        (
            {
                "ledger": None,
                "inbox": Inbox("mailing"),
                "engine": "any",
                "handler": None,
                "batch_handler": generator_function,
            },
            r"Worker\.batch_handler must be a plain function",
        ),
        ({"ledger": Inbox("mailing")}, r"Worker\.ledger must be a ledger"),
        ({"ledger": PostgresLedger}, "not PostgresLedger"),
        ({"engine": "postgresql://"}, r"Worker\.engine must be an Engine, not str"),
        ({"lease_seconds": "30"}, r"Worker\.lease_seconds must be from"),
        ({"handler": None, "batch_handler": print}, "with a ledger needs handler"),
        ({"inbox": Inbox("billing"), "engine": "any"}, "an inbox of billing and a ledger of mailing"),
        ({"lease_seconds": 0}, r"Worker\.lease_seconds must be from"),
        ({"ledger": None, "inbox": Inbox("mailing"), "engine": "any", "fingerprint": True}, "the ledger's"),
        ({"max_attempts": 0}, r"Worker\.max_attempts"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    engine: Engine, ledger: PostgresLedger, options: dict[str, Any], text: str
) -> None:
    handler: Callable[..., object] = print
    arguments: dict[str, Any] = {"ledger": ledger, "handler": handler, **options}
    if arguments.get("engine") == "any":
        arguments["engine"] = engine
    with pytest.raises(InvalidConfiguration, match=text):
        Worker(MemorySource(), **arguments)
