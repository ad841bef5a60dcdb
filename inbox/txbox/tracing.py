"""Tracing: the interface for spans. The default implementation here does nothing and costs nothing.

The real one is ``txbox.instrumentation.opentelemetry_tracing``. An implementation logs its own errors; they break no
delivery.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

__all__ = ["NO_SPAN", "NO_TRACING", "AttributeValue", "Operation", "Span", "Traced", "Tracing", "error_type"]


AttributeValue = str | int | bool


class Operation(StrEnum):
    """The kinds of work on messages, as OpenTelemetry's conventions name them."""

    CREATE = "create"
    SEND = "send"
    RECEIVE = "receive"
    PROCESS = "process"
    SETTLE = "settle"


class Traced(Protocol):
    """What a span needs of a message. The headers carry the context in which the message was created."""

    @property
    def id(self) -> str:
        """The message id."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers."""


class Span:
    """One piece of work. The methods of this base class do nothing."""

    @property
    def recording(self) -> bool:
        """Whether anything of this span is kept: no sampler dropped it, and it has not ended."""
        return False

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that carry this span's context, ``traceparent`` and ``tracestate``; empty if there is none."""
        return {}

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager that makes this the thread's current span."""
        return _NOTHING

    def event(self, name: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Add an event that happens now."""

    def end(
        self,
        error_type: str | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        ended_ns: int | None = None,
    ) -> None:
        """End the span. A second call does nothing.

        Args:
            error_type: the kind of error, from a small set of names.
            attributes: those known only now.
            ended_ns: when the span ended, in nanoseconds since 1970; None: now.
        """


class Tracing:
    """Makes spans. Those of this base class do nothing."""

    enabled = False
    """Whether spans are wanted."""

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
        """Begin a span of work on messages.

        Args:
            operation: the kind of work.
            place: the destination or the source: a queue's URL, a topic's ARN, ``scheme:rest``.
            messages: what is worked on; the span links to the contexts in which they were created.
            name: what the library calls the work, if not as the operation.
            subscriber_id: the consumer.
            batch: the work takes many messages at a time, even if it has one now.
            began_ns: when the span began, in nanoseconds since 1970; None: now.
        """
        del operation, place, messages, name, subscriber_id, batch, began_ns
        return NO_SPAN

    def internal(self, name: str, attributes: Mapping[str, AttributeValue], *, began_ns: int | None = None) -> Span:
        """Begin a span of txbox's own work; ``began_ns`` is as for ``messaging``."""
        del name, attributes, began_ns
        return NO_SPAN


def error_type(error: BaseException) -> str:
    """Return the name of an error's class with its module, for the attribute ``error.type``."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_NOTHING = nullcontext()
NO_SPAN = Span()
NO_TRACING = Tracing()
