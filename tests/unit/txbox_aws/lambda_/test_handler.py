"""The function on Lambda, as far as neither a database nor a queue is needed."""

import base64
import os
import subprocess
import sys
from typing import Any

import pytest
from sqlalchemy import create_engine

from support.aws.envelopes import SNS_NOTIFICATION
from support.aws.lambda_events import FIFO_ARN, FIFO_EVENT, STANDARD_EVENT, STANDARD_URL, event, record
from txbox import Inbox, InvalidConfiguration
from txbox.leases.handlers import has_lease_parameter
from txbox_aws.envelopes import Envelope
from txbox_aws.lambda_ import deadline as deadlines
from txbox_aws.lambda_ import sqs_handler
from txbox_aws.lambda_.deadline import Deadline, seconds_left, timed, timed_batch
from txbox_aws.lambda_.event_source import batch_item_failures, batches, queue_url

# --- events ----------------------------------------------------------------------------------------------------------


def test_a_standard_queues_event_becomes_deliveries() -> None:
    (batch,) = batches(STANDARD_EVENT)
    first, second = batch.deliveries
    assert batch.source == STANDARD_URL
    assert batch.item_ids == {
        "AQEBwJnKyrHigUMZj6rYigCgxlaS3SLy0a...": "059f36b4-87a3-44ab-83d2-661975830a7d",
        "AQEBzWwaftRI0KuVm4tP+/7q1rGgNqicHq...": "2e1424d4-f796-459a-8184-9c92662be6da",
    }
    assert (first.message.id, second.message.id) == tuple(batch.item_ids.values())
    assert first.message.body == first.body == b"Test message."
    assert first.message.headers["myattribute"] == "myValue"
    assert first.message.source == STANDARD_URL
    assert first.receive_count == 1
    assert first.group is None
    assert first.problem is None
    assert first.envelope["attributes"] == {"myAttribute": {"DataType": "String", "StringValue": "myValue"}}


def test_a_fifo_queue_stops_as_a_whole_and_its_messages_keep_their_groups() -> None:
    (batch,) = batches(event(*FIFO_EVENT["Records"], record("a", group="g-1"), record("b", group="g-2")))
    assert len({delivery.failure_group for delivery in batch.deliveries}) == 1
    assert [delivery.group for delivery in batch.deliveries] == ["1", "g-1", "g-2"]
    assert [delivery.envelope["system"]["MessageGroupId"] for delivery in batch.deliveries] == ["1", "g-1", "g-2"]
    assert batch.deliveries[0].message.id == "1 1", "group and deduplication id, as for a worker"


def test_two_fifo_queues_stop_by_themselves() -> None:
    other = FIFO_ARN.replace("fifo.fifo", "other.fifo")
    found = batches(event(record("a", group="g"), record("b", group="g", arn=other), record("c", group="g")))
    assert [[d.message.id for d in batch.deliveries] for batch in found] == [["a", "c"], ["b"]]
    assert found[0].deliveries[0].failure_group != found[1].deliveries[0].failure_group


def test_binary_attributes_are_bytes_again() -> None:
    value = base64.b64encode(b"\x00\xff").decode()
    attribute = {"binaryValue": value, "stringListValues": [], "binaryListValues": [], "dataType": "Binary"}
    (batch,) = batches(event(record("a") | {"messageAttributes": {"raw": attribute}}))
    (delivery,) = batch.deliveries
    assert delivery.message.headers["raw"] == value
    assert delivery.envelope["attributes"]["raw"] == {"DataType": "Binary", "BinaryValue": value}


def test_the_reading_and_the_id_are_the_hosts_choice() -> None:
    (batch,) = batches(
        event(record("a", SNS_NOTIFICATION)),
        envelope=Envelope.RAW,
        identify=lambda message: f"mine {len(message.body)}",
    )
    (delivery,) = batch.deliveries
    assert delivery.message.body == delivery.body
    assert delivery.message.id == f"mine {len(delivery.body)}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "no Records"),
        ({"detail-type": "Scheduled Event", "source": "aws.events"}, "detail-type"),
        ([], r"no Records, but \[\]"),
        (None, "None"),
        ({"Records": "many"}, "no Records"),
        ({"Records": [{"EventSource": "aws:sns", "Sns": {}}]}, "aws:sns"),
        ({"Records": [{"eventSource": "aws:kinesis"}]}, "aws:kinesis"),
        ({"Records": ["a"]}, "None"),
        (event(record("a") | {"eventSourceARN": "arn:aws:sns:us-east-2:123456789012:t"}), "not the ARN of a queue"),
        (event({k: v for k, v in record("a").items() if k != "receiptHandle"}), "receiptHandle"),
        (
            event(record("a") | {"messageAttributes": {"b": {"binaryValue": "?", "dataType": "Binary"}}}),
            "cannot be read",
        ),
    ],
)
def test_what_is_no_event_of_a_queue_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"(?s)sqs_handler was invoked with.*{said}.*SQS queue"):
        batches(wrong)


def test_an_event_without_records_is_answered() -> None:
    handle = sqs_handler(
        inbox=Inbox("billing"), engine=create_engine("postgresql+psycopg://nowhere"), handler=lambda *_: None
    )
    assert handle({"Records": []}, None) == {"batchItemFailures": []}


def test_the_answer_names_each_once_and_in_order() -> None:
    failures = [{"itemIdentifier": "b"}, {"itemIdentifier": "a"}]
    assert batch_item_failures(["b", "a", "b"]) == {"batchItemFailures": failures}


@pytest.mark.parametrize(
    ("arn", "url"),
    [
        ("arn:aws:sqs:eu-central-1:1:q", "https://sqs.eu-central-1.amazonaws.com/1/q"),
        ("arn:aws-us-gov:sqs:us-gov-west-1:1:q.fifo", "https://sqs.us-gov-west-1.amazonaws.com/1/q.fifo"),
        ("arn:aws-cn:sqs:cn-north-1:1:q", "https://sqs.cn-north-1.amazonaws.com.cn/1/q"),
    ],
)
def test_a_queues_url(arn: str, url: str) -> None:
    assert queue_url(arn) == url


# --- the deadline ----------------------------------------------------------------------------------------------------


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadlines, "elapsed", clock)
    return clock


def test_nothing_is_begun_within_the_margin(clock: Clock) -> None:
    deadline = Deadline(2.0)
    deadline.begin(10.0)
    assert deadline.ends_at() == 1010.0
    clock.now = 1007.9
    assert not deadline.is_set()
    clock.now = 1008.0
    assert deadline.is_set()


def test_a_short_invocation_has_a_short_margin(clock: Clock) -> None:
    deadline = Deadline(2.0)
    deadline.begin(1.0)
    assert not deadline.is_set()
    clock.now += 0.5
    assert deadline.is_set()


def test_a_handler_is_begun_only_if_one_like_those_before_fits(clock: Clock) -> None:
    deadline = Deadline(1.0)
    deadline.begin(10.0)
    clock.now += 4.0
    deadline.has_run(4.0)
    assert not deadline.is_set()
    clock.now += 1.0
    assert deadline.is_set()


def test_each_invocation_begins_one_however_long_it_may_take(clock: Clock) -> None:
    deadline = Deadline(1.0)
    deadline.begin(10.0)
    deadline.has_run(60.0)
    assert deadline.is_set()
    deadline.begin(10.0)
    assert not deadline.is_set()
    deadline.has_run(0.1)
    assert deadline.is_set(), "one is not enough to forget the slow one"


def test_a_single_slow_handler_is_forgotten(clock: Clock) -> None:
    deadline = Deadline(1.0)
    deadline.begin(30.0)
    deadline.has_run(60.0)
    for _ in range(20):
        deadline.has_run(0.1)
    assert not deadline.is_set()


def test_without_a_context_there_is_no_deadline(clock: Clock) -> None:
    deadline = Deadline(1.0)
    deadline.begin(5.0)
    deadline.has_run(60.0)
    deadline.begin(seconds_left(None))
    clock.now += 1_000_000
    assert not deadline.is_set()
    assert deadline.ends_at() is None
    assert not deadline.wait(0.001)
    assert not deadline.wait()


def test_a_wait_ends_with_the_last_moment_to_begin(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(deadlines, "sleep", sleep)
    deadline = Deadline(1.0)
    deadline.begin(10.0)
    assert not deadline.wait(5.0)
    assert deadline.wait(60.0)
    assert clock.now == 1009.0
    assert deadline.wait()


def test_how_long_handlers_take_is_measured_also_when_they_raise(clock: Clock) -> None:
    deadline = Deadline(0.0)

    def raises(*_: object) -> None:
        clock.now += 6.0
        raise LookupError

    deadline.begin(10.0)
    with pytest.raises(LookupError):
        timed(raises, deadline)(None, None)
    assert deadline.is_set()


def test_a_batch_is_measured_by_the_message(clock: Clock) -> None:
    deadline = Deadline(0.0)

    def handle(_session: object, _messages: object) -> None:
        clock.now += 6.0

    deadline.begin(10.0)
    timed_batch(handle, deadline)(None, [None, None])  # type: ignore[list-item]
    assert not deadline.is_set()


def test_a_handler_that_is_measured_still_gets_its_lease() -> None:
    class Mailer:
        def __call__(self, message: object, *, lease: object) -> None:
            pass

    deadline = Deadline(0.0)
    assert has_lease_parameter(timed(lambda message, lease: None, deadline))
    assert has_lease_parameter(timed(Mailer(), deadline))
    assert not has_lease_parameter(timed(lambda message: None, deadline))


# --- the start of a sandbox ------------------------------------------------------------------------------------------


def test_a_function_with_an_inbox_needs_no_boto3_and_without_coroutines_no_greenlet() -> None:
    """Importing boto3 takes longer than everything else in a cold start."""
    code = "import sys, sqlalchemy; own = set(sys.modules)  # SQLAlchemy 2.0 always loads greenlet\n"
    code += "import txbox_aws.lambda_; assert not {'boto3', 'botocore', 'greenlet'} & sys.modules.keys() - own\n"
    code += "import txbox_aws.sqs; assert 'greenlet' not in sys.modules.keys() - own"
    paths = os.pathsep.join(path for path in sys.path if path)
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": paths}, check=False).returncode == 0


# --- arguments -------------------------------------------------------------------------------------------------------


def handle(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"margin_seconds": -1}, "sqs_handler.margin_seconds"),
        ({"margin_seconds": float("nan")}, "sqs_handler.margin_seconds"),
        ({"envelope": "xml"}, "sqs_handler.envelope.*auto, raw"),
        ({"max_attempts": 0}, "sqs_handler.max_attempts"),  # the others: tests of the options
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(options: dict[str, Any], said: str) -> None:
    engine = create_engine("postgresql+psycopg://nowhere")
    with pytest.raises(InvalidConfiguration, match=said):
        sqs_handler(inbox=Inbox("b"), engine=engine, handler=handle, **options)
