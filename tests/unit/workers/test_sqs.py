"""The SQS source against an SQS that answers by a script: partial failures, missing entries, refused calls."""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from support.scripted_sqs import Answer, ScriptedSqs, succeed
from txbox import BrokerError, DeadLetter, InvalidConfiguration, Message, Outcome, Reason
from txbox_workers import sqs as sqs_module
from txbox_workers.backoff import Backoff
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.sqs import (
    ENTRY_RUNS,
    MAX_ATTRIBUTES,
    MAX_VISIBILITY_SECONDS,
    SqsSource,
    redrive_to_queue,
    sqs_client,
)

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/purchases"


@pytest.fixture(autouse=True)
def _boto3_without_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture(autouse=True)
def _entries_are_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqs_module, "_ENTRY_BACKOFF", Backoff(first_seconds=0, longest_seconds=0))


@pytest.fixture
def broker() -> Iterator[ScriptedSqs]:
    broker = ScriptedSqs()
    yield broker
    broker.close()


@pytest.fixture
def client(broker: ScriptedSqs) -> Iterator[Any]:
    client = boto3.client(
        "sqs",
        region_name="eu-central-1",
        endpoint_url=broker.url,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=20),
    )
    yield client
    client.close()


@pytest.fixture
def source(client: Any) -> SqsSource:
    return SqsSource(QUEUE, client=client)


def deliveries(count: int) -> list[Delivery]:
    return [Delivery(Message(f"m-{number}", b"{}"), receipt=f"r-{number}") for number in range(count)]


def receipts(request: dict[str, Any]) -> list[str]:
    return [entry["ReceiptHandle"] for entry in request["Entries"]]


def refusing(code: str, *refused: str, sender_fault: bool, times: int = 100) -> Any:
    """A script that refuses the entries with these receipts, the first so many times, and confirms the others."""
    seen = dict.fromkeys(refused, 0)

    def answer(action: str, request: dict[str, Any]) -> Answer:
        successful, failed = [], []
        for entry in request["Entries"]:
            receipt = entry["ReceiptHandle"]
            if receipt in seen and seen[receipt] < times:
                seen[receipt] += 1
                failed.append({"Id": entry["Id"], "Code": code, "Message": "sorry", "SenderFault": sender_fault})
            else:
                successful.append({"Id": entry["Id"]})
        return {"Successful": successful, "Failed": failed}

    return answer


def error(code: str, status: int = 400) -> tuple[int, dict[str, Any]]:
    return status, {"__type": f"com.amazonaws.sqs#{code}", "message": "no"}


# --- ack -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 10, 11, 25])
def test_ack_confirms_every_delivery_in_batches_of_ten(source: SqsSource, broker: ScriptedSqs, count: int) -> None:
    assert source.ack(deliveries(count)) == [f"r-{number}" for number in range(count)]
    requests = broker.requests("DeleteMessageBatch")
    assert [receipt for request in requests for receipt in receipts(request)] == [f"r-{n}" for n in range(count)]
    assert all(len({entry["Id"] for entry in request["Entries"]}) == len(request["Entries"]) for request in requests)
    assert [len(request["Entries"]) for request in requests] == [10] * (count // 10) + [count % 10] * (count % 10 > 0)


def test_an_entry_that_failed_by_the_brokers_fault_is_tried_again_alone(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = refusing("InternalError", "r-3", "r-7", sender_fault=False, times=1)
    assert sorted(source.ack(deliveries(10))) == [f"r-{number}" for number in range(10)]
    assert [receipts(request) for request in broker.requests("DeleteMessageBatch")] == [
        [f"r-{number}" for number in range(10)],
        ["r-3", "r-7"],
    ]


def test_an_entry_is_tried_a_limited_number_of_times(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = refusing("InternalError", "r-1", sender_fault=False)
    assert source.ack(deliveries(3)) == ["r-0", "r-2"]
    assert len(broker.requests("DeleteMessageBatch")) == ENTRY_RUNS


def test_an_entry_that_failed_by_our_fault_is_not_tried_again(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = refusing("ReceiptHandleIsInvalid", "r-1", sender_fault=True)
    assert source.ack(deliveries(3)) == ["r-0", "r-2"]
    assert len(broker.requests("DeleteMessageBatch")) == 1


def test_both_kinds_of_failure_in_one_answer(source: SqsSource, broker: ScriptedSqs) -> None:
    def answer(action: str, request: dict[str, Any]) -> Answer:
        if len(broker.calls) > 1:
            return succeed(action, request)
        return {
            "Successful": [{"Id": "0"}],
            "Failed": [
                {"Id": "1", "Code": "ReceiptHandleIsInvalid", "SenderFault": True},
                {"Id": "2", "Code": "InternalError", "SenderFault": False},
            ],
        }

    broker.answer = answer
    assert source.ack(deliveries(3)) == ["r-0", "r-2"]
    assert receipts(broker.requests("DeleteMessageBatch")[1]) == ["r-2"]


def test_an_entry_that_is_missing_from_the_answer_is_not_taken_as_done(source: SqsSource, broker: ScriptedSqs) -> None:
    # It confirms the first entry each time, also when it is not asked for it any more.
    broker.answer = lambda action, request: {"Successful": [{"Id": "0"}], "Failed": []}
    assert source.ack(deliveries(2)) == ["r-0"]
    assert [receipts(request) for request in broker.requests("DeleteMessageBatch")][1:] == [["r-1"]] * (ENTRY_RUNS - 1)


def test_a_failure_in_the_second_batch_is_told_apart_from_the_first(source: SqsSource, broker: ScriptedSqs) -> None:
    # Ids of entries are unique within a call only: "2" is r-2 in the first one and r-12 in the second.
    broker.answer = refusing("ReceiptHandleIsInvalid", "r-12", sender_fault=True)
    assert source.ack(deliveries(15)) == [f"r-{number}" for number in range(15) if number != 12]


def test_a_call_that_is_refused_as_a_whole_is_an_error(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = lambda action, request: error("ThrottlingException")
    with pytest.raises(BrokerError, match=f"SQS refused DeleteMessageBatch on {QUEUE}: ThrottlingException") as caught:
        source.ack(deliveries(3))
    assert not caught.value.permanent


def test_a_whole_call_that_fails_on_the_second_run_is_an_error_too(source: SqsSource, broker: ScriptedSqs) -> None:
    def answer(action: str, request: dict[str, Any]) -> Answer:
        return (
            error("ServiceUnavailable", 503)
            if len(broker.calls) > 1
            else {"Failed": [{"Id": "0", "Code": "InternalError"}]}
        )

    broker.answer = answer
    with pytest.raises(BrokerError):
        source.ack(deliveries(1))


# --- hand back and extend --------------------------------------------------------------------------------------------


def handed_back(delays: Sequence[float]) -> list[Settlement]:
    return [
        Settlement(delivery, Outcome.FAILED, delay_seconds=delay)
        for delivery, delay in zip(deliveries(len(delays)), delays, strict=True)
    ]


def timeouts(broker: ScriptedSqs) -> list[int]:
    return [
        entry["VisibilityTimeout"]
        for request in broker.requests("ChangeMessageVisibilityBatch")
        for entry in request["Entries"]
    ]


def test_each_delivery_is_handed_back_with_its_own_delay_in_whole_seconds(
    source: SqsSource, broker: ScriptedSqs
) -> None:
    source.hand_back(handed_back([0, 0.2, 7, 7.5, -1, 10**9]))
    # Rounded up: a wait that was promised is not cut short.
    assert timeouts(broker) == [0, 1, 7, 8, 0, MAX_VISIBILITY_SECONDS]


def test_hand_back_takes_ten_at_a_time_and_tries_entries_again(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = refusing("InternalError", "r-11", sender_fault=False, times=1)
    source.hand_back(handed_back([5.0] * 12))
    assert [len(request["Entries"]) for request in broker.requests("ChangeMessageVisibilityBatch")] == [10, 2, 1]


def test_extend_reports_who_was_refused_and_why(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = refusing("MessageNotInflight", "r-1", sender_fault=True)
    assert source.extend(deliveries(3), 30) == {"r-1": "MessageNotInflight: sorry"}
    assert timeouts(broker) == [30, 30, 30]


def test_extend_says_so_when_the_broker_says_nothing(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = lambda action, request: {}
    assert source.extend(deliveries(1), 30) == {"r-0": "NoAnswer:"}


def test_an_entry_that_is_extended_in_the_end_was_not_refused(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = refusing("InternalError", "r-0", sender_fault=False, times=ENTRY_RUNS - 1)
    assert source.extend(deliveries(1), 30) == {}


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
    monkeypatch.setattr(sqs_module, "time", clock)
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
    assert source.extend(received, 30) == {}
    clock.now += 40.5
    assert source.extend(received, 30) == {}
    # 19.5 seconds are left, and a second too much would be refused as a whole.
    assert timeouts(broker) == [30, 19]
    clock.now += 19
    assert source.extend(received, 30) == {"r-0": "SQS's limit of 12 hours is reached"}
    assert len(timeouts(broker)) == 2, "SQS is not asked for what it cannot grant"


def test_one_at_its_limit_does_not_keep_others_from_being_extended(
    source: SqsSource, broker: ScriptedSqs, clock: Clock
) -> None:
    old = receive_one(source, broker, "old")
    clock.now += MAX_VISIBILITY_SECONDS
    young = receive_one(source, broker, "young")
    assert source.extend([*old, *young], 30) == {"old": "SQS's limit of 12 hours is reached"}
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


# --- receive and open ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("QueueDoesNotExist", "create the queue, or correct its URL, region or account"),
        ("AWS.SimpleQueueService.NonExistentQueue", "create the queue, or correct its URL, region or account"),
        ("AccessDeniedException", "grant sqs:ReceiveMessage"),
        ("InvalidClientTokenId", "check AWS_ACCESS_KEY_ID"),
        ("SignatureDoesNotMatch", "check AWS_SECRET_ACCESS_KEY"),
        ("ExpiredTokenException", "the credentials have expired"),
        ("InvalidAddress", "the URL is not that of a queue"),
    ],
)
def test_what_trying_again_cannot_help_is_permanent_and_has_a_remedy(
    source: SqsSource, broker: ScriptedSqs, code: str, remedy: str
) -> None:
    broker.answer = lambda action, request: error(code)
    with pytest.raises(BrokerError, match=re.escape(remedy)) as caught:
        source.open()
    assert caught.value.permanent
    assert f"SQS refused GetQueueAttributes on {QUEUE}: " in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(("code", "status"), [("InternalFailure", 500), ("RequestThrottled", 400)])
def test_what_passes_is_transient(source: SqsSource, broker: ScriptedSqs, code: str, status: int) -> None:
    broker.answer = lambda action, request: error(code, status)
    with pytest.raises(BrokerError, match=code) as caught:
        source.receive()
    assert not caught.value.permanent


def test_a_broker_that_does_not_answer_is_transient(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.close()
    with pytest.raises(BrokerError, match="SQS cannot be reached: Could not connect") as caught:
        source.open()
    assert not caught.value.permanent


def test_without_any_region_the_remedy_is_named() -> None:
    with pytest.raises(BrokerError, match="set AWS_DEFAULT_REGION") as caught:
        SqsSource("http://127.0.0.1:9324/000000000000/purchases").open()
    assert caught.value.permanent


def test_a_profile_that_does_not_exist_is_the_brokers_error_and_not_botocores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(BrokerError, match=r"profile \(nobody\) could not be found"):
        sqs_client(QUEUE)


def test_without_credentials_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, broker: ScriptedSqs) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", broker.url)
    source = SqsSource(QUEUE)
    with pytest.raises(BrokerError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as caught:
        source.open()
    source.close()
    assert caught.value.permanent
    assert broker.calls == []


@pytest.mark.parametrize(
    ("configured", "url", "region"),
    [
        (None, QUEUE, "eu-central-1"),
        (None, "https://sqs.cn-north-1.amazonaws.com.cn/123456789012/purchases", "cn-north-1"),
        ("us-east-1", QUEUE, "us-east-1"),
    ],
)
def test_the_region_is_boto3s_own_or_that_of_the_url(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, url: str, region: str
) -> None:
    if configured:
        monkeypatch.setenv("AWS_DEFAULT_REGION", configured)
    client = sqs_client(url)
    assert client.meta.region_name == region
    client.close()


def test_a_client_waits_longer_than_its_longest_poll() -> None:
    client = sqs_client(QUEUE, wait_seconds=20, connections=7)
    assert client.meta.config.read_timeout > 20
    assert client.meta.config.max_pool_connections == 7
    client.close()


def test_a_client_that_was_given_is_not_closed_with_the_source(source: SqsSource) -> None:
    source.close()
    assert source.receive() == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"queue_url": "purchases"}, r"SqsWorker\.queue_url must be the URL of a queue, not 'purchases'"),
        ({"queue_url": ""}, r"SqsWorker\.queue_url must be the URL"),
        ({"queue_url": None}, r"SqsWorker\.queue_url must be the URL"),
        ({"batch_size": 0}, r"SqsWorker\.batch_size must be from 1 to 10, not 0"),
        ({"batch_size": 11}, r"SqsWorker\.batch_size must be from 1 to 10, not 11"),
        ({"wait_seconds": -1}, r"SqsWorker\.wait_seconds must be from 0 to 20, not -1"),
        ({"wait_seconds": 21}, r"SqsWorker\.wait_seconds must be from 0 to 20, not 21"),
        ({"visibility_seconds": 0}, r"SqsWorker\.visibility_seconds must be from 1 to 43200, not 0"),
        ({"visibility_seconds": 43_201}, r"SqsWorker\.visibility_seconds must be from 1 to 43200, not 43201"),
        ({"envelope": "xml"}, r"SqsWorker\.envelope must be one of auto, raw, .* not 'xml'"),
    ],
)
def test_an_argument_that_cannot_work_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        SqsSource(**{"queue_url": QUEUE, **wrong})


# --- redrive ---------------------------------------------------------------------------------------------------------


def letter(attributes: dict[str, Any] | None = None, system: dict[str, str] | None = None, **more: Any) -> DeadLetter:
    return DeadLetter(
        **{
            "subscriber_id": "billing",
            "message_id": "m-1",
            "reason": Reason.FAILED,
            "error": "no",
            "attempts": 5,
            "source": QUEUE,
            "body": "Zoë".encode(),
            "envelope": {"attributes": attributes or {}, "system": system or {}},
            "dead_letter_id": 7,
            **more,
        }
    )


def string(value: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": value}


def redriven(broker: ScriptedSqs, client: Any, parked: DeadLetter, **more: Any) -> dict[str, Any]:
    broker.answer = lambda action, request: {"MessageId": "new"}
    redrive_to_queue(parked, client=client, **more)
    (request,) = broker.requests("SendMessage")
    return request


def test_a_letter_goes_back_whole_under_the_id_that_it_had(broker: ScriptedSqs, client: Any) -> None:
    parked = letter(
        {"Tenant": string("t-1"), "Blob": {"DataType": "Binary", "BinaryValue": base64.b64encode(b"\0\1").decode()}}
    )
    assert redriven(broker, client, parked) == {
        "QueueUrl": QUEUE,
        "MessageBody": "Zoë",
        "MessageAttributes": {
            "Tenant": string("t-1"),
            "Blob": {"DataType": "Binary", "BinaryValue": base64.b64encode(b"\0\1").decode()},
            "message-id": string("m-1"),
        },
    }


@pytest.mark.parametrize("name", ["message-id", "Message-Id"])
def test_an_id_that_the_producer_gave_is_kept(broker: ScriptedSqs, client: Any, name: str) -> None:
    request = redriven(broker, client, letter({name: string("m-1")}))
    assert request["MessageAttributes"] == {name: string("m-1")}


def test_a_letter_can_go_to_another_queue(broker: ScriptedSqs, client: Any) -> None:
    assert redriven(broker, client, letter(), queue_url=f"{QUEUE}-2")["QueueUrl"] == f"{QUEUE}-2"


def test_the_id_takes_the_tenth_attribute(broker: ScriptedSqs, client: Any) -> None:
    nine = {f"a-{number}": string("x") for number in range(MAX_ATTRIBUTES - 1)}
    assert len(redriven(broker, client, letter(nine))["MessageAttributes"]) == MAX_ATTRIBUTES


def test_a_letter_whose_id_has_no_room_is_not_sent_under_another_id(broker: ScriptedSqs, client: Any) -> None:
    ten = {f"a-{number}": string("x") for number in range(MAX_ATTRIBUTES)}
    with pytest.raises(BrokerError, match="message m-1 has 10 attributes already") as caught:
        redrive_to_queue(letter(ten), client=client)
    assert caught.value.permanent
    assert broker.calls == []


def test_ten_attributes_are_no_hindrance_if_the_id_is_among_them(broker: ScriptedSqs, client: Any) -> None:
    ten = {"message-id": string("m-1"), **{f"a-{number}": string("x") for number in range(MAX_ATTRIBUTES - 1)}}
    assert redriven(broker, client, letter(ten))["MessageAttributes"] == ten


def test_a_fifo_letter_keeps_its_group_and_gets_a_new_deduplication_id(broker: ScriptedSqs, client: Any) -> None:
    parked = letter(system={"MessageGroupId": "a-1", "MessageDeduplicationId": "old"}, source=f"{QUEUE}.fifo")
    broker.answer = lambda action, request: {"MessageId": "new"}
    for _ in range(2):
        redrive_to_queue(parked, client=client)
    first, second = broker.requests("SendMessage")
    assert first["MessageGroupId"] == second["MessageGroupId"] == "a-1"
    assert len({"old", first["MessageDeduplicationId"], second["MessageDeduplicationId"]}) == 3


def test_a_fifo_letter_without_a_group_gets_one_that_sqs_accepts(broker: ScriptedSqs, client: Any) -> None:
    parked = letter(message_id="/orders with a blank", source=f"{QUEUE}.fifo")
    assert redriven(broker, client, parked)["MessageGroupId"] == "redrive-7"


def test_a_standard_queue_keeps_its_groups_and_knows_no_deduplication(broker: ScriptedSqs, client: Any) -> None:
    parked = letter(system={"MessageGroupId": "tenant-1", "MessageDeduplicationId": "old"})
    request = redriven(broker, client, parked)
    assert request["MessageGroupId"] == "tenant-1"
    assert "MessageDeduplicationId" not in request


def test_the_makeshift_id_of_a_malformed_letter_stays_behind(broker: ScriptedSqs, client: Any) -> None:
    # Once it can be read, the id that it carries inside is to count; failing that, the one of its first delivery.
    parked = letter(reason=Reason.MALFORMED, source=f"{QUEUE}.fifo", system={"MessageDeduplicationId": "order-17"})
    assert redriven(broker, client, parked)["MessageAttributes"] == {
        "first-delivery-id": string("m-1"),
        "sqs-deduplication-id": string("order-17"),
    }


def test_a_redrive_that_is_refused_is_an_error(broker: ScriptedSqs, client: Any) -> None:
    broker.answer = lambda action, request: error("QueueDoesNotExist")
    with pytest.raises(BrokerError, match=f"SQS refused SendMessage on {QUEUE}") as caught:
        redrive_to_queue(letter(), client=client)
    assert caught.value.permanent
