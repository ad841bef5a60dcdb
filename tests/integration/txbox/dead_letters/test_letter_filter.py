"""Which letters a filter means, against a real Postgres; each answer is written down by hand."""

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from support.postgres.tables import make_tables
from txbox import DeadLetter, DeadLetters, InvalidConfiguration, Reason
from txbox.dead_letters import LetterFilter, LetterOperations, OperationKind

SHOP = "https://sqs.eu-central-1.amazonaws.com/123456789012/shop"
STOCK = "https://sqs.eu-central-1.amazonaws.com/123456789012/stock"

LETTER = DeadLetter("billing", "a", Reason.FAILED, "ValueError: no", 5, SHOP, b"{}")

LETTERS = [
    dataclasses.replace(LETTER, headers={"tenant": "t-1"}, body=b'{"customer": 7, "items": [{"price": 50}]}'),
    dataclasses.replace(LETTER, message_id="b", headers={"Tenant": "T-1"}, body=b'{"customer": "7"}'),
    dataclasses.replace(LETTER, message_id="c", reason=Reason.CRASHED, error="it died: 100%_", body=b"no JSON"),
    dataclasses.replace(LETTER, message_id="d", source=STOCK, body='{"customer": 7, "name": "Zoë"}'.encode()),
    dataclasses.replace(LETTER, subscriber_id="txbox:outbox:own:x", message_id="e", body=b"\xff\0"),
    dataclasses.replace(LETTER, message_id="f", body=b"[" * 200_000),  # deeper than a server's stack
    dataclasses.replace(
        LETTER,
        message_id="g",
        error="ValueError: a\0b, no",
        body=b'{"customer": null, "flag": false, "zero": "\\u0000"}',
    ),
]


MEANT: list[tuple[dict[str, Any], str]] = [
    ({}, "abcdefg"),
    ({"subscriber_id": "billing"}, "abcdfg"),
    ({"subscriber_id": "bill"}, ""),
    ({"destination": "own:x"}, "e"),
    ({"reasons": (Reason.CRASHED,)}, "c"),
    ({"reasons": (Reason.CRASHED, Reason.FAILED)}, "abcdefg"),
    ({"error": "valueerror"}, "abdefg"),
    ({"error": "0%_"}, "c"),
    ({"error": "0__"}, ""),
    ({"error": "a\0b"}, "g"),
    ({"error": "\udcff"}, ""),
    ({"subscriber_id": "\0"}, ""),
    ({"since": datetime(2026, 3, 1, 6, tzinfo=UTC)}, "fg"),
    ({"until": datetime(2026, 3, 1, 2, tzinfo=UTC)}, "a"),
    ({"since": datetime(2026, 3, 1, 2, tzinfo=UTC), "until": datetime(2026, 3, 1, 4, tzinfo=UTC)}, "bc"),
    ({"since": timedelta(days=365_000)}, "abcdefg"),
    ({"until": timedelta(days=365_000)}, ""),
    ({"source": STOCK}, "d"),
    ({"message_ids": ("a", "d", "z")}, "ad"),
    ({"headers": {"TENANT": "t-1"}}, "a"),
    ({"headers": {"tenant": "T-1"}}, "b"),
    ({"headers": {"tenant": "t-1", "other": "x"}}, ""),
    ({"headers": {"tenant\0": "\udcff"}}, ""),
    ({"json_path": "$.customer == 7"}, "ad"),
    ({"json_path": '$.customer == "7"'}, "b"),
    ({"json_path": "$.items[*] ? (@.price > 40)"}, "a"),
    ({"json_path": "$.items[*] ? (@.price > 50)"}, ""),
    ({"json_path": '$.name like_regex "^Zoë$"'}, "d"),
    ({"json_path": "$.flag"}, ""),
    ({"json_path": "$.customer\0"}, ""),
    ({"json_path": "$.customer"}, "abd"),
    ({"json_path": "$.customer", "source": SHOP, "error": "no"}, "ab"),
    ({"numbers": (3, 1, 3, 99)}, "ac"),
    ({"numbers": ()}, ""),
    ({"numbers": (1, 2), "message_ids": ("b",)}, "b"),
]


@pytest.fixture
def place(fresh_engine: Engine) -> dict[str, Any]:
    place = {"schema": "Odd schema-%", "prefix": "Odd%_"}
    make_tables(fresh_engine, **place)
    letters = DeadLetters(fresh_engine, **place)  # type: ignore[arg-type]
    for number, letter in enumerate(LETTERS, start=1):
        assert letters.park(letter) == number
    with fresh_engine.begin() as connection:
        connection.exec_driver_sql(
            'UPDATE "Odd schema-%%"."Odd%%_dead_letter" SET parked_at = \'2026-03-01T00:00Z\'::timestamptz + '
            "dead_letter_id * interval '1 hour'"
        )
    return place


def test_a_filter_means_what_was_written_down(fresh_engine: Engine, place: dict[str, Any]) -> None:
    letters, operations = DeadLetters(fresh_engine, **place), LetterOperations(fresh_engine, **place)
    wrong = []
    for which, meant in MEANT:
        wanted = LetterFilter(**which)
        listed = "".join(letter.message_id for letter in letters.list(wanted))
        counted = sum(count.letters for count in operations.counts(wanted))
        operation = operations.select(wanted, OperationKind.REDRIVE, by="kim")
        selected = 0 if operation is None else operation.pending
        if (listed, counted, selected) != (meant, len(meant), len(meant)):
            wrong.append((which, meant, listed, counted, selected))
    assert wrong == []


@pytest.mark.parametrize(
    ("which", "passed_over"),
    [
        ({}, 0),
        ({"json_path": "$.customer == 7"}, 4),
        ({"json_path": "$.no.such"}, 4),
        ({"json_path": "$.customer", "subscriber_id": "billing"}, 3),
        ({"json_path": "$.customer", "numbers": (1, 3)}, 1),
        ({"json_path": "$.customer", "message_ids": ("a", "b", "d")}, 0),
    ],
)
def test_a_json_path_passes_over_bodies_that_postgres_cannot_read_as_json(
    which: dict[str, Any], passed_over: int, fresh_engine: Engine, place: dict[str, Any]
) -> None:
    """In ``LETTERS``, those of c, e, f and g."""
    wanted = LetterFilter(**which)
    assert LetterOperations(fresh_engine, **place).passed_over(wanted) == passed_over
    DeadLetters(fresh_engine, **place).discard(3, by="kim", note="no")
    without = passed_over - (passed_over > 0 and "numbers" not in which)
    assert LetterOperations(fresh_engine, **place).passed_over(wanted) == without
    assert LetterOperations(fresh_engine, **place).passed_over(wanted, redriven=True) == passed_over


@pytest.mark.parametrize("path", ["", "\udcff", "customer ==", '$.a ? (@ like_regex "(")', "$.a + "])
def test_what_is_no_json_path_is_refused_and_selects_nothing(engine: Engine, path: str) -> None:
    DeadLetters(engine).park(LETTERS[0])
    which = LetterFilter(json_path=path)
    operations = LetterOperations(engine)
    calls = [
        lambda: DeadLetters(engine).list(which),
        lambda: operations.counts(which),
        lambda: operations.select(which, OperationKind.DISCARD, by="kim", note="no"),
    ]
    for call in calls:
        with pytest.raises(InvalidConfiguration, match="is not a JSON path as Postgres reads it: "):
            call()
    assert operations.list() == []


def test_no_trace_of_a_json_path_stays_in_the_session(engine: Engine) -> None:
    for _ in range(3):
        assert DeadLetters(engine).list(LetterFilter(json_path="$.a")) == []
    with engine.connect() as connection:
        left = connection.exec_driver_sql("SELECT count(*) FROM pg_proc WHERE proname = 'txbox_finds_json'")
        assert left.scalar_one() == 0


@pytest.mark.parametrize(
    ("which", "why"),
    [
        ({"subscriber_id": "a", "destination": "b"}, "give LetterFilter one of the two"),
        ({"since": datetime(2026, 3, 1)}, "LetterFilter.since needs a zone"),  # noqa: DTZ001 - what is refused
        ({"until": datetime(2026, 3, 1)}, "LetterFilter.until needs a zone"),  # noqa: DTZ001 - what is refused
        *(
            ({name: value}, f"LetterFilter.{name} must be text, or None, not {value!r}")
            for name in ("subscriber_id", "destination", "error", "source", "json_path")
            for value in (7, b"x")
        ),
        *(
            ({"reasons": value}, "LetterFilter.reasons must be a tuple of reasons, failed, mismatch, .* not .*")
            for value in (("nope",), (7,), ([],), "failed", Reason.FAILED, None)
        ),
        *(
            ({name: value}, f"LetterFilter.{name} must be a datetime, a timedelta of up to 365,000 days, or None")
            for name in ("since", "until")
            for value in ("2026-03-01", 7, timedelta.max, timedelta.min)
        ),
        *(
            ({"message_ids": value}, "LetterFilter.message_ids must be a tuple")
            for value in ("m", (1,), None, {"m": 1})
        ),
        *(({"headers": value}, "LetterFilter.headers must be a mapping") for value in ("a=b", {"a": 1}, [("a", "b")])),
        *(({"numbers": value}, "LetterFilter.numbers must be a tuple") for value in (7, ("7",), (-1,), (2**63,), "7")),
    ],
)
def test_what_cannot_be_meant_is_refused(which: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        LetterFilter(**which)


def test_a_reason_may_be_given_by_its_name() -> None:
    assert LetterFilter(reasons=("failed",)).parameters()["reasons"] == ["failed"]  # type: ignore[arg-type]
