"""What is decided without a database: what events are to a watermark, and which arguments are refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import column
from sqlalchemy.orm import Session

from txbox import InvalidConfiguration
from txbox.watermarks import Advance, Watermarks
from txbox.watermarks.watermarks import WatermarkStatements, decide

APPLIED, STALE, GAP = Advance

SMALL = st.integers(-2, 8)


@pytest.mark.parametrize(
    ("before", "sequences", "answers", "after"),
    [
        (None, [], [], None),
        (None, [5], [APPLIED], 5),
        (None, [-5], [APPLIED], -5),
        (4, [4], [STALE], 4),
        (4, [5, 3, 5, 7, 6], [APPLIED, STALE, STALE, APPLIED, STALE], 7),
    ],
)
def test_an_event_above_the_watermark_is_applied(
    before: int | None, sequences: list[int], answers: list[Advance], after: int | None
) -> None:
    assert decide(before, sequences) == (answers, after)


@pytest.mark.parametrize(
    ("before", "sequences", "first", "answers", "after"),
    [
        (None, [2], 1, [GAP], None),
        (None, [0], 1, [STALE], None),
        (None, [3, 1, 3, 2, 3], 1, [GAP, APPLIED, GAP, APPLIED, APPLIED], 3),
        (4, [4, 6, 5, 6], 1, [STALE, GAP, APPLIED, APPLIED], 6),
        (-7, [-6], 1, [APPLIED], -6),
        (None, [0, 1, 100, 101], 100, [STALE, STALE, APPLIED, APPLIED], 101),
        (None, [0], 0, [APPLIED], 0),
    ],
)
def test_who_insists_gets_the_next_one_only(
    before: int | None, sequences: list[int], first: int, answers: list[Advance], after: int | None
) -> None:
    assert decide(before, sequences, insist=True, first=first) == (answers, after)


@given(st.none() | SMALL, st.lists(SMALL), st.booleans(), SMALL)
def test_a_set_is_decided_as_its_events_one_by_one(
    before: int | None, sequences: list[int], insist: bool, first: int
) -> None:
    mark, one_by_one = before, []
    for sequence in sequences:
        (answer,), mark = decide(mark, [sequence], insist=insist, first=first)
        one_by_one.append(answer)
    assert decide(before, sequences, insist=insist, first=first) == (one_by_one, mark)


@given(st.none() | SMALL, st.lists(SMALL), st.booleans())
def test_each_sequence_is_applied_once_at_most_and_in_order(
    before: int | None, sequences: list[int], insist: bool
) -> None:
    answers, after = decide(before, sequences, insist=insist)
    applied = [one for one, answer in zip(sequences, answers, strict=True) if answer is APPLIED]
    assert applied == sorted(set(applied))
    assert after == (applied[-1] if applied else before)
    if insist and applied:
        assert applied == list(range(1 if before is None else before + 1, applied[-1] + 1))
    assert insist or GAP not in answers


CALLS: list[Callable[..., object]] = [
    lambda **given: Watermarks("s").advance(
        Session(), **{"aggregate_type": "t", "aggregate_id": "1", "sequence": 1, **given}
    ),
    lambda **given: Watermarks("s").advance_many(
        Session(),
        [("t", "1", 1), (given.pop("aggregate_type", "t"), given.pop("aggregate_id", "1"), given.pop("sequence", 1))],
        **given,
    ),
]
both = pytest.mark.parametrize("call", CALLS, ids=["one", "many"])


@both
@pytest.mark.parametrize("argument", ["aggregate_type", "aggregate_id"])
@pytest.mark.parametrize("value", ["", "a\0b", "\ud800", "é" * 501], ids=["empty", "NUL", "surrogate", "long"])
def test_text_that_postgres_cannot_keep_is_refused(call: Callable[..., object], argument: str, value: str) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"^{argument} must be 1 to [\d,]+ bytes of text, not"):
        call(**{argument: value})


@both
@pytest.mark.parametrize("value", [2**63, -(2**63)])
@pytest.mark.parametrize("argument", ["sequence", "first"])
def test_a_number_that_is_no_bigint_is_refused(call: Callable[..., object], argument: str, value: int) -> None:
    with pytest.raises(InvalidConfiguration, match=f"^{argument} must be from -9223372036854775807 to"):
        call(**{argument: value})


@both
@pytest.mark.parametrize("wrong", [{"sequence": "1"}, {"sequence": True}, {"sequence": 1.0}, {"aggregate_id": 7}])
def test_what_is_of_another_type_is_refused(call: Callable[..., object], wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(wrong))} must be"):
        call(**wrong)


@pytest.mark.parametrize(
    ("wrong", "argument"),
    [
        ({"relation": ""}, "relation"),
        ({"aggregate_id": None}, "aggregate_id"),
        ({"sequence": 7}, "sequence"),
        ({"aggregate_type": ""}, "aggregate_type"),
        ({"wait_seconds": 0}, "wait_seconds"),
    ],
)
def test_a_relation_without_names_is_refused(wrong: dict[str, Any], argument: str) -> None:
    usual = {"aggregate_type": "t", "aggregate_id": "id", "sequence": "version"}
    with pytest.raises(InvalidConfiguration, match=f"^{argument} must be"):
        Watermarks("s").advance_from(Session(), **{**usual, **wrong})


def test_the_longest_names_are_accepted_before_anything_is_asked_of_the_database() -> None:
    with pytest.raises(TypeError, match="a Connection or Session of SQLAlchemy"):
        Watermarks("s" * 200).advance(None, "t" * 200, "i" * 1_000, 2**63 - 1)  # type: ignore[arg-type]


def test_a_relation_and_its_columns_are_quoted() -> None:
    statements = WatermarkStatements.load("Odd-%", "P%")
    text = statements.advance_from('r"%', column("type").name, "Id", "order")
    assert text.count('FROM "r""%%" AS event') == 2
    assert 'event."type"::text' in text
    assert 'event."Id"::text' in text
    assert 'event."order"::bigint' in text
    assert text.count('"Odd-%%"."P%%aggregate_watermark"') == 2
    assert set(re.findall(r"%\((\w+)\)s", text)) == {"lock_timeout", "subscriber_id", "newest_only"}
    assert "%(aggregate_type)s::text" in statements.advance_from("r", None, "i", "s")
