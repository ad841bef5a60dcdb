import time

import pytest
from moto.sqs import models
from moto.sqs.exceptions import ReceiptHandleIsInvalid

from txbox_local.aws import moto_sqs
from txbox_local.aws.moto_sqs import LocalQueue, LocalSqsBackend


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> LocalSqsBackend:
    monkeypatch.setattr(models, "Queue", LocalQueue)
    backend = LocalSqsBackend("us-east-1", "123456789012")
    # A dead-letter queue is looked up in moto's registry of backends.
    monkeypatch.setattr(models, "sqs_backends", {"123456789012": {"us-east-1": backend}})
    backend.create_queue("plain", VisibilityTimeout="30")
    backend.create_queue("ordered.fifo", FifoQueue="true", VisibilityTimeout="30")
    return backend


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Unix time in milliseconds for the queues; a test moves it."""
    now = [time.time() * 1000]
    monkeypatch.setattr(moto_sqs, "_now_ms", lambda: now[0])
    return now


def send(backend: LocalSqsBackend, *bodies: str) -> None:
    for body in bodies:
        backend.send_message("ordered.fifo", body, deduplication_id=body, group_id=body[0])


def receive(backend: LocalSqsBackend, count: int = 10, queue: str = "ordered.fifo") -> dict[str, str]:
    messages = backend.receive_message(queue, count, 0, 30)
    return {message.body: message.receipt_handle or "" for message in messages}


def test_a_group_in_flight_is_not_delivered(backend: LocalSqsBackend) -> None:
    send(backend, "a1", "a2", "b1")
    first = receive(backend, 1)
    assert list(first) == ["a1"]
    assert list(receive(backend)) == ["b1"]
    backend.delete_message("ordered.fifo", first["a1"])
    assert list(receive(backend)) == ["a2"]


def test_messages_of_a_group_that_expire_together_keep_their_order(
    backend: LocalSqsBackend, clock: list[float]
) -> None:
    send(backend, "a1", "a2", "a3")
    clock[0] += 1000
    assert list(receive(backend, 2)) == ["a1", "a2"]
    clock[0] += 31_000
    assert list(receive(backend)) == ["a1", "a2", "a3"]


def test_a_released_message_waits_for_the_rest_of_its_group(backend: LocalSqsBackend) -> None:
    send(backend, "a1", "a2")
    handles = receive(backend)
    backend.change_message_visibility("ordered.fifo", handles["a1"], 0)
    assert receive(backend) == {}
    backend.delete_message("ordered.fifo", handles["a2"])
    assert list(receive(backend)) == ["a1"]


def test_a_deduplication_id_is_remembered_after_deletion(backend: LocalSqsBackend, clock: list[float]) -> None:
    send(backend, "a1")
    clock[0] += 1000
    backend.delete_message("ordered.fifo", receive(backend)["a1"])
    send(backend, "a1")
    assert receive(backend) == {}
    clock[0] += moto_sqs.DEDUPLICATION_INTERVAL_MS
    send(backend, "a1")
    assert list(receive(backend)) == ["a1"]


def test_only_the_latest_delivery_counts_and_deleting_twice_is_fine(
    backend: LocalSqsBackend, clock: list[float]
) -> None:
    backend.send_message("plain", "x")
    clock[0] += 1000
    early = receive(backend, queue="plain")["x"]
    clock[0] += 31_000
    late = backend.receive_message("plain", 1, 0, 30)[0]
    assert late.approximate_receive_count == 2
    backend.delete_message("plain", early)
    backend.delete_message("plain", str(late.receipt_handle))
    with pytest.raises(ReceiptHandleIsInvalid):
        backend.delete_message("plain", "never given")


def test_exhausted_messages_go_to_the_dead_letter_queue(backend: LocalSqsBackend, clock: list[float]) -> None:
    backend.create_queue("dead")
    arn = backend.get_queue("dead").queue_arn
    backend.set_queue_attributes(
        "plain", {"RedrivePolicy": f'{{"deadLetterTargetArn": "{arn}", "maxReceiveCount": 1}}'}
    )
    backend.send_message("plain", "x")
    clock[0] += 1000
    assert list(receive(backend, queue="plain")) == ["x"]
    clock[0] += 31_000
    assert receive(backend, queue="plain") == {}
    assert list(receive(backend, queue="dead")) == ["x"]


def test_counts(backend: LocalSqsBackend, clock: list[float]) -> None:
    backend.send_message("plain", "waiting")
    backend.send_message("plain", "in flight")
    backend.send_message("plain", "delayed", delay_seconds=60)
    clock[0] += 1000
    receive(backend, 1, "plain")
    attributes = backend.get_queue_attributes("plain", ["All"])
    assert [attributes[name] for name in moto_sqs.COUNTS] == [1, 1, 1]
    assert backend.get_queue_attributes("plain", ["VisibilityTimeout"]) == {"VisibilityTimeout": 30}
