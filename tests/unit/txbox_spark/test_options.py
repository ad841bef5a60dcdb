"""Options that cannot work are refused before Spark or a database is asked; and the two lists of options agree."""

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from txbox import InvalidConfiguration
from txbox_spark import bulk_load, inbox_sink
from txbox_spark.options import LoadOptions, ValidLoadOptions


@pytest.mark.parametrize("caller", [bulk_load, inbox_sink])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"writer": "fax"}, "writer must be one of auto, copy, jdbc, not 'fax'"),
        ({"chunk_rows": 0}, "chunk_rows must be at least 1, not 0"),
        ({"parallelism": 0}, "parallelism must be at least 1, not 0"),
        ({"stalled_seconds": 0}, "stalled_seconds must be more than 0 and at most a day, not 0"),
        ({"effects_seconds": 90_000}, "effects_seconds must be more than 0 and at most a day, not 90000"),
        ({"apply": " \n"}, "apply must be SQL or a callable; it is empty"),
        ({"apply": 3}, "apply must be SQL or a callable, not 3"),
        ({"apply": "SELECT 1"}, "apply does not name fresh_event"),
        ({"apply": threading.Lock().acquire}, "apply cannot be sent to the executors"),
    ],
)
def test_what_cannot_work_is_refused_with_the_callers_name(
    caller: Callable[..., object], wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=f"^{caller.__name__}: {said}"):
        call(caller, **wrong)


@pytest.mark.parametrize("caller", [bulk_load, inbox_sink])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": "mysql://localhost/x"}, "mysql:// cannot be used.*give postgresql://"),
        ({"url": "nonsense"}, "not a database URL"),
        ({"subscriber_id": ""}, "subscriber_id"),
    ],
)
def test_a_database_or_a_subscriber_that_cannot_be_is_refused(
    caller: Callable[..., object], wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=said):
        call(caller, **wrong)


@pytest.mark.parametrize("caller", [bulk_load, inbox_sink])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, r"missing required keyword arguments: url, subscriber_id, message_id, apply"),
        ({"url": "x", "message_id": "id", "apply": "x"}, r"missing required keyword arguments: subscriber_id"),
        ({"chunk_row": 1}, "got an unexpected keyword argument 'chunk_row'"),
        ({"of": "x"}, "got an unexpected keyword argument 'of'"),
        ({"database": "x"}, "got an unexpected keyword argument 'database'"),
    ],
)
def test_an_option_that_is_missing_or_unknown_is_refused_with_the_callers_name(
    caller: Callable[..., object], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{caller.__name__}\(\) {said}$"):
        caller(*([None] if caller is bulk_load else []), **arguments)


def test_each_typed_option_is_one_of_the_options_and_only_those() -> None:
    there = {field.name for field in fields(ValidLoadOptions) if field.init} - {"of"}
    assert there == set(LoadOptions.__annotations__)


def call(caller: Callable[..., object], **changed: Any) -> None:
    arguments = {
        "url": "postgresql://localhost/none", "subscriber_id": "billing", "message_id": "event_id",
        "apply": "SELECT FROM fresh_event", **changed,
    }  # fmt: skip
    caller(*([None] if caller is bulk_load else []), **arguments)
