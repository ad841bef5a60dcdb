"""What queues say of their backlog, as metrics."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from support.aws.queues import send
from support.waiting import wait_until
from txbox import BrokerError
from txbox_aws.broker import SqsQueue
from txbox_cli.commands.operate.queue_collector import QueueCollector

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


def registry_of(*queues: str, limit_seconds: float = 20.0) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(QueueCollector(queues, interval_seconds=1e-9, limit_seconds=limit_seconds))
    return registry


def up(registry: CollectorRegistry, queue: str) -> float | None:
    return registry.get_sample_value("txbox_queue_up", {"source": queue})


def waiting(registry: CollectorRegistry, queue: str) -> float | None:
    return registry.get_sample_value("txbox_queue_messages", {"source": queue, "state": "waiting"})


def test_each_queue_says_how_much_it_holds_and_one_that_cannot_says_nothing(
    make_queue: Callable[..., str], sqs: "SQSClient", caplog: pytest.LogCaptureFixture
) -> None:
    full, empty = make_queue(), make_queue()
    send(sqs, full, ["a", "b"])
    missing = f"{empty}-not"
    registry = registry_of(full, empty, missing)
    assert [waiting(registry, one) for one in (full, empty, missing)] == [2, 0, None]
    assert [up(registry, one) for one in (full, empty, missing)] == [1, 1, 0]
    assert caplog.text.count(f"what waits in {missing} is not known: SQS refused GetQueueAttributes") == 1


def test_a_queue_that_gives_no_answer_keeps_the_others_not_waiting(
    make_queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, hanging, go_on = make_queue(), make_queue(), threading.Event()
    asked, real = [], SqsQueue.backlog

    def backlog(queue: SqsQueue) -> Mapping[str, int]:
        asked.append(queue._url)
        if queue._url == hanging and not go_on.wait(30):
            raise BrokerError("never")
        return real(queue)

    monkeypatch.setattr(SqsQueue, "backlog", backlog)
    registry = registry_of(answers, hanging, limit_seconds=1.0)
    for _ in range(2):
        began = time.monotonic()
        list(registry.collect())
        assert time.monotonic() - began < 3
    assert asked.count(hanging) == 1, "not once more while it hangs"
    assert (up(registry, answers), up(registry, hanging)) == (1, 0)
    go_on.set()
    wait_until(lambda: up(registry, hanging) == 1)
