"""Messages for workers of this database that could run twice: a handler that is slow, and a copy on another road."""

import threading
import time

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.txbox.outbox import publish
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.memory_worker import at_work, messages, work_off
from txbox import Inbox, Message, Outcome, Outgoing
from txbox_workers.memory_source import MemorySource
from txbox_workers.postgres import PostgresWorker


@pytest.fixture
def business(engine: Engine) -> Business:
    return Business(engine)


def send(engine: Engine, *ids: str) -> None:
    publish(engine, *(Outgoing("inbox:billing", "{}", message_id=one) for one in ids))


def test_a_handler_slower_than_its_claim_keeps_it(engine: Engine, business: Business) -> None:
    begun = threading.Event()

    def slow(session: Session, message: Message) -> None:
        apply(session, message)
        begun.set()
        time.sleep(4)  # meanwhile the claim runs out, unless it is renewed

    worker = PostgresWorker(inbox=Inbox("billing"), engine=engine, handler=slow, visibility_seconds=1)
    other = PostgresWorker(inbox=Inbox("billing"), engine=engine, handler=apply)
    send(engine, "a")
    with at_work(worker):
        assert begun.wait(20)
        with at_work(other):
            wait_until(lambda: business.applied() == once("a"))
    assert worker.counts == {Outcome.PROCESSED: 1}
    assert other.counts == {}, "it was not even given the message"


def test_what_came_by_another_road_is_a_duplicate(engine: Engine, business: Business) -> None:
    work_off(MemorySource(messages("a", "b")), engine)
    with Session(engine) as session, session.begin():
        assert Inbox("billing").record(session, "c")
    worker = PostgresWorker(inbox=Inbox("billing"), engine=engine, handler=apply)
    send(engine, "a", "b", "c", "d")
    with at_work(worker):
        wait_until(lambda: sum(worker.counts.values()) == 4)
    assert worker.counts == {Outcome.DUPLICATE: 3, Outcome.PROCESSED: 1}
    assert business.applied() == once("abd")
    assert business.rows("SELECT message_id FROM outbox_message") == []
    work_off(MemorySource(messages("d")), engine)
    assert business.applied() == once("abd")
