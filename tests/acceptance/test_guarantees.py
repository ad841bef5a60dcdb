"""Lines of the table "When can my code run twice?" that no other test proves: kills of whole workers, and the price of
what is not promised.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.business import Business, apply
from txbox import Inbox, Message, Outcome
from txbox_workers.backoff import Backoff
from txbox_workers.memory import MemorySource
from txbox_workers.sqs import SqsWorker
from txbox_workers.worker import Worker

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

AT_ONCE = Backoff(first_seconds=0, longest_seconds=0)

PROGRAM = """
import os, signal, sys
from sqlalchemy import create_engine
from support.business import apply
from txbox import Inbox
from txbox.instrumentation import Committed, Received, Settled
from txbox.testing import kill_at
from txbox_workers.sqs import SqsWorker

database_url, queue_url, moment = sys.argv[1:]


def handle(session, message):
    apply(session, message)
    if moment == "handling":
        session.flush()
        os.kill(os.getpid(), signal.SIGKILL)


events = {"received": Received, "committed": Committed, "settled": Settled}
SqsWorker(
    queue_url,
    inbox=Inbox("billing"),
    engine=create_engine(database_url),
    handler=handle,
    wait_seconds=1,
    visibility_seconds=2,
    hooks=[kill_at(events[moment])] if moment in events else [],
).run()
"""


@pytest.fixture
def business(engine: Engine) -> Business:
    return Business(engine)


@pytest.mark.parametrize(
    ("moment", "applied_by_the_killed_one"), [("received", 0), ("handling", 0), ("committed", 3), ("settled", 3)]
)
def test_a_worker_that_is_killed_is_replaced_and_nothing_is_applied_twice(
    engine: Engine,
    schema_url: str,
    business: Business,
    sqs: "SQSClient",
    queue: str,
    moment: str,
    applied_by_the_killed_one: int,
) -> None:
    entries: Any = [
        {
            "Id": name,
            "MessageBody": "{}",
            "MessageAttributes": {"message-id": {"DataType": "String", "StringValue": name}},
        }
        for name in "abc"
    ]
    sqs.send_message_batch(QueueUrl=queue, Entries=entries)
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, schema_url, queue, moment],
        cwd=Path(__file__).parents[1],
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert sum(business.applied().values()) == applied_by_the_killed_one

    settled: list[str] = []
    work_through_sqs(engine, queue, settled, until=lambda: queue_is_empty(sqs, queue))
    assert business.applied() == dict.fromkeys("abc", 1)
    assert business.recorded() == set("abc")
    redelivered_after_its_commit = {"committed": 3}.get(moment, 0)
    assert settled.count(Outcome.DUPLICATE) >= redelivered_after_its_commit


def test_a_resend_without_a_message_id_is_another_message(
    engine: Engine, business: Business, sqs: "SQSClient", queue: str
) -> None:
    body = json.dumps({"purchase": 17})
    for attributes in ({}, {}, *[{"message-id": {"DataType": "String", "StringValue": "purchase-17"}}] * 2):
        sqs.send_message(QueueUrl=queue, MessageBody=body, MessageAttributes=attributes)
    work_through_sqs(engine, queue, [], until=lambda: queue_is_empty(sqs, queue))
    applied = business.applied()
    assert applied.pop("purchase-17") == 1
    assert sorted(applied.values()) == [1, 1], "two sends without an id are two messages"


def test_another_name_is_another_subscriber(engine: Engine, business: Business) -> None:
    for name in ("billing", "billing", "invoicing"):
        work_off(engine, ["a"], inbox=Inbox(name))
    assert business.applied() == {"a": 2}


def test_what_is_deleted_from_the_inbox_is_forgotten(engine: Engine, business: Business) -> None:
    work_off(engine, ["a", "b"])
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM processed_message WHERE message_id = 'a'")
    work_off(engine, ["a", "b"])
    assert business.applied() == {"a": 2, "b": 1}


def test_an_effect_outside_the_session_happens_in_every_run(engine: Engine, business: Business) -> None:
    mails: list[str] = []

    def handle(session: Session, message: Message) -> None:
        mails.append(message.id)
        apply(session, message)
        if message.id == "bad":
            raise ValueError("bad")

    work_off(engine, ["a", "bad"], handler=handle, max_attempts=2)
    assert business.applied() == {"a": 1}
    assert mails.count("a") == 2, "its batch was rolled back because of another message, and it was run again alone"


def work_off(engine: Engine, ids: Sequence[str], **options: Any) -> None:
    source = MemorySource([Message(name, b"{}") for name in ids])
    options = {"inbox": Inbox("billing"), "handler": apply, "backoff": AT_ONCE, **options}
    worker = Worker(source, engine=engine, **options)
    worker.start()
    assert source.wait_until_empty(20)
    assert worker.stop()


def work_through_sqs(engine: Engine, queue: str, settled: list[str], *, until: Any) -> None:
    from support.waiting import wait_until
    from txbox.instrumentation import Settled

    def keep(event: object) -> None:
        if isinstance(event, Settled):
            settled.append(event.outcome)

    worker = SqsWorker(
        queue, inbox=Inbox("billing"), engine=engine, handler=apply, wait_seconds=1, backoff=AT_ONCE, hooks=[keep]
    )
    worker.start()
    try:
        wait_until(until, "every delivery is acked")
    finally:
        assert worker.stop()


def queue_is_empty(sqs: "SQSClient", queue: str) -> bool:
    names: Any = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    answer = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)
    return set(answer["Attributes"].values()) == {"0"}
