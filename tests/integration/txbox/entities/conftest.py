"""Accounts to update."""

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.txbox.entities import Account, Base


@pytest.fixture(autouse=True)
def accounts(engine: Engine) -> None:
    Base.metadata.create_all(engine, checkfirst=False)
    with Session(engine) as session, session.begin():
        session.add_all([Account(account_id="ann"), Account(account_id="bob")])
