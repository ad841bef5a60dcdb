"""The source: what it asks of SQS, the twelve hours that a delivery can be ours, what it takes for arguments."""

from typing import Any

import pytest

from support.aws.queues import QUEUE
from support.aws.scripted_sqs import ScriptedSqs, error, receipts, succeed, timeouts
from txbox import BrokerError, InvalidConfiguration, Outcome
from txbox_aws.sqs import SqsSource
from txbox_aws.sqs import source as source_module
from txbox_aws.sqs.queues import MAX_VISIBILITY_SECONDS
from txbox_workers.delivery import Delivery, Settlement


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"queue_url": "purchases"}, r"SqsWorker\.queue_url must be the URL of a queue, not 'purchases'"),
        ({"queue_url": ""}, r"SqsWorker\.queue_url must be the URL"),
        ({"queue_url": None}, r"SqsWorker\.queue_url must be the URL"),
        ({"batch_size": 0}, r"SqsWorker\.batch_size must be a whole number from 1 to 10, not 0"),
        ({"batch_size": 11}, r"SqsWorker\.batch_size must be a whole number from 1 to 10, not 11"),
        ({"wait_seconds": -1}, r"SqsWorker\.wait_seconds must be a whole number from 0 to 20, not -1"),
        ({"wait_seconds": 21}, r"SqsWorker\.wait_seconds must be a whole number from 0 to 20, not 21"),
        ({"wait_seconds": 0.5}, r"SqsWorker\.wait_seconds must be a whole number from 0 to 20, not 0\.5"),
        ({"visibility_seconds": 0}, r"SqsWorker\.visibility_seconds must be a whole number from 1 to 43200, not 0"),
        (
            {"visibility_seconds": 43_201},
            r"SqsWorker\.visibility_seconds must be a whole number from 1 to 43200, not 43201",
        ),
        ({"envelope": "xml"}, r"SqsWorker\.envelope must be one of auto, raw, .* not 'xml'"),
    ],
)
def test_an_argument_that_cannot_work_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        SqsSource(**{"queue_url": QUEUE, **wrong})


def test_receive_asks_for_what_it_was_told_and_for_all_attributes(client: Any, broker: ScriptedSqs) -> None:
    source = SqsSource(QUEUE, client=client, batch_size=3, wait_seconds=7, visibility_seconds=45)
    assert source.receive() == []
    assert broker.requests("ReceiveMessage") == [
        {
            "QueueUrl": QUEUE,
            "MaxNumberOfMessages": 3,
            "WaitTimeSeconds": 7,
            "VisibilityTimeout": 45,
            "MessageAttributeNames": ["All"],
            "MessageSystemAttributeNames": ["All"],
        }
    ]
    assert (source.name, source.visibility_seconds) == (QUEUE, 45)


# --- how long a delivery is ours -------------------------------------------------------------------------------------


class Clock:
    """Stands in for ``time`` in the module under test: hours pass at once."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(source_module, "time", clock)
    return clock


def receive_one(source: SqsSource, broker: ScriptedSqs, receipt: str = "r-0") -> list[Delivery]:
    message = {"MessageId": "m-0", "ReceiptHandle": receipt, "Body": "{}"}
    broker.answer = lambda action, request: {"Messages": [message]}
    received = list(source.receive())
    broker.answer = succeed
    return received


def test_extensions_end_at_the_twelve_hours_that_sqs_allows(
    source: SqsSource, broker: ScriptedSqs, clock: Clock
) -> None:
    received = receive_one(source, broker)
    clock.now += MAX_VISIBILITY_SECONDS - 60
    assert source.extend_visibility(received, 30) == {}
    clock.now += 40.5
    assert source.extend_visibility(received, 30) == {}
    # 19.5 seconds are left, and a second too much would be refused as a whole.
    assert timeouts(broker) == [30, 19]
    clock.now += 19
    assert source.extend_visibility(received, 30) == {"r-0": "SQS's limit of 12 hours is reached"}
    assert len(timeouts(broker)) == 2, "SQS is not asked for what it cannot grant"


def test_one_at_its_limit_does_not_keep_others_from_being_extended(
    source: SqsSource, broker: ScriptedSqs, clock: Clock
) -> None:
    old = receive_one(source, broker, "old")
    clock.now += MAX_VISIBILITY_SECONDS
    young = receive_one(source, broker, "young")
    assert source.extend_visibility([*old, *young], 30) == {"old": "SQS's limit of 12 hours is reached"}
    assert receipts(broker.requests("ChangeMessageVisibilityBatch")[0]) == ["young"]


@pytest.mark.parametrize("reachable", [True, False])
def test_nothing_is_remembered_of_a_delivery_once_it_is_settled(
    source: SqsSource, broker: ScriptedSqs, reachable: bool
) -> None:
    (acked,) = receive_one(source, broker, "acked")
    (given_back,) = receive_one(source, broker, "given back")
    if reachable:
        source.ack([acked])
        source.hand_back([Settlement(given_back, Outcome.FAILED)])
    else:
        broker.answer = lambda action, request: error("ServiceUnavailable", 503)
        with pytest.raises(BrokerError):
            source.ack([acked])
        with pytest.raises(BrokerError):
            source.hand_back([Settlement(given_back, Outcome.FAILED)])
    assert source._received_at == {}
