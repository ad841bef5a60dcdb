"""Processes that die: all or nothing is left, and the next one finishes."""

import signal

import pytest
from sqlalchemy import Engine

from support.processes import start_python
from support.txbox.inbox import bill, recorded


@pytest.mark.parametrize(
    ("moment", "left"), [("between record and update", 0), ("before commit", 0), ("after commit", 10)]
)
def test_a_process_that_is_killed_leaves_all_or_nothing_and_the_next_one_finishes(
    engine: Engine, schema_url: str, moment: str, left: int
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (balance int)")
        connection.exec_driver_sql("INSERT INTO account VALUES (0)")

    def balance() -> int:
        with engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT balance FROM account").scalar_one())

    killed = start_python(
        "-c", "import sys; from support.txbox.inbox import bill; bill(*sys.argv[1:])", schema_url, moment
    )
    assert killed.wait(60) == -signal.SIGKILL
    assert balance() == left
    assert recorded(engine) == ([("billing", "m-1")] if left else [])
    bill(schema_url)
    assert balance() == 10
    assert recorded(engine) == [("billing", "m-1")]
