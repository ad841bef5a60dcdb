"""Logs as JSON: one object per line, with the message in hand and its trace.

::

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())

``txbox … --log-format json`` uses it. The formatter works in the thread that logs. If a handler passes records to
another thread (``QueueHandler``), give this formatter to that handler, and a plain one to the last.
"""

import json
import logging
import math
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from txbox.instrumentation.log_context import messages_in_hand
from txbox.text import text_of

__all__ = ["JsonFormatter"]


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object.

    Its fields: ``time`` (RFC 3339, in UTC), ``level``, ``logger``, ``message``, ``exception`` (a traceback as text);
    ``subscriber_id`` and ``message_id``, or ``message_ids`` of a batch that one call handles, while a worker has
    messages in hand; ``trace_id`` and ``span_id`` while an OpenTelemetry span is current; and whatever was given as
    ``extra``. A line feed or any other character in a text stays within its string.
    """

    def __init__(self, mask: Callable[[str], str] = lambda text: text) -> None:
        """Create a formatter; ``mask`` removes secrets from messages and tracebacks."""
        super().__init__()
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message_of(record),
        }
        fields |= _in_hand() | _span()  # ``extra`` replaces none of them
        given = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        fields |= {name: value for name, value in given.items() if name not in fields}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        return json.dumps({name: self._plain(value) for name, value in fields.items()})

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str):  # half of a surrogate pair is not text
            return self._mask(value).encode("utf-8", "replace").decode()
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, list | tuple):
            return [self._plain(each) for each in value]
        return self._plain(_text(value))


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - a line whose arguments do not fit is still a line
        return f"{_text(record.msg)!r} (its arguments do not fit: {text_of(error)})"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - as above
        return f"{type(value).__name__} (str() of it raised {type(error).__name__})"


def _in_hand() -> dict[str, Any]:
    messages = messages_in_hand()
    if messages is None:
        return {}
    match messages.message_ids:
        case ():
            named: dict[str, Any] = {}
        case (message_id,):
            named = {"message_id": message_id}
        case several:
            named = {"message_ids": list(several)}
    return {"subscriber_id": messages.subscriber_id, **named}


def _span() -> dict[str, str]:
    """Return the ids of the current span if something in this process has loaded OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"} if context.is_valid else {}


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
