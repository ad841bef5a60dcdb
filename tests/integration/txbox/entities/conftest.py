"""Accounts, and sessions to update them in."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.txbox.entities import Account, Base


@pytest.fixture(autouse=True)
def accounts(engine: Engine) -> None:
    Base.metadata.create_all(engine, checkfirst=False)
    with Session(engine) as session, session.begin():
        session.add_all([Account(account_id="ann"), Account(account_id="bob")])


@pytest.fixture
def sessions(engine: Engine) -> Iterator[Callable[[str], Session]]:
    """Open a session at an isolation level: sessions(level)."""
    opened: list[Session] = []

    def open_session(level: str = "READ COMMITTED") -> Session:
        opened.append(Session(engine.execution_options(isolation_level=level)))
        return opened[-1]

    yield open_session
    for session in opened:
        session.close()
