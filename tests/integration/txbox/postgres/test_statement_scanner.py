"""A text that is called harmless does not end the transaction it is run in: Postgres itself is asked."""

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg.pq import ExecStatus, TransactionStatus
from sqlalchemy import Engine

from txbox.postgres.guards.transaction_guard import ends_transaction

CONTENTS = st.lists(
    st.one_of(
        st.sampled_from([*"'\\$\"-/*\n\raE", "''", "\\'", "$$", "$a$", "--", "/*", "*/", "E'", "U&'"]),
        st.sampled_from(["; COMMIT; SELECT ", "; COMMIT; SELECT '", "; COMMIT; SELECT $$", '; COMMIT; SELECT 1 AS "']),
    ),
    max_size=4,
).map("".join)
"""What makes a part end where it does not seem to."""

PARTS = st.one_of(
    *(
        st.builds(f"{first}{{}}{last}".format, CONTENTS)
        for first, last in [
            ("'", "'"),
            ("E'", "'"),
            ("E'a'\n'", "'"),
            ("e'a' -- b\r'", "'"),
            ("'a'\n'", "'"),
            ("U&'", "'"),
            ("N'", "'"),
            ("$$", "$$"),
            ("$a$", "$a$"),
            ('1 AS "', '"'),
            ('1 AS U&"', '"'),
            ("1 /*", "*/"),
            ("1 --", "\n"),
            ("1 --", "\r"),
            ("1 AS a$$", "1 AS b$$"),
            ("1 AS nameE'", "'"),
            ("X'a", "'"),
        ]
    ),
    CONTENTS,
)
STATEMENTS = st.one_of(
    st.lists(PARTS, min_size=1, max_size=2).map(lambda parts: "SELECT " + ", ".join(parts)),
    st.sampled_from(
        ["COMMIT", "SELECT 1", "ROLLBACK /*;*/ TO a", "/**/ROLLBACK--\nWORK", "END AND CHAIN", 'CLOSE "a"', ""]
    ),
)
TEXTS = st.lists(STATEMENTS, min_size=1, max_size=4).map(";".join)


@pytest.fixture(params=["on", "off"])
def pgconn(request: pytest.FixtureRequest, engine: Engine) -> Any:
    """A connection of libpq, with each meaning of a backslash."""
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.autocommit = True
        driver.execute(f"SET standard_conforming_strings = {request.param}")
        yield driver.pgconn
        connection.invalidate()


def ends(pgconn: Any, text: str) -> bool:
    """Run a text in a transaction, and return whether that transaction has ended."""
    assert pgconn.exec_(b"BEGIN; SAVEPOINT kept_by_the_test; SAVEPOINT a").status == ExecStatus.COMMAND_OK
    pgconn.exec_(text.encode())
    if pgconn.transaction_status == TransactionStatus.IDLE:
        return True
    is_the_same = pgconn.exec_(b"ROLLBACK TO kept_by_the_test").status == ExecStatus.COMMAND_OK
    pgconn.exec_(b"ROLLBACK")
    return not is_the_same


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(r"SELECT E'\''; COMMIT; SELECT '1'")
@example(r"SELECT '\''; COMMIT; SELECT '1'")
@example(r"SELECT '\'; COMMIT; SELECT '1'")
@example("SELECT '\\', E'a'\n'\\''; COMMIT; SELECT '1'")
@example("SELECT 1 AS a$$; COMMIT; SELECT 1 AS b$$")
@given(text=TEXTS)
def test_what_is_called_harmless_does_not_end_a_transaction(pgconn: Any, text: str) -> None:
    assert ends_transaction(text) or not ends(pgconn, text)


def test_the_server_is_asked_by_a_test_that_can_tell(pgconn: Any) -> None:
    for text in (
        "COMMIT",
        "COMMIT AND CHAIN",
        "SELECT 1; ROLLBACK; BEGIN",
        "COMMIT; SELECT 1/0",
        "COMMIT; BEGIN; SELECT 1/0",
    ):
        assert ends(pgconn, text), text
    for text in ("SELECT 1", "SELECT 1/0", "ROLLBACK TO a", "COMMIT; SELECT '"):
        assert not ends(pgconn, text), text
