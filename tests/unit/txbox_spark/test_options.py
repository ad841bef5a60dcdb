"""Options that cannot work are refused before Spark or a database is asked; and the two lists of options agree."""

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from txbox import InvalidConfiguration
from txbox_spark import bulk_load, inbox_sink
from txbox_spark.merging.merge_plan import MergePlan
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
        ({"max_rejected": "200%"}, "max_rejected must be a number of rows, or a percentage such as 2.5%, not '200%'"),
        ({"rejected_to": "table: "}, "rejected_to must be a folder, or table:NAME, not 'table: '"),
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
        ({"abandoned_seconds": 1.0}, "got an unexpected keyword argument 'abandoned_seconds'"),
        ({"of": "x"}, "got an unexpected keyword argument 'of'"),
        ({"database": "x"}, "got an unexpected keyword argument 'database'"),
    ],
)
def test_an_option_that_is_missing_or_unknown_is_refused_with_the_callers_name(
    caller: Callable[..., object], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{caller.__name__}\(\) {said}$"):
        caller(*([None] if caller is bulk_load else []), **arguments)


def test_each_typed_option_is_one_of_the_options_and_of_the_same_type() -> None:
    there = {field.name: field.type for field in fields(ValidLoadOptions) if field.init and field.name != "of"}
    assert there == get_type_hints(LoadOptions)


def test_a_plan_takes_its_part_of_the_options_by_name() -> None:
    given = {"url": "postgresql://localhost/none", "message_id": "id", "apply": "SELECT FROM fresh_event"}
    limits = {"subscriber_id": "billing", "prefix": "p_", "lock_seconds": 3.0, "sent_at": "made", "keep": "latest:made"}
    options = ValidLoadOptions(of="a test", **given, **limits)
    plan = MergePlan.of(options, run_id="0123456789ab", columns=(), apply="")
    assert {name: getattr(plan, name) for name in limits} == limits
    assert (plan.effects_seconds, plan.apply_expired, plan.most_chunks) == (3_600.0, False, 1)


def call(caller: Callable[..., object], **changed: Any) -> None:
    arguments = {
        "url": "postgresql://localhost/none", "subscriber_id": "billing", "message_id": "event_id",
        "apply": "SELECT FROM fresh_event", **changed,
    }  # fmt: skip
    caller(*([None] if caller is bulk_load else []), **arguments)
