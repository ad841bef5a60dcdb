"""Tracing: what the library says about its work, for spans; without one, nothing is said and nothing is spent.

The implementation is ``txbox.instrumentation.opentelemetry_tracing``. What it raises is its own affair: an
implementation logs it, and breaks no delivery.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

__all__ = ["NO_SPAN", "NO_TRACING", "AttributeValue", "Operation", "Span", "Traced", "Tracing", "error_type"]


AttributeValue = str | int | bool


class Operation(StrEnum):
    """The kinds of work on messages, as the conventions of OpenTelemetry name them."""

    CREATE = "create"
    SEND = "send"
    RECEIVE = "receive"
    PROCESS = "process"
    SETTLE = "settle"


class Traced(Protocol):
    """A message, as far as a span tells of it. Its headers carry the context in which it was created."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What travels beside it."""


class Span:
    """One piece of work. This one is for nothing: its methods do nothing."""

    @property
    def recording(self) -> bool:
        """Whether anything of it is kept: no sampler has left it out, and it has not ended."""
        return False

    @property
    def headers(self) -> Mapping[str, str]:
        """What carries this span's context: ``traceparent`` and ``tracestate``; empty if there is none."""
        return {}

    def current(self) -> AbstractContextManager[object]:
        """Return what makes this the current span of the thread, while entered."""
        return _NOTHING

    def event(self, name: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Add what has happened now."""

    def end(
        self,
        error_type: str | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        ended_ns: int | None = None,
    ) -> None:
        """End it, once; a second end does nothing.

        Args:
            error_type: what has failed, in one of few words.
            attributes: what is known only now.
            ended_ns: when it ended, in nanoseconds since 1970; None is now.
        """


class Tracing:
    """Makes spans. This one is for nothing: it makes spans that do nothing."""

    enabled = False
    """Whether spans are wanted at all."""

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
            operation: what is done.
            place: the destination or the source: a queue's URL, a topic's ARN, ``scheme:rest``.
            messages: those that it is done to; the span is linked to the contexts in which they were created.
            name: what the library calls it, if not as the operation.
            subscriber_id: who consumes.
            batch: the work is for many at a time, even if there is one now.
            began_ns: when it began, in nanoseconds since 1970; None is now.
        """
        del operation, place, messages, name, subscriber_id, batch, began_ns
        return NO_SPAN

    def internal(self, name: str, attributes: Mapping[str, AttributeValue], *, began_ns: int | None = None) -> Span:
        """Begin a span of txbox's own work; ``began_ns`` as for ``messaging``."""
        del name, attributes, began_ns
        return NO_SPAN


def error_type(error: BaseException) -> str:
    """Return the name of an error's class, with its module: what ``error.type`` is to be."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_NOTHING = nullcontext()
NO_SPAN = Span()
NO_TRACING = Tracing()
