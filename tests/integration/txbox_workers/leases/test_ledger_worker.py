"""A worker with a ledger in place of an inbox: each message is handled under a lease."""

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine

from support.txbox.leases import acquired
from support.waiting import wait_until
from support.workers.business import once
from support.workers.ledger_worker import expire, make
from support.workers.memory_worker import AT_ONCE, at_work, delivery, messages, numbered, process
from txbox import Message, Outcome
from txbox.instrumentation import Committed, Event, HeartbeatFailed, Settled
from txbox.leases import Lease, LeaseState, PostgresLedger
from txbox_aws.sqs import SqsWorker
from txbox_workers.memory_source import MemorySource

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


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


def test_what_another_owner_works_on_is_handed_back_for_no_longer_than_its_lease(
    engine: Engine, ledger: PostgresLedger, mails: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from txbox.backoff import Backoff
    from txbox_workers.processing import processor

    monkeypatch.setattr(processor, "IN_FLIGHT_BACKOFF", Backoff(3_600, 3_600))
    lease = acquired(PostgresLedger("mailing", engine=engine), "m", lease_seconds=20)
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
        other = acquired(PostgresLedger("mailing", engine=engine), message.id)
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
    other = PostgresLedger("mailing", engine=engine)

    def taken_over(message: Message) -> bool:
        expire(engine, message.id)
        return other.acquire(message.id).state is LeaseState.ACQUIRED  # or it was renewed in between

    def handle(message: Message) -> None:
        wait_until(lambda: taken_over(message), "another one has its lease")
        wait_until(lambda: [e for e in heard if isinstance(e, HeartbeatFailed)], "the renewal has failed")

    worker = make(MemorySource(), ledger, handle, None, lease_seconds=0.5, hooks=[heard.append])
    assert process(worker, delivery("m")) == [("m-1", Outcome.IN_FLIGHT)]
    (failed,) = [event for event in heard if isinstance(event, HeartbeatFailed)]
    assert failed.message_id == "m"
    assert "has run out" in failed.why


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


def test_a_queue_can_be_worked_off_without_any_database_but_the_ledger_s(
    sqs: "SQSClient", queue: str, aws: Any, mails: list[str]
) -> None:
    import boto3

    from support.aws.queues import send, wait_until_empty
    from support.txbox.leases import dynamodb_store

    store = dynamodb_store(boto3.client("dynamodb"))
    ids = [f"m-{number}" for number in range(12)]
    send(sqs, queue, ids + ids)
    worker = SqsWorker(
        queue, ledger=store.ledger(), handler=lambda m: mails.append(m.id), wait_seconds=0, backoff=AT_ONCE, threads=2
    )
    with at_work(worker):
        wait_until_empty(sqs, queue)
    assert Counter(mails) == once(ids)
    assert worker.counts[Outcome.PROCESSED] == len(ids)
