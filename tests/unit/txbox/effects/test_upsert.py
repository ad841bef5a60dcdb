"""The statement of an upsert: which columns it writes, how it casts them, and what it refuses."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from txbox import InvalidConfiguration
from txbox.effects import Field, Upsert
from txbox.effects.upsert import TargetColumn, UpsertTarget


def column(
    name: str, type_: str = "bigint", *, without: str | None = None, compared: str | None = None, **is_: bool
) -> TargetColumn:
    flags = {"is_text": False, "is_domain": False, "is_required": False, "is_generated": False, **is_}
    return TargetColumn(name, type_, without or type_, compared or without or type_, **flags)


PURCHASE = UpsertTarget(
    '"shop"."purchase"',
    (
        column("order_id", "uuid", is_required=True),
        column("cents", "numeric(12,2)", without="numeric", compared="numeric(12,2)", is_required=True),
        column("currency", "character varying(3)", without="character varying", is_text=True),
        column("updated_at", "timestamp with time zone"),
        column("total", is_generated=True),
    ),
    (("order_id",), ("currency", "cents")),
    ("order_id",),
)
EVENTS = {
    "order_id": "uuid",
    "cents": "numeric(12,2)",
    "currency": "character varying(3)",
    "updated_at": "timestamp with time zone",
}


def test_the_newest_event_of_a_key_wins() -> None:
    assert Upsert("purchase", only_if_newer="updated_at").statement(PURCHASE, EVENTS) == (
        'INSERT INTO "shop"."purchase" AS target ("order_id", "cents", "currency", "updated_at")\n'
        'SELECT DISTINCT ON ("order_id") "order_id", "cents", "currency", "updated_at"\n'
        'FROM fresh_event ORDER BY "order_id", "updated_at" DESC NULLS LAST, fresh_event.message_id DESC\n'
        'ON CONFLICT ("order_id") DO UPDATE SET "cents" = excluded."cents", "currency" = excluded."currency", '
        '"updated_at" = excluded."updated_at"\n'
        'WHERE target."updated_at" IS NULL OR excluded."updated_at" > target."updated_at"'
    )


def test_without_a_time_the_greatest_message_id_wins() -> None:
    statement = Upsert("purchase", key=("currency", "cents")).statement(PURCHASE, EVENTS)
    assert 'ORDER BY "currency", "cents", fresh_event.message_id DESC\n' in statement
    assert statement.endswith(
        'ON CONFLICT ("currency", "cents") DO UPDATE SET "order_id" = excluded."order_id", '
        '"updated_at" = excluded."updated_at"'
    )


def test_a_row_that_is_nothing_but_its_key_stays() -> None:
    seen = UpsertTarget("seen", (column("a"), column("b")), (("a", "b"),), ("a", "b"))
    assert Upsert("seen").statement(seen, {"a": "bigint", "b": "bigint"}).endswith('ON CONFLICT ("a", "b") DO NOTHING')


@pytest.mark.parametrize(
    ("name", "type_", "value"),
    [
        ("order_id", "uuid", '"order_id"'),
        ("order_id", "text", '"order_id"::uuid'),
        ("cents", "text", '"cents"::numeric'),  # numeric(12,2) is for the INSERT
        ("cents", "bigint", '"cents"'),
        ("currency", "text", '"currency"'),  # a cast to varchar(3) would cut it off
        ("updated_at", "text", '"updated_at"::timestamp with time zone'),
        ("updated_at", "timestamp without time zone", '"updated_at"::timestamp with time zone'),  # it is compared
    ],
)
def test_values_are_cast_where_an_insert_does_not_or_where_they_are_compared(name: str, type_: str, value: str) -> None:
    statement = Upsert("purchase", only_if_newer="updated_at").statement(PURCHASE, {**EVENTS, name: type_})
    said = value if value == f'"{name}"' else f'{value} AS "{name}"'
    _, _, selected = statement.splitlines()[1].partition(") ")
    assert said in selected.split(", ")


def test_a_key_is_compared_as_its_index_compares_it() -> None:
    key = frozenset(("cents", "currency"))
    table = replace(PURCHASE, collations={key: {"currency": '"public"."any case"'}})
    upsert = Upsert("purchase", key=("currency", "cents"))
    distinct = '"currency" COLLATE "public"."any case", "cents"::numeric(12,2)'
    statement = upsert.statement(table, {**EVENTS, "cents": "double precision"})
    assert f"SELECT DISTINCT ON ({distinct}) " in statement
    assert f"ORDER BY {distinct}, fresh_event.message_id DESC" in statement
    assert "COLLATE" not in Upsert("purchase").statement(table, EVENTS)


def test_an_array_is_cast_to_what_the_table_has() -> None:
    table = UpsertTarget("t", (column("id"), column("tags", "uuid[]")), (("id",),), ("id",))
    assert '"tags"::uuid[] AS "tags"' in Upsert("t").statement(table, {"id": "bigint", "tags": "text[]"})


def test_the_message_id_is_written_where_the_table_has_a_column_for_it() -> None:
    table = UpsertTarget(
        "t", (column("message_id", "uuid", is_required=True), column("n")), (("message_id",),), ("message_id",)
    )
    assert Upsert("t").statement(table, {"n": "bigint"}) == (
        'INSERT INTO t AS target ("message_id", "n")\n'
        'SELECT DISTINCT ON ("message_id"::uuid) "message_id"::uuid AS "message_id", "n"\n'
        'FROM fresh_event ORDER BY "message_id"::uuid, fresh_event.message_id DESC\n'
        'ON CONFLICT ("message_id") DO UPDATE SET "n" = excluded."n"'
    )
    free = UpsertTarget("t", (column("n"), column("message_id", "text", is_text=True)), (("n",),), ("n",))
    assert "message_id" not in Upsert("t", ignore_columns="message_id").statement(free, {"n": "bigint"}).splitlines()[0]


def test_names_are_quoted() -> None:
    odd = UpsertTarget('"a"."b"', (column('Say "50%", '),), (('Say "50%", ',),), None)
    statement = Upsert("b", key='Say "50%", ').statement(odd, {'Say "50%", ': "bigint"})
    assert '"Say ""50%"", "\nFROM' in statement


@pytest.mark.parametrize(
    ("upsert", "events", "said"),
    [
        ({"key": ["cents"]}, {}, r"has no unique key on \(cents\).*it has \(order_id\), \(currency, cents\)"),
        ({}, {"note": "text", "extra": "text"}, "no column note, extra, and the events have.*--ignore-columns"),
        ({}, {"total": "bigint"}, "generates column total by itself"),
        ({"ignore_columns": ["cents"]}, {}, "no column cents, which .* needs: it is NOT NULL without a default"),
        ({"ignore_columns": ["order_id"]}, {}, "the events have no column order_id, and the key has"),
        ({"ignore_columns": ["nothing"]}, {}, "the events have no column nothing, which is to be ignored"),
        ({"only_if_newer": "total", "ignore_columns": ["total"]}, {"total": "bigint"}, "no column total to tell what"),
        ({"ignore_columns": ["order_id"], "key": ["currency", "cents"]}, {}, "no column order_id, which"),
    ],
)
def test_columns_that_do_not_fit_are_named(upsert: dict[str, Any], events: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidConfiguration, match=said):
        Upsert("purchase", **upsert).statement(PURCHASE, {**EVENTS, **events})


def test_a_table_without_keys_says_so() -> None:
    with pytest.raises(InvalidConfiguration, match=r"has no primary key that ON CONFLICT can take.*it has none"):
        Upsert("t").statement(UpsertTarget("t", (column("a"),), (), None), {"a": "bigint"})


def test_only_some_of_many_columns_are_named() -> None:
    more = {f"c{number}": "text" for number in range(60)}
    with pytest.raises(InvalidConfiguration, match=r"no column c0, c1, .*c9 and 50 more, and"):
        Upsert("purchase").statement(PURCHASE, {**EVENTS, **more})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"table": " "}, "needs the name of a table"),
        ({"key": []}, "is one column or more"),
        ({"key": ["a", "a"]}, "each once"),
        ({"fields": "a money"}, "'money' is not a type of fields"),
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfiguration, match=said):
        Upsert(**{"table": "t", **wrong})


def test_fields_and_single_names_are_read_and_it_can_be_sent() -> None:
    upsert = Upsert("t", key="a", fields="a bigint, b text default 'x'")
    assert upsert.key == ("a",)
    assert upsert.typed_fields == {"a": Field("bigint"), "b": Field("text", default="x")}
    assert pickle.loads(pickle.dumps(upsert)) == upsert
