"""A statement as it may be shown: without what is in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbox.outbox.snapshot_holders import without_values


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("SELECT 1", "SELECT ?"),
        ("SELECT $1, $23", "SELECT $1, $23"),
        ("UPDATE account2\n  SET name = 'O''Hara', cents = -12.50", "UPDATE account2 SET name = ?, cents = -?"),
        (r"SELECT E'it\'s secret', x", "SELECT ?, x"),
        (r"SELECT e'back\\', 'secret', x", "SELECT ?, ?, x"),
        (r"SELECT 'C:\', 'secret'", "SELECT ?, ?"),
        ("SELECT U&'\\0441', B'01', x'ff', N'n'", "SELECT ?, ?, ?, ?"),
        ("SELECT date '2026-01-01'", "SELECT date ?"),
        ("SELECT \"it's\", 'secret'", 'SELECT "it\'s", ?'),
        ("SELECT $$it's secret$$, $a$ $$ secret $a$, x", "SELECT ?, ?, x"),
        ("SELECT 1 -- don't\n, 'secret'", "SELECT ? , ?"),
        ("SELECT /* don't */ 'secret'", "SELECT ?"),
        ("SELECT 'secret that was cut o", "SELECT ?"),
        (r"SELECT E'cut at its escape \ ".rstrip(), "SELECT ?"),
        ("SELECT $$secret that was cut o", "SELECT ?"),
        ("SELECT 1 /* secret", "SELECT ?"),
        ("SELECT 4711::text, 1e10, 0x1F, 1_000", "SELECT ?::text, ?, ?, ?"),
        ("ALTER ROLE r PASSWORD 'hunter2'", "ALTER ROLE r PASSWORD ?"),
        ("", ""),
    ],
)
def test_values_are_not_shown(query: str, shown: str) -> None:
    assert without_values(query) == shown


@given(st.text(alphabet="ab\\'\"$- \n/*", max_size=20), st.integers(min_value=0, max_value=60))
def test_a_text_value_is_never_shown_wherever_the_server_has_cut_it_off(value: str, length: int) -> None:
    quoted = "'" + value.replace("'", "''") + "'"
    # Of a statement that is cut off before the value begins, there is nothing to be seen.
    assert without_values(f"SELECT x, {quoted[:length] or quoted}") == "SELECT x, ?"
