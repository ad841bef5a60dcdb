"""Batch calls against an SQS that answers by a script: partial failures, missing entries, refused calls."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from support.aws.queues import QUEUE
from support.aws.scripted_sqs import Answer, ScriptedSqs, error, receipts, refusing, succeed, timeouts
from txbox import BrokerError, Message, Outcome
from txbox_aws.sqs import SqsSource
from txbox_aws.sqs.queues import MAX_VISIBILITY_SECONDS
from txbox_aws.sqs.source import ENTRY_RUNS
from txbox_workers.delivery import Delivery, Settlement


def deliveries(count: int) -> list[Delivery]:
    return [Delivery(Message(f"m-{number}", b"{}"), receipt=f"r-{number}") for number in range(count)]


def refusing_the_second_call(broker: ScriptedSqs) -> Callable[[str, dict[str, Any]], Answer]:
    return lambda action, request: succeed(action, request) if len(broker.calls) == 1 else error("AccessDenied", 403)


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


def test_each_delivery_is_handed_back_with_its_own_delay_in_whole_seconds(
    source: SqsSource, broker: ScriptedSqs
) -> None:
    source.hand_back(handed_back([0, 0.2, 7, 7.5, -1, 10**9]))
    # Rounded up: a wait that was promised is not cut short.
    assert timeouts(broker) == [0, 1, 7, 8, 0, MAX_VISIBILITY_SECONDS]


def test_extend_reports_who_was_refused_and_why(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = refusing("MessageNotInflight", "r-1", sender_fault=True)
    assert source.extend_visibility(deliveries(3), 30) == {"r-1": "MessageNotInflight: sorry"}
    assert timeouts(broker) == [30, 30, 30]


def test_extend_says_so_when_the_broker_says_nothing(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = lambda action, request: {}
    # Raised, not refused: whoever was refused is not extended again.
    with pytest.raises(BrokerError, match=r"1 of 1 extensions were not confirmed: NoAnswer:"):
        source.extend_visibility(deliveries(1), 30)


def test_extensions_of_a_call_that_failed_after_another_had_been_confirmed_are_not_refused(
    source: SqsSource, broker: ScriptedSqs
) -> None:
    broker.answer = refusing_the_second_call(broker)
    with pytest.raises(BrokerError, match="2 of 12 extensions were not confirmed"):
        source.extend_visibility(deliveries(12), 30)


def test_an_ack_of_which_a_part_stands_says_which(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = refusing_the_second_call(broker)
    assert list(source.ack(deliveries(12))) == [f"r-{number}" for number in range(10)]


def test_an_entry_that_is_extended_in_the_end_was_not_refused(source: SqsSource, broker: ScriptedSqs) -> None:
    broker.answer = refusing("InternalError", "r-0", sender_fault=False, times=ENTRY_RUNS - 1)
    assert source.extend_visibility(deliveries(1), 30) == {}
