"""Redrives keep the order of a key in queues of SQS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.waiting import wait_until
from support.workers.business import Business, apply
from support.workers.memory_worker import at_work
from support.workers.ordered import by_key, failing, redrive, waiting
from txbox import Inbox, Message
from txbox_aws.sqs import SqsWorker, redrive_to_queue

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


def test_a_fifo_queue_keeps_its_order_over_dead_letters_and_redrives(
    engine: Engine, business: Business, sqs: SQSClient, make_queue: Callable[..., str]
) -> None:
    queue = make_queue(fifo=True)
    sent = {key: [f"{key}-{number}" for number in range(5)] for key in ("a", "b")}
    for number in range(5):
        for key in sent:
            sqs.send_message(
                QueueUrl=queue,
                MessageBody="body",
                MessageGroupId=key,
                MessageDeduplicationId=f"{key}-{number}",
                MessageAttributes={"message-id": {"DataType": "String", "StringValue": f"{key}-{number}"}},
            )
    broken = {"a-1", "b-0", "b-3"}

    def handler(session: Session, message: Message) -> None:
        failing(*broken)(session, message)

    options: dict[str, Any] = {"inbox": Inbox("billing"), "engine": engine, "ordered": True, "max_attempts": 1}
    workers = [SqsWorker(queue, handler=handler, client=sqs, wait_seconds=1, **options) for _ in range(2)]
    with at_work(*workers):
        wait_until(lambda: len(waiting(engine)) == 9, "all but a-0 are parked")
        broken -= {"a-1", "b-0"}
        redrive(engine, lambda letter: redrive_to_queue(letter, client=sqs))
        wait_until(lambda: list(waiting(engine)) == ["b-3", "b-4"], "what is repaired is processed")
        broken.clear()
        redrive(engine, lambda letter: redrive_to_queue(letter, client=sqs))
        wait_until(lambda: len(business.order()) == 10, "all are processed")
    assert by_key(business.order()) == sent


@pytest.mark.parametrize("fifo", [True, False])
def test_letters_keep_their_order_in_another_kind_of_queue_and_on_the_way_back(
    engine: Engine, business: Business, sqs: SQSClient, make_queue: Callable[..., str], fifo: bool
) -> None:
    queue, other = make_queue(fifo=fifo), make_queue(fifo=not fifo)
    sent = [f"m{number}" for number in range(5)]
    options: dict[str, Any] = {"inbox": Inbox("billing"), "engine": engine, "ordered": True, "client": sqs}
    with at_work(SqsWorker(queue, handler=failing("m0"), max_attempts=1, wait_seconds=0, **options)):
        for number, id_ in enumerate(sent):
            attributes = {"message-id": id_} | ({} if fifo else {"key": "g"})
            sqs.send_message(
                QueueUrl=queue,
                MessageBody="body",
                MessageAttributes={
                    name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()
                },
                **({"MessageGroupId": "g", "MessageDeduplicationId": id_} if fifo else {}),  # type: ignore[arg-type]
            )
            wait_until(lambda: len(waiting(engine)) > number, "it is parked")  # noqa: B023 - called at once
    redrive(engine, lambda letter: redrive_to_queue(letter, client=sqs, queue_url=other))
    with at_work(SqsWorker(other, handler=failing("m0"), max_attempts=1, wait_seconds=0, **options)):
        wait_until(lambda: len(waiting(engine)) == 5, "all are parked once more")
    assert list(waiting(engine)) == sent
    redrive(engine, lambda letter: redrive_to_queue(letter, client=sqs, queue_url=queue))
    with at_work(SqsWorker(queue, handler=apply, wait_seconds=0, **options)):
        wait_until(lambda: len(business.order()) == 5, "all are processed")
    assert business.order() == sent
    assert waiting(engine) == {}


def test_a_redriven_message_that_could_not_be_read_keeps_its_place_under_its_new_id(
    engine: Engine, business: Business, sqs: SQSClient, make_queue: Callable[..., str]
) -> None:
    queue = make_queue(fifo=True)
    for number, body in enumerate(('{"Type": "no notification"}', "second")):
        sqs.send_message(QueueUrl=queue, MessageBody=body, MessageGroupId="g", MessageDeduplicationId=f"m{number}")
    options: dict[str, Any] = {"inbox": Inbox("billing"), "engine": engine, "ordered": True, "handler": apply}
    with at_work(SqsWorker(queue, envelope="sns", client=sqs, wait_seconds=0, **options)):
        wait_until(lambda: len(waiting(engine)) == 2, "both are parked")
        first = next(iter(waiting(engine)))
        redrive(engine, lambda letter: redrive_to_queue(letter, client=sqs))
        wait_until(lambda: len(waiting(engine)) == 2, "both are parked again")
        assert next(iter(waiting(engine))) == first
        redrive(engine, lambda letter: redrive_to_queue(letter, client=sqs))
        wait_until(lambda: len(waiting(engine)) == 2, "and again")
    redrive(engine, lambda letter: redrive_to_queue(letter, client=sqs))
    with at_work(SqsWorker(queue, envelope="raw", client=sqs, wait_seconds=0, **options)):
        wait_until(lambda: len(business.order()) == 2, "both are processed")
    assert business.order("body") == ['{"Type": "no notification"}', "second"]
    assert waiting(engine) == {}
