"""A line of the log as JSON: always one line, always JSON, and the message that was in hand."""

import json
import logging
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from txbox.instrumentation.json_logs import JsonFormatter
from txbox.instrumentation.log_context import in_hand


def line(message: str, *arguments: object, **given: Any) -> dict[str, Any]:
    record = logging.LogRecord("billing", logging.INFO, __file__, 1, message, arguments, given.pop("exc_info", None))
    vars(record).update(given)
    text = JsonFormatter(lambda text: text.replace("hunter2", "***")).format(record)
    assert "\n" not in text
    read: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return read


def test_a_line_outside_of_any_message() -> None:
    read = line("paid %s of %d", "a", 7)
    assert set(read) == {"time", "level", "logger", "message"}
    assert (read["level"], read["logger"], read["message"]) == ("INFO", "billing", "paid a of 7")
    assert read["time"].endswith("+00:00")


def test_a_line_of_a_message_and_of_a_batch() -> None:
    with in_hand("billing", ["m-1"]):
        assert (line("x")["subscriber_id"], line("x")["message_id"]) == ("billing", "m-1")
        with in_hand("billing", [str(number) for number in range(50)]):
            assert line("x")["message_ids"] == [str(number) for number in range(10)]
        assert line("x")["message_id"] == "m-1"
    assert "message_id" not in line("x")


def test_the_ids_of_the_current_span() -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("process") as span:
        read = line("x")
    assert int(read["trace_id"], 16) == span.get_span_context().trace_id
    assert int(read["span_id"], 16) == span.get_span_context().span_id
    assert len(read["trace_id"]) == 32


@pytest.mark.parametrize("hostile", ["a\nb\r\x1b[31m\0\u2028", '"}\n{"', "\ud800", "\x7f\x85", "😀"])
def test_hostile_texts_stay_within_their_string(hostile: str) -> None:
    with in_hand(hostile, [hostile]):
        read = line(f"{hostile} %s", hostile, order=hostile)
    shown = hostile.encode("utf-8", "replace").decode()
    assert read["message"] == f"{shown} {shown}"
    assert (read["subscriber_id"], read["message_id"], read["order"]) == (shown, shown, shown)


def test_what_is_given_as_extra_is_kept_and_replaces_nothing_of_ours() -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError("no")

    read = line("x", order=7, ratio=float("nan"), items=("a", 1.5), broken=Broken(), level="mine")
    assert (read["order"], read["ratio"], read["items"], read["level"]) == (7, "nan", ["a", 1.5], "INFO")
    assert "raised ValueError" in read["broken"]


def test_secrets_are_masked_in_messages_tracebacks_and_extras() -> None:
    try:
        raise ValueError("postgresql://u:hunter2@h/x")
    except ValueError:
        read = line("at %s", "hunter2", exc_info=sys.exc_info(), url="hunter2")
    assert "hunter2" not in json.dumps(read)
    assert "ValueError: postgresql://u:***@h/x" in read["exception"]


def test_arguments_that_do_not_fit_are_said() -> None:
    assert "its arguments do not fit" in line("%d", "a")["message"]
