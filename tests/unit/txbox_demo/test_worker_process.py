"""What the demo does to its workers: it loses their acks, and has them die at a moment of its choice."""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import boto3
import pytest

from support.queues import QUEUE
from support.scripted_sqs import ScriptedSqs, receipts, refusing
from txbox.instrumentation import Committed, Received
from txbox_demo import worker_process
from txbox_demo.orders import Orders
from txbox_demo.worker_process import COMMITTED, HANDLING, LOST_ACK_SHARE, RECEIVED, SENDING, SENT, lose_acks

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


A_BATCH = Received("x", "queue", ("m-1", "m-2"), ("r-1", "r-2"))
A_FIRST = Committed("x", "queue", 1, 0, 0.1)
A_DUPLICATE = Committed("x", "queue", 0, 1, 0.1)


@pytest.mark.parametrize(
    ("role", "moment", "times"),
    [
        ("billing", RECEIVED, 2),
        ("billing", HANDLING, 20),
        ("billing", COMMITTED, 2),
        ("notification", RECEIVED, 2),
        ("notification", SENDING, 20),
        ("notification", SENT, 20),
        ("notification", COMMITTED, 20),
    ],
)
def test_a_worker_dies_at_its_moment_and_at_no_other(
    role: str, moment: str, times: int, make_orders: Callable[..., Orders], monkeypatch: pytest.MonkeyPatch
) -> None:
    kills: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: kills.append(number))
    death = worker_process._Death(make_orders(role=role, moment=moment, life=20))
    happens: dict[str, Callable[[], None]] = {
        RECEIVED: lambda: death.hook(A_BATCH),
        COMMITTED: lambda: death.hook(A_FIRST),
        **{what: lambda what=what: death.comes_at(what) for what in (HANDLING, SENDING, SENT)},  # type: ignore[misc]
    }
    for other in happens.keys() - {moment}:
        for _ in range(100):
            happens[other]()
            death.hook(A_DUPLICATE)
    for _ in range(times - 1):
        happens[moment]()
    assert kills == []
    happens[moment]()
    assert kills == [signal.SIGKILL]
