"""What AWS answers, entry by entry and call by call, over real HTTP: what counts as sent, and who is to blame."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.aws.boto3_settings import attempts
from support.aws.outgoing import BUS, DESTINATIONS, OTHERS, QUEUE, numbered, outgoing, sent
from support.aws.scripted_aws import (
    CONFIRMED,
    GARBAGE,
    HANG,
    OMITTED,
    RESET,
    UNLIKE,
    Answer,
    Error,
    Failed,
    ScriptedAws,
    Sent,
    confirm,
    each,
)
from support.waiting import wait_until
from txbox_aws.publishers import AwsPublisher

# --- entries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "error"),
    [(Failed("InternalFailure"), "InternalFailure no"), (OMITTED, "has not mentioned the message")],
)
def test_an_entry_that_is_not_confirmed_is_refused_and_no_other(
    publisher: AwsPublisher, broker: ScriptedAws, kind: str, result: object, error: str
) -> None:
    messages = numbered(DESTINATIONS[kind], 12)
    broker.answer = each(m1=result, m11=result)
    refused = publisher.send(messages)
    assert [refusal.message for refusal in refused] == [messages[1], messages[11]]
    assert not any(refusal.final for refusal in refused)
    assert all(error in refusal.error and DESTINATIONS[kind] in refusal.error for refusal in refused)


@pytest.mark.parametrize("kind", ["sqs", "sns"])
@pytest.mark.parametrize(
    ("failed", "final", "counted"),
    [
        (Failed("InvalidMessageContents", sender_fault=True), True, True),
        (Failed("InvalidMessageContents"), False, True),
        (Failed("InvalidParameterValue", sender_fault=True), True, True),
        (Failed("SomethingNew", sender_fault=True), True, True),
        (Failed("SomethingNew"), False, False),
        (Failed("InternalError"), False, False),
        (Failed("ServiceUnavailable", sender_fault=True), False, False),
        (OMITTED, False, True),
    ],
)
def test_the_senders_fault_is_final_and_what_the_broker_has_failed_itself_is_no_attempt(
    publisher: AwsPublisher, broker: ScriptedAws, kind: str, failed: object, final: bool, counted: bool
) -> None:
    broker.answer = each(m0=failed)
    refused = publisher.send(numbered(DESTINATIONS[kind], 2))
    assert [(refusal.message.id, refusal.final, refusal.counted) for refusal in refused] == [("m0", final, counted)]


@pytest.mark.parametrize(
    ("code", "final"),
    [
        ("MalformedDetail", True),
        ("InvalidArgument", True),
        ("InternalFailure", False),
        ("NotAuthorizedForSourceException", False),
        ("RedactionFailure", False),
    ],
)
def test_eventbridge_does_not_say_whose_fault_it_is_and_the_code_does(
    publishers: dict[str, AwsPublisher], broker: ScriptedAws, code: str, final: bool
) -> None:
    broker.answer = each(m0=Failed(code))
    refused = publishers["eventbridge"].send(numbered(BUS, 2))
    assert [(refusal.message.id, refusal.final) for refusal in refused] == [("m0", final)]


@pytest.mark.parametrize(
    ("failed", "permanent"),
    [
        (Failed("ThrottlingException"), False),
        (Failed("RequestThrottled", sender_fault=True), False),
        (Failed("KMS.ThrottlingException", sender_fault=True), False),
        (Failed("KmsAccessDenied", sender_fault=True), True),
        (Failed("AccessDeniedException", sender_fault=True), True),
    ],
)
def test_an_entry_that_is_throttled_or_not_allowed_is_not_to_blame(
    publisher: AwsPublisher, broker: ScriptedAws, kind: str, failed: Failed, permanent: bool
) -> None:
    messages = numbered(DESTINATIONS[kind], 3)
    broker.answer = each(m1=failed, m2=Failed("InternalError"))
    refused, outage = sent(publisher, messages)
    assert [refusal.message.id for refusal in refused] == ["m2"]
    assert (outage.unsent, outage.permanent) == ((messages[1],), permanent)
    assert failed.code in str(outage)


def test_what_sqs_has_taken_otherwise_than_it_was_sent_is_not_sent(
    publishers: dict[str, AwsPublisher], broker: ScriptedAws
) -> None:
    broker.answer = each(m1=UNLIKE)
    refused = publishers["sqs"].send(numbered(QUEUE, 2))
    assert [(refusal.message.id, refusal.final) for refusal in refused] == [("m1", False)]
    assert "MD5OfMessageBody" in refused[0].error


# --- calls -----------------------------------------------------------------------------------------------------------


def only(destination: str, answer: Answer) -> Callable[[Sent], Answer]:
    """A script for one destination; calls to others are confirmed."""
    return lambda call: answer if call.destination == destination else confirm(call)


@pytest.mark.parametrize(
    ("answer", "permanent"),
    [
        (Error("ThrottlingException", 400), False),
        (Error("RequestThrottled", 400), False),
        (Error("ServiceUnavailable", 503), False),
        (Error("InternalFailure", 500), False),
        (Error("AccessDeniedException", 400), True),
        (Error("ExpiredTokenException", 403), True),
        (Error("SomethingNew", 400), False),
        (RESET, False),
        (GARBAGE, False),
    ],
    ids=str,
)
def test_a_call_that_fails_is_nobodys_fault_and_other_destinations_are_served(
    publisher: AwsPublisher, broker: ScriptedAws, kind: str, answer: Answer, permanent: bool
) -> None:
    here, there = DESTINATIONS[kind], OTHERS[kind]
    lost, good = numbered(here, 3), outgoing(there, "o0", "o1")
    broker.answer = only(here, answer)
    refused, outage = sent(publisher, [lost[0], good[0], lost[1], good[1], lost[2]])
    assert refused == []
    assert (list(outage.unsent), outage.permanent) == (lost, permanent)
    assert here in str(outage) or not isinstance(answer, Error)
    assert {"o0", "o1"} <= {entry.message_id for entry in broker.taken}
    assert {GARBAGE: "cannot be read", RESET: "cannot be reached"}.get(str(answer), "") in str(outage)


def test_an_answer_that_never_comes_is_waited_for_so_long_and_no_longer(
    make_publisher: Callable[..., AwsPublisher], broker: ScriptedAws, kind: str
) -> None:
    messages = numbered(DESTINATIONS[kind], 2)
    broker.answer = lambda call: HANG
    refused, outage = sent(make_publisher(kind, read_timeout_seconds=0.2), messages)
    assert refused == []
    assert list(outage.unsent) == messages
    assert "timeout" in str(outage).lower()


def test_a_lost_destination_is_not_called_again_for_the_rest(
    make_publisher: Callable[..., AwsPublisher], broker: ScriptedAws, kind: str
) -> None:
    messages = numbered(DESTINATIONS[kind], 50)
    broker.answer = lambda call: Error("ServiceUnavailable", 503)
    outage = sent(make_publisher(kind, calls_at_once=1), messages)[1]
    assert list(outage.unsent) == messages
    assert len(broker.calls) == 1


def test_a_destination_that_was_lost_is_tried_with_one_call_first(
    make_publisher: Callable[..., AwsPublisher], broker: ScriptedAws
) -> None:
    here, there = numbered(QUEUE, 50), outgoing(OTHERS["sqs"], *(f"o{number}" for number in range(20)))
    publisher = make_publisher("sqs")
    broker.answer = only(QUEUE, Error("ServiceUnavailable", 503))
    sent(publisher, here)
    broker.reset()
    broker.answer = only(QUEUE, Error("ServiceUnavailable", 503))
    outage = sent(publisher, here + there)[1]
    assert list(outage.unsent) == here
    assert sorted(call.destination for call in broker.calls) == [QUEUE, OTHERS["sqs"], OTHERS["sqs"]]
    broker.reset()
    assert sent(publisher, here) == ([], None)
    assert len(broker.taken) == 50
    broker.reset()

    def answer_when_there_are_two(call: Sent) -> Answer:
        wait_until(lambda: len(broker.calls) > 1, "a second call comes before the first is answered")
        return confirm(call)

    broker.answer = answer_when_there_are_two
    assert sent(publisher, here) == ([], None)


def test_a_loss_counts_for_every_thread_that_waits(
    make_publisher: Callable[..., AwsPublisher], broker: ScriptedAws
) -> None:
    publisher, asked, lose = make_publisher("sqs", calls_at_once=1), threading.Event(), threading.Event()

    def answer(call: Sent) -> Answer:
        asked.set()
        lose.wait(20)
        return Error("ServiceUnavailable", 503)

    assert sent(publisher, numbered(QUEUE, 1)) == ([], None)
    broker.answer = answer
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(sent, publisher, numbered(QUEUE, 1))
        assert asked.wait(20)
        second = threads.submit(sent, publisher, numbered(QUEUE, 30))
        wait_until(lambda: len(broker.calls) == 3, "each has a call under way")
        lose.set()
        outages = [first.result()[1], second.result()[1]]
    assert [len(outage.unsent) for outage in outages if outage is not None] == [1, 30]
    assert len(broker.calls) == 3, "the calls that waited were not made"


@pytest.mark.parametrize(
    ("kind", "code", "status", "final"),
    [
        ("sqs", "BatchRequestTooLong", 400, True),
        ("sqs", "AWS.SimpleQueueService.BatchRequestTooLong", 400, True),
        ("sqs", "InvalidMessageContents", 400, True),
        ("sqs", "InvalidParameterValue", 400, False),
        ("sns", "InvalidParameter", 400, False),
        ("sns", "BatchRequestTooLongException", 400, True),
        ("eventbridge", "ValidationException", 400, False),
        ("eventbridge", "413", 413, True),
    ],
)
def test_a_call_refused_for_one_of_its_entries_is_made_entry_by_entry(
    publisher: AwsPublisher, broker: ScriptedAws, kind: str, code: str, status: int, final: bool
) -> None:
    messages = numbered(DESTINATIONS[kind], 5)
    broker.answer = lambda call: Error(code, status) if "m3" in call.ids else confirm(call)
    refused = publisher.send(messages)
    assert [(refusal.message, refusal.final) for refusal in refused] == [(messages[3], final)]
    assert sorted(entry.message_id for entry in broker.taken) == ["m0", "m1", "m2", "m4"]


def test_an_outage_while_entries_are_sent_one_by_one(publisher: AwsPublisher, broker: ScriptedAws, kind: str) -> None:
    messages = numbered(DESTINATIONS[kind], 4)

    def answer(call: Sent) -> Answer:
        if len(call.entries) > 1 or call.ids == ["m1"]:
            return Error("InvalidParameterValue")
        return Error("ServiceUnavailable", 503) if call.ids == ["m2"] else [CONFIRMED]

    broker.answer = answer
    refused, outage = sent(publisher, messages)
    assert [refusal.message.id for refusal in refused] == ["m1"]
    assert [message.id for message in outage.unsent] == ["m2", "m3"]


# --- boto3 -----------------------------------------------------------------------------------------------------------


def test_boto3_repairs_a_connection_that_was_lost_by_a_second_attempt(
    monkeypatch: pytest.MonkeyPatch, make_publisher: Callable[..., AwsPublisher], broker: ScriptedAws
) -> None:
    attempts(monkeypatch, 2)
    broker.answer = lambda call: RESET if len(broker.calls) == 1 else confirm(call)
    assert list(make_publisher("sqs").send(numbered(QUEUE, 1))) == []
    assert len(broker.calls) == 2


def test_without_any_region_the_remedy_is_named(make_publisher: Callable[..., AwsPublisher]) -> None:
    outage = sent(make_publisher("sqs"), numbered("http://127.0.0.1:9324/000000000000/purchases", 1))[1]
    assert outage is not None
    assert "set AWS_DEFAULT_REGION" in str(outage)
    assert outage.permanent


def test_a_body_that_never_was_an_event_is_refused_for_good(
    publishers: dict[str, AwsPublisher], broker: ScriptedAws
) -> None:
    bad, good = outgoing(BUS, "bad", body=b"\xff"), outgoing(BUS, "good")
    refused = publishers["eventbridge"].send(bad + good)
    assert [(refusal.message is bad[0], refusal.final) for refusal in refused] == [(True, True)]
    assert [entry.message_id for entry in broker.taken] == ["good"]


def test_what_nobody_has_thought_of_costs_one_call_and_not_the_others(
    monkeypatch: pytest.MonkeyPatch, publisher: AwsPublisher, kind: str
) -> None:
    made = publisher._made

    def broken(call: object) -> object:
        if len(call.entries) == 10:  # type: ignore[attr-defined]
            raise KeyError("a defect")
        return made(call)  # type: ignore[arg-type]

    monkeypatch.setattr(publisher, "_made", broken)
    refused = publisher.send(numbered(DESTINATIONS[kind], 12))
    assert len(refused) == 10
    assert "KeyError" in refused[0].error
