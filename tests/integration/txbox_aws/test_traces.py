"""Spans, from the purchase to its effect: one picture, held together by links."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.semconv._incubating.attributes import messaging_attributes as conventions
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from support.aws.lambda_events import Context, of
from support.aws.queues import wait_until_empty
from support.txbox.traces import Traces, attributes, linked, parent, span_id
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.memory_worker import at_work, delivery, make, process, work_off
from txbox import BrokerError, Inbox, Message, Outbox, Outcome, Outgoing, SqlEffect
from txbox.backoff import Backoff
from txbox.instrumentation import opentelemetry_tracing
from txbox.instrumentation.opentelemetry_tracing import OpenTelemetryTracing
from txbox.relay import FunctionPublisher, Relay
from txbox.tracing import Operation
from txbox_aws.lambda_ import sqs_handler
from txbox_aws.publishers import aws_publishers
from txbox_aws.sqs import SqsWorker
from txbox_workers.memory_source import MemorySource
from txbox_workers.processing import deadlocks

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


@pytest.fixture
def traces() -> Traces:
    return Traces()


def traced(traces: Traces, *ids: str) -> list[Message]:
    """Messages that were created under a span each."""
    found = []
    for id_ in ids:
        span = traces.tracing.messaging(Operation.CREATE, "own:there", [Message(id_, b"")], batch=False)
        found.append(Message(id_, b"{}", span.headers))
        span.end()
    return found


def created_by(traces: Traces) -> dict[str, int]:
    """The id of the span that has created a message, by the message's id."""
    return {attributes(span)["messaging.message.id"]: span_id(span) for span in traces.of("create")}


@pytest.mark.parametrize("prefetch", [0, 50])
def test_a_purchase_is_one_picture_from_its_sale_to_its_effect(
    engine: Engine, business: Business, sqs: "SQSClient", queue: str, traces: Traces, prefetch: int
) -> None:
    outbox = Outbox(tracing=traces.tracing)
    with traces.tracer.start_as_current_span("sale") as sale, engine.begin() as connection:
        ids = outbox.publish_many(connection, [Outgoing(queue, "{}"), Outgoing(queue, "{}")])
        sold = sale.get_span_context().span_id

    def handle(session: Session, message: Message) -> None:
        with traces.tracer.start_as_current_span("charge"):
            apply(session, message)

    publishers = aws_publishers()
    relay = Relay(engine, publishers, tracing=traces.tracing)
    worker = SqsWorker(
        queue,
        inbox=Inbox("billing"),
        engine=engine,
        handler=handle,
        wait_seconds=1,
        tracing=traces.tracing,
        prefetch=prefetch,
    )
    with at_work(relay):
        wait_until(lambda: relay.sent == 2)
    with at_work(worker):
        wait_until_empty(sqs, queue)
    for publisher in publishers.values():
        publisher.close()
    assert business.applied() == once(ids)

    created = created_by(traces)
    assert set(created) == set(ids)
    assert {parent(span) for span in traces.of("create")} == {sold}
    for operation in ("send", "receive"):
        spans = traces.of(operation)
        assert set().union(*map(linked, spans)) == set(created.values())
        assert sum(attributes(span)["messaging.batch.message_count"] for span in spans) == 2
        polls = {span_id(span) for span in traces.of("receive")}
        assert {parent(span) for span in spans} <= (polls if operation == "settle" else {None})
        assert {span.kind for span in spans} == {SpanKind.CLIENT}
    processed = traces.of("process")
    assert {attributes(span)["messaging.message.id"]: linked(span) for span in processed} == {
        id_: {span} for id_, span in created.items()
    }
    assert {span.kind for span in processed} == {SpanKind.CONSUMER}
    assert {parent(span) for span in processed} <= {span_id(span) for span in traces.of("receive")}
    assert sorted(map(parent, traces.named("charge")), key=str) == sorted(map(span_id, processed), key=str)
    name = queue.rpartition("/")[2]
    assert {span.name for span in traces.all()} == {
        *(f"{operation} {name}" for operation in ("publish", "send", "receive", "process", "ack")),
        *("sale", "charge"),
    }
    assert attributes(processed[0]) | {"messaging.message.id": "", "server.address": ""} == {
        "messaging.system": "aws_sqs",
        "messaging.destination.name": name,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "billing",
        "messaging.message.id": "",
        "server.address": "",
    }


def test_within_a_poll_that_no_sampler_takes_no_other_spans_are_asked_for(
    engine: Engine, business: Business, traces: Traces
) -> None:
    class Nothing(Sampler):
        asked: ClassVar[list[str]] = []

        def should_sample(self, parent_context: Any, trace_id: int, name: str, *_: Any, **__: Any) -> SamplingResult:
            self.asked.append(name)
            return SamplingResult(Decision.DROP)

        def get_description(self) -> str:
            return "takes nothing"

    current: list[SpanContext] = []

    def handle(session: Session, message: Message) -> None:
        current.append(trace.get_current_span().get_span_context())
        if message.id == "bad":
            raise ValueError("no")
        apply(session, message)

    tracing = OpenTelemetryTracing(TracerProvider(sampler=Nothing()))
    source = MemorySource([*traced(traces, "a", "b"), Message("bad", b"")], batch_size=3)
    work_off(source, engine, handle, tracing=tracing, max_attempts=1)
    assert business.applied() == once(["a", "b"])
    assert Nothing.asked == ["receive memory"]
    # What a handler begins is within the poll, and is not sampled either.
    assert {context.is_valid for context in current} == {True}
    assert len({context.trace_id for context in current}) == 1
    assert not any(context.trace_flags.sampled for context in current)


def test_a_batch_handler_has_one_span_with_a_link_for_each_message(
    engine: Engine, business: Business, traces: Traces
) -> None:
    def handle(session: Session, messages: list[Message]) -> None:
        with traces.tracer.start_as_current_span("effect"):
            for message in messages:
                apply(session, message)

    source = MemorySource(traced(traces, "a", "b", "c"))
    work_off(source, engine, batch_handler=handle, tracing=traces.tracing)
    (span,) = traces.of("process")
    assert linked(span) == set(created_by(traces).values())
    assert attributes(span)["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in attributes(span)
    assert [parent(effect) for effect in traces.named("effect")] == [span_id(span)]


def test_an_effect_has_one_span_for_its_batch_which_ends_after_the_commit(
    engine: Engine, business: Business, traces: Traces
) -> None:
    effect = SqlEffect.of("INSERT INTO effect SELECT 1, message_id, n FROM fresh_event", fields="n text at /n")
    sent = [replace(message, body=b'{"n": "x"}') for message in traced(traces, "a", "b", "c")]
    work_off(MemorySource(sent), engine, effect=effect, tracing=traces.tracing)
    (span,) = traces.of("process")
    assert linked(span) == set(created_by(traces).values())
    assert attributes(span)["messaging.batch.message_count"] == 3


def test_failures_duplicates_and_parked_messages_are_told_apart(
    engine: Engine, business: Business, traces: Traces
) -> None:
    def handle(session: Session, message: Message) -> None:
        if message.id == "bad":
            raise ValueError("the body is secret")
        apply(session, message)

    worker = make(MemorySource(), engine, handle, tracing=traces.tracing, max_attempts=2)
    process(worker, delivery("good"), delivery("bad"))
    process(worker, delivery("good"), delivery("bad", receive_count=2))
    told = [
        (attributes(span)["messaging.message.id"], attributes(span).get("txbox.outcome"), span.status.status_code)
        for span in traces.of("process")
    ]
    assert told == [
        ("good", None, StatusCode.UNSET),
        ("bad", "failed", StatusCode.ERROR),
        ("good", "duplicate", StatusCode.UNSET),
        ("bad", "dead", StatusCode.ERROR),
    ]
    failed = traces.of("process")[1]
    assert attributes(failed)["error.type"] == "ValueError"
    assert "secret" not in failed.to_json()


def test_a_transaction_that_is_run_again_is_an_event_and_no_second_span(
    engine: Engine, business: Business, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlocks, "RETRY_BACKOFF", Backoff(first_seconds=0, longest_seconds=0))
    runs: list[str] = []

    def handle(session: Session, message: Message) -> None:
        runs.append(message.id)
        if runs == ["a", "b"]:
            session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))
        apply(session, message)

    worker = make(MemorySource(), engine, handle, tracing=traces.tracing)
    assert process(worker, delivery("a"), delivery("b")) == [
        ("a-1", Outcome.PROCESSED),
        ("b-1", Outcome.PROCESSED),
    ]
    assert len(runs) > 2
    spans = traces.of("process")
    retried = [[event for event in span.events if event.name == "txbox.transaction_retried"] for span in spans]
    assert [[dict(event.attributes or {})["db.response.status_code"] for event in events] for events in retried] == [
        ["40001"],
        ["40001"],
    ]


def test_what_a_publisher_refuses_and_a_broker_that_is_away_fail_the_send(engine: Engine, traces: Traces) -> None:
    answers: list[Exception | None] = [BrokerError("away"), ValueError("no"), None]

    def send(_message: Any) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    with engine.begin() as connection:
        Outbox().publish(connection, "own:there", "{}")
    relay = Relay(
        engine,
        {"own": FunctionPublisher(send)},
        backoff=Backoff(first_seconds=0.0, longest_seconds=0.0),
        tracing=traces.tracing,
    )
    with at_work(relay):
        wait_until(lambda: relay.sent == 1)
    told = [(attributes(span).get("error.type"), attributes(span).get("txbox.refused")) for span in traces.of("send")]
    assert told == [("txbox.relay.publisher.PartlySent", None), ("refused", 1), (None, None)]
    assert {span.name for span in traces.of("send")} == {"send there"}


def test_a_function_on_lambda_processes_under_its_invocation(
    engine: Engine, business: Business, traces: Traces
) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=engine, handler=apply, tracing=traces.tracing)
    with traces.tracer.start_as_current_span("invocation") as invocation:
        handle(of(["a", "b"]), Context(30))
        expected = invocation.get_span_context().span_id
    assert [parent(span) for span in traces.of("process")] == [expected, expected]


def test_a_tracer_that_breaks_keeps_no_message_from_its_handler(
    engine: Engine, business: Business, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(SpanProcessor):
        def on_start(self, span: Span, parent_context: Any = None) -> None:
            raise RuntimeError("on start")

    provider = TracerProvider()
    provider.add_span_processor(Broken())
    work_off(MemorySource([Message("a", b"")]), engine, tracing=OpenTelemetryTracing(provider))
    assert business.applied() == once(["a"])
    assert len([record for record in caplog.records if record.name == "txbox.tracing"]) == 1


def test_the_names_are_those_of_the_conventions() -> None:
    ours = opentelemetry_tracing
    assert list(Schemas)[-1].value == ours.SCHEMA_URL
    for name in (
        "BATCH_MESSAGE_COUNT",
        "CONSUMER_GROUP_NAME",
        "DESTINATION_NAME",
        "MESSAGE_ID",
        "OPERATION_NAME",
        "OPERATION_TYPE",
        "SYSTEM",
    ):
        assert getattr(ours, name) == getattr(conventions, f"MESSAGING_{name}")
    assert ours.ERROR_TYPE == error_attributes.ERROR_TYPE
    assert ours.SERVER_ADDRESS == server_attributes.SERVER_ADDRESS
    assert {one.value for one in Operation} <= {one.value for one in conventions.MessagingOperationTypeValues}
    systems = {one.value for one in conventions.MessagingSystemValues}
    assert set(ours.SYSTEMS.values()) - systems == {"aws.eventbridge"}
