"""What the demo does to its workers' acks: one of its three kinds of duplicates."""

import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import boto3
import pytest

from support.queues import QUEUE
from support.scripted_sqs import ScriptedSqs, receipts, refusing
from txbox_workers.demo.worker_process import LOST_ACK_SHARE, lose_acks

RECEIPTS = [f"r-{number}" for number in range(10)]


class Chance(random.Random):
    """Says what it is told to."""

    says = 0.0

    def random(self) -> float:
        return self.says


@pytest.fixture
def broker() -> Iterator[ScriptedSqs]:
    with closing(ScriptedSqs()) as broker:
        yield broker


@pytest.fixture
def chance() -> Chance:
    return Chance()


@pytest.fixture
def client(broker: ScriptedSqs, chance: Chance) -> Iterator[Any]:
    client = boto3.client(
        "sqs",
        region_name="eu-central-1",
        endpoint_url=broker.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    lose_acks(client, chance)
    with closing(client):
        yield client


def delete(client: Any) -> dict[str, Any]:
    entries = [{"Id": str(number), "ReceiptHandle": receipt} for number, receipt in enumerate(RECEIPTS)]
    answer: dict[str, Any] = client.delete_message_batch(QueueUrl=QUEUE, Entries=entries)
    return answer


def confirmed(answer: dict[str, Any]) -> list[str]:
    return sorted(entry["Id"] for entry in answer["Successful"])


def test_lost_acks_are_confirmed_and_not_carried_out(broker: ScriptedSqs, client: Any) -> None:
    answer = delete(client)
    (request,) = broker.requests("DeleteMessageBatch")
    assert receipts(request) == RECEIPTS[:1]  # SQS refuses a batch of none
    assert confirmed(answer) == [str(number) for number in range(10)]


def test_acks_that_are_not_lost_go_through(broker: ScriptedSqs, client: Any, chance: Chance) -> None:
    delete(client)
    chance.says = LOST_ACK_SHARE
    answer = delete(client)
    assert receipts(broker.requests("DeleteMessageBatch")[1]) == RECEIPTS
    assert confirmed(answer) == [str(number) for number in range(10)]  # each once: the first call's losses are past


def test_an_ack_that_sqs_refuses_stays_refused(broker: ScriptedSqs, client: Any) -> None:
    broker.answer = refusing("InternalError", "r-0", sender_fault=False)
    answer = delete(client)
    assert [entry["Id"] for entry in answer["Failed"]] == ["0"]
    assert confirmed(answer) == [str(number) for number in range(1, 10)]
