"""Processes that die: all or nothing is left, and the next one finishes."""

import signal
import subprocess
import sys

import pytest
from sqlalchemy import Engine

from support.inbox import recorded

PROGRAM = """
import os, signal, sys
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from txbox import Inbox

url, moment = sys.argv[1:]

def die_at(here):
    if here == moment:
        os.kill(os.getpid(), signal.SIGKILL)

with Session(create_engine(url)) as session:
    if Inbox("billing").record(session, "m-1"):
        die_at("between record and update")
        session.connection().exec_driver_sql("UPDATE account SET balance = balance + 10")
        die_at("before commit")
    session.commit()
    die_at("after commit")
"""


@pytest.mark.parametrize(
    ("moment", "left"), [("between record and update", 0), ("before commit", 0), ("after commit", 10), ("never", 10)]
)
def test_a_process_that_is_killed_leaves_all_or_nothing_and_the_next_one_finishes(
    engine: Engine, schema_url: str, moment: str, left: int
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (balance int)")
        connection.exec_driver_sql("INSERT INTO account VALUES (0)")

    def run(moment: str) -> int:
        return subprocess.run([sys.executable, "-c", PROGRAM, schema_url, moment], timeout=60, check=False).returncode

    def balance() -> int:
        with engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT balance FROM account").scalar_one())

    assert run(moment) == (0 if moment == "never" else -signal.SIGKILL)
    assert balance() == left
    assert recorded(engine) == ([("billing", "m-1")] if left else [])
    assert run("never") == 0
    assert balance() == 10
    assert recorded(engine) == [("billing", "m-1")]
