"""Lines of the table "When can my code run twice?" that no other test proves: the price of what is not promised."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.business import Business, apply
from support.waiting import wait_until
from txbox import Inbox, Message
from txbox.backoff import Backoff
from txbox_aws.sqs import SqsWorker
from txbox_workers.memory import MemorySource
from txbox_workers.worker import Worker

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

AT_ONCE = Backoff(first_seconds=0, longest_seconds=0)


@pytest.fixture
def business(engine: Engine) -> Business:
    return Business(engine)


def test_a_resend_without_a_message_id_is_another_message(
    engine: Engine, business: Business, sqs: "SQSClient", queue: str
) -> None:
    body = json.dumps({"purchase": 17})
    for attributes in ({}, {}, *[{"message-id": {"DataType": "String", "StringValue": "purchase-17"}}] * 2):
        sqs.send_message(QueueUrl=queue, MessageBody=body, MessageAttributes=attributes)
    work_through_sqs(engine, sqs, queue)
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


def work_through_sqs(engine: Engine, sqs: "SQSClient", queue: str) -> None:
    worker = SqsWorker(queue, inbox=Inbox("billing"), engine=engine, handler=apply, wait_seconds=1, backoff=AT_ONCE)
    worker.start()
    try:
        wait_until(lambda: queue_is_empty(sqs, queue), "every delivery is acked")
    finally:
        assert worker.stop()


def queue_is_empty(sqs: "SQSClient", queue: str) -> bool:
    names: Any = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    answer = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)
    return set(answer["Attributes"].values()) == {"0"}
