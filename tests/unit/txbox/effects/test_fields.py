"""Fields of an effect: how they are written, and what is refused."""

import pytest

from txbox import InvalidConfiguration
from txbox.effects import Field, SqlEffect
from txbox.effects.fields import read_fields


def test_text_and_mapping_say_the_same() -> None:
    written = '''customer_id text at /customer/id not null, cents bigint, "odd, ""name""" numeric(10, 2) default '1.5',
        note text default 'it''s, so', at timestamp with time zone, n double precision default 0'''
    assert read_fields(written) == {
        "customer_id": Field("text", "/customer/id", required=True),
        "cents": Field("bigint"),
        'odd, "name"': Field("numeric(10, 2)", default="1.5"),
        "note": Field("text", default="it's, so"),
        "at": Field("timestamp with time zone"),
        "n": Field("double precision", default="0"),
    }
    assert read_fields({"customer_id": "text at /customer/id not null", "cents": Field("bigint")}) == read_fields(
        "customer_id text at /customer/id not null, cents bigint"
    )


def test_types_of_spark_are_read_where_they_are_clear() -> None:
    given = read_fields("a string, b int, c long, d decimal(12,2), e double, f short, g timestamp_ntz")
    assert [one.of.name for one in given.values()] == [
        "text",
        "integer",
        "bigint",
        "numeric(12,2)",
        "double precision",
        "smallint",
        "timestamp without time zone",
    ]


def test_a_pointer_may_lead_through_names_with_slashes() -> None:
    assert Field("text", "/a~1b/~0").path("x") == ("a/b", "~")
    assert Field("text").path("a/b") == ("a/b",)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("", "there are no fields"),
        ("a", "is not a name with a type"),
        ("a text,, b text", "empty place"),
        ("a text, a text", "comes twice"),
        ("a timestamp", "say timestamptz, or timestamp without time zone"),
        ("a my_enum", "not a type of fields.*Take text, and cast"),
        ("a numeric(40,2)", "1 to 38 digits"),
        ("a numeric(2,3)", "at most as many after the point"),
        ("a bigint default x", "'x' is no bigint"),
        ("a bigint not null default 1", "required, or has a default"),
        ("a text at customer", "cannot be read"),
        ("message_id text", "has it by itself"),
        ("ctid text", "its own column"),
        ({"a" * 64: "text"}, "1 to 63 bytes"),
        ({"a": Field}, "a text or a Field"),
    ],
)
def test_what_cannot_work_is_refused_at_once(fields: object, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        SqlEffect.of("SELECT FROM fresh_event", fields=fields)  # type: ignore[arg-type]


def test_a_pointer_with_a_bad_escape_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="JSON Pointer"):
        Field("text", "/a~2")
