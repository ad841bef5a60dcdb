"""Spans of OpenTelemetry. Needs the extra ``otel``, and an SDK that the host has set up.

::

    tracing = OpenTelemetryTracing()
    outbox = Outbox(tracing=tracing)
    worker = SqsWorker(..., tracing=tracing)

Follows the semantic conventions for messaging, version 1.44.0, which are in development:
https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/. txbox never emitted an older version of them, so
``OTEL_SEMCONV_STABILITY_OPT_IN`` has nothing to choose from. docs/monitoring.md names the spans. Beside the attributes
of the conventions they have ``txbox.outcome`` (``process``, unless it was processed), ``txbox.refused`` (``send``), and
``txbox.run_id``, ``txbox.writer``, ``txbox.chunks``, ``txbox.chunk`` and ``txbox.applied`` (bulk loads).

A span has ids, places and outcomes, but never bodies, headers, or the text of an error, which may quote them.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Token
from functools import lru_cache
from typing import overload
from urllib.parse import urlsplit

from txbox.errors import NotSendable
from txbox.extras import needs
from txbox.messages.destinations import EVENTBRIDGE, SNS, SQS, scheme
from txbox.tracing import NO_SPAN, AttributeValue, Operation, Span, Traced, Tracing

with needs("otel"):
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["OpenTelemetryTracing"]

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the conventions."""

# The names of the conventions, which are in a separate package; a test compares them.
BATCH_MESSAGE_COUNT = "messaging.batch.message_count"
CONSUMER_GROUP_NAME = "messaging.consumer.group.name"
DESTINATION_NAME = "messaging.destination.name"
MESSAGE_ID = "messaging.message.id"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
SYSTEM = "messaging.system"
SERVER_ADDRESS = "server.address"
ERROR_TYPE = "error.type"

KINDS = {
    Operation.CREATE: SpanKind.PRODUCER,
    Operation.SEND: SpanKind.CLIENT,  # because the messages have their own creation contexts
    Operation.RECEIVE: SpanKind.CLIENT,
    Operation.PROCESS: SpanKind.CONSUMER,
    Operation.SETTLE: SpanKind.CLIENT,
}

_WITHOUT_LINKS = (Operation.CREATE, Operation.SETTLE)
"""A settled message was received before, inside a span that has the links."""

_WITH_IDS = (Operation.SEND, Operation.PROCESS)
"""The spans within a receive name the ids."""

SYSTEMS = {SQS: "aws_sqs", SNS: "aws.sns", EVENTBRIDGE: "aws.eventbridge"}
"""The conventions have no name for EventBridge."""


class OpenTelemetryTracing(Tracing):
    """Creates OpenTelemetry spans; one instance serves a whole process. Thread-safe."""

    enabled = True

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """Store who makes the spans; None is the host's global provider, even if that is set up later."""
        self._tracer = trace.get_tracer("txbox", tracer_provider=tracer_provider, schema_url=SCHEMA_URL)
        self._failed = False

    def messaging(
        self,
        operation: Operation,
        place: str,
        messages: Sequence[Traced],
        *,
        name: str | None = None,
        subscriber_id: str | None = None,
        batch: bool = True,
        began_ns: int | None = None,
    ) -> Span:
        """Begin a span for work on messages; see ``Tracing``."""

        try:
            title, shared = _shared(operation, place, name, subscriber_id)
            own: dict[str, AttributeValue] = (
                {BATCH_MESSAGE_COUNT: len(messages)} if batch else {MESSAGE_ID: messages[0].id}
            )
            span = self._tracer.start_span(
                title,
                kind=KINDS[operation],
                attributes={**shared, **own},
                links=()
                if operation in _WITHOUT_LINKS
                else _Links(messages, with_ids=batch and operation in _WITH_IDS),
                start_time=began_ns,
                record_exception=False,
            )
        except Exception:  # noqa: BLE001 - see _log_once
            self._log_once()
            return NO_SPAN
        return _OpenTelemetrySpan(span, self._log_once)

    def internal(self, name: str, attributes: Mapping[str, AttributeValue], *, began_ns: int | None = None) -> Span:
        """Begin a span for txbox's own work; see ``Tracing``."""

        try:
            span = self._tracer.start_span(name, attributes=attributes, start_time=began_ns)
        except Exception:  # noqa: BLE001 - see _log_once
            self._log_once()
            return NO_SPAN
        return _OpenTelemetrySpan(span, self._log_once)

    def _log_once(self) -> None:
        """Log an error of the host's SDK or of an exporter, the first time only; it fails no message."""
        if not self._failed:
            self._failed = True
            _log.exception("a span could not be made; messages are processed all the same. This is said once")


class _OpenTelemetrySpan(Span):
    __slots__ = ("_ended", "_log_once", "_span")

    def __init__(self, span: trace.Span, log_once: Callable[[], None]) -> None:
        self._span = span
        self._log_once = log_once
        self._ended = False

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    @property
    def headers(self) -> Mapping[str, str]:
        carrier: dict[str, str] = {}
        try:
            _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span, contexts.Context()))
        except Exception:  # noqa: BLE001 - see OpenTelemetryTracing
            self._log_once()
        return carrier

    def current(self) -> AbstractContextManager[object]:
        return _Current(self._span)

    def event(self, name: str, attributes: Mapping[str, AttributeValue]) -> None:
        try:
            self._span.add_event(name, attributes)
        except Exception:  # noqa: BLE001 - see OpenTelemetryTracing
            self._log_once()

    def end(
        self,
        error_type: str | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        ended_ns: int | None = None,
    ) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            if attributes:
                self._span.set_attributes(attributes)
            if error_type is not None:
                self._span.set_attribute(ERROR_TYPE, error_type)
                self._span.set_status(Status(StatusCode.ERROR))
            self._span.end(ended_ns)
        except Exception:  # noqa: BLE001 - see OpenTelemetryTracing
            self._log_once()


@lru_cache(maxsize=1024)
def _shared(
    operation: Operation, place: str, name: str | None, subscriber_id: str | None
) -> tuple[str, Mapping[str, AttributeValue]]:
    """Return the name of a span, and the attributes that all of its kind share."""
    named, described = name or operation.value, _described(place)
    attributes: dict[str, AttributeValue] = {**described, OPERATION_NAME: named, OPERATION_TYPE: operation.value}
    if subscriber_id is not None:
        attributes[CONSUMER_GROUP_NAME] = subscriber_id
    return f"{named} {described[DESTINATION_NAME]}", attributes


def _described(place: str) -> Mapping[str, str]:
    """Return what the conventions say about a place: the system, the name in it, and the server."""
    try:
        kind = scheme(place)
    except NotSendable:
        return {SYSTEM: "txbox", DESTINATION_NAME: place}
    if kind == SQS:
        named = {SYSTEM: SYSTEMS[kind], DESTINATION_NAME: place.rpartition("/")[2]}
        return {**named, SERVER_ADDRESS: host} if (host := urlsplit(place).hostname) else named
    if kind in SYSTEMS:
        return {SYSTEM: SYSTEMS[kind], DESTINATION_NAME: place.rpartition(":")[2].removeprefix("event-bus/")}
    return {SYSTEM: kind, DESTINATION_NAME: place.partition(":")[2]}


class _Current(AbstractContextManager[None]):
    """While entered, a span is the current one."""

    __slots__ = ("_span", "_token")
    _token: Token[contexts.Context]

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._token = contexts.attach(trace.set_span_in_context(self._span))

    def __exit__(self, *_: object) -> None:
        contexts.detach(self._token)  # it logs what goes wrong and raises nothing


class _Links(Sequence[Link]):
    """Links to the contexts in which messages were created; a message without a context has none.

    They are made when they are read: a span that is not recorded needs none.
    """

    __slots__ = ("_made", "_messages", "_with_ids")

    def __init__(self, messages: Sequence[Traced], *, with_ids: bool) -> None:
        self._messages = messages
        self._with_ids = with_ids
        self._made: list[Link] | None = None

    def _all(self) -> list[Link]:
        if self._made is None:
            self._made = []
            for message in self._messages:
                headers = message.headers
                if (parent := headers.get("traceparent")) is None:
                    continue
                if (context := _context(parent, headers.get("tracestate"))) is not None:
                    self._made.append(Link(context, {MESSAGE_ID: message.id} if self._with_ids else None))
        return self._made

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Link]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> Link: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Link]: ...
    def __getitem__(self, index: int | slice) -> Link | Sequence[Link]:
        return self._all()[index]


@lru_cache(maxsize=1024)
def _context(traceparent: str, tracestate: str | None) -> trace.SpanContext | None:
    if tracestate is None and (found := _VERSION_0.fullmatch(traceparent)) is not None:
        # The usual case, parsed by hand, because every message pays for it.
        trace_id, span_id, flags = (int(part, 16) for part in found.groups())
        plain = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
        return plain if plain.is_valid else None
    carrier = {"traceparent": traceparent, **({} if tracestate is None else {"tracestate": tracestate})}
    context = trace.get_current_span(_PROPAGATOR.extract(carrier, contexts.Context())).get_span_context()
    return context if context.is_valid else None


_VERSION_0 = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_PROPAGATOR = TraceContextTextMapPropagator()
_log = logging.getLogger("txbox.tracing")
