"""The SQL: quoted names, one place, values only as parameters."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import txbox
from txbox.postgres.statements import Statements, statements, text_array
from txbox.schema import TABLE_NAMES, tables

SQL_VERB = re.compile(r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|CREATE|ALTER|SET LOCAL)\s")


def everything(found: Statements) -> dict[str, str]:
    return {name: text for name, text in vars(found).items() if isinstance(text, str)}


def test_the_same_place_gives_the_same_object() -> None:
    assert statements("billing", "x_") is statements("billing", "x_")
    assert tables("billing", "x_") is tables("billing", "x_")
    assert statements("billing") is not statements("shipping")


@pytest.mark.parametrize(
    ("schema", "prefix", "quoted", "for_people"),
    [
        (None, "", "processed_message", "processed_message"),
        ("billing", "", "billing.processed_message", "billing.processed_message"),
        (None, "txbox_", "txbox_processed_message", "txbox_processed_message"),
        # A percent sign is doubled for psycopg's placeholders, and only for them.
        ("Odd schema-%", "", '"Odd schema-%%".processed_message', '"Odd schema-%".processed_message'),
        ('a"b', "P%", '"a""b"."P%%processed_message"', '"a""b"."P%processed_message"'),
        ("select", "", '"select".processed_message', '"select".processed_message'),
    ],
)
def test_names_are_quoted_as_they_need_it(schema: str | None, prefix: str, quoted: str, for_people: str) -> None:
    found = statements(schema, prefix)
    assert f"INSERT INTO {quoted} (subscriber_id" in found.record_one
    assert found.processed_message == for_people


def test_every_statement_that_names_a_table_names_it_in_full() -> None:
    found = everything(statements("somewhere", "pre_"))
    for name, text in found.items():
        for table in TABLE_NAMES:
            naked = re.findall(rf"(?<!somewhere\.pre_)\b{table}\b", text)
            assert naked == [], f"{name} names {table} without schema and prefix"
    assert sum("somewhere.pre_" in text for text in found.values()) > 10


def test_the_number_of_placeholders_is_that_of_the_documented_parameters() -> None:
    found = statements()
    assert found.record_one.count("%s") == 4
    assert found.record_many.count("%s") == 4
    assert found.park.count("%s") == 12


def test_sql_is_written_in_the_files_of_statements_only() -> None:
    root = Path(txbox.__file__).parent
    elsewhere = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        if not path.name.endswith("statements.py") and path.name != "schema.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL_VERB.match(node.value)
    ]
    assert elsewhere == []


@given(st.lists(st.text()))
def test_an_array_is_written_so_that_nothing_in_it_can_be_taken_for_syntax(values: list[str]) -> None:
    written = text_array(values)
    if isinstance(written, str):
        assert not any('"' in value or "\\" in value for value in values), "these need an escape"
        assert written == "{" + ",".join(f'"{value}"' for value in values) + "}"
    else:
        assert list(written) == values
