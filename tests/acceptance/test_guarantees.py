"""Lines of the table "When can my code run twice?" that no other test proves: the price of what is not promised."""

import json
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.aws.queues import wait_until_empty
from support.workers.business import Business, apply
from support.workers.memory_worker import at_work, messages, work_off
from txbox import Inbox, Message
from txbox.backoff import Backoff
from txbox_aws.sqs import SqsWorker
from txbox_workers.memory_source import MemorySource

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
    worker = SqsWorker(queue, inbox=Inbox("billing"), engine=engine, handler=apply, wait_seconds=1, backoff=AT_ONCE)
    with at_work(worker):
        wait_until_empty(sqs, queue)
    applied = business.applied()
    assert applied.pop("purchase-17") == 1
    assert sorted(applied.values()) == [1, 1], "two sends without an id are two messages"


def test_what_is_deleted_from_the_inbox_is_forgotten(engine: Engine, business: Business) -> None:
    work_off(MemorySource(messages("a", "b")), engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM processed_message WHERE message_id = 'a'")
    work_off(MemorySource(messages("a", "b")), engine)
    assert business.applied() == {"a": 2, "b": 1}


def test_an_effect_outside_the_session_happens_in_every_run(engine: Engine, business: Business) -> None:
    mails: list[str] = []

    def handle(session: Session, message: Message) -> None:
        mails.append(message.id)
        apply(session, message)
        if message.id == "bad":
            raise ValueError("bad")

    work_off(MemorySource(messages("a", "bad")), engine, handle, max_attempts=2)
    assert business.applied() == {"a": 1}
    assert mails.count("a") == 2, "its batch was rolled back because of another message, and it was run again alone"
