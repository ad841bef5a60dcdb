"""A service that bills one message, and what it has left in the database."""

import os
import signal

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.orm import Session

from txbox import Inbox


def bill(url: str, moment: str | None = None) -> None:
    """Add 10 to the balance, once; with a moment, kill this process when it has come."""

    def die_at(here: str) -> None:
        if here == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = create_engine(url)
    with Session(engine) as session:
        if Inbox("billing").record(session, "m-1"):
            die_at("between record and update")
            session.connection().exec_driver_sql("UPDATE account SET balance = balance + 10")
            die_at("before commit")
        session.commit()
        die_at("after commit")
    engine.dispose()


def recorded(engine: Engine) -> list[tuple[str, str]]:
    """What the table holds, read without any code under test."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT subscriber_id, message_id FROM processed_message ORDER BY 1, 2")
        return [(row[0], row[1]) for row in rows]


def lock_timeout(connection: Connection) -> str:
    return str(connection.exec_driver_sql("SHOW lock_timeout").scalar_one())
