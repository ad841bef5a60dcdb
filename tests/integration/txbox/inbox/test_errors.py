"""What the inbox raises: for a connection that cannot be used, a table that is missing, an error of the database."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from support.txbox.inbox import recorded
from txbox import Inbox, NotInTransaction, SchemaMissing
from txbox.postgres.sqlstates import sqlstate


def test_a_connection_that_commits_every_statement_is_refused(engine: Engine, inbox: Inbox) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    calls: list[Callable[[Any], object]] = [
        lambda lent: inbox.record(lent, "m-1"),
        lambda lent: inbox.record_many(lent, ["m-1"]),
        lambda lent: inbox.record_many(lent, []),
        lambda lent: inbox.sort_out(lent, ["m-1"]),
        lambda lent: inbox.unrecord(lent, ["m-1"]),
    ]
    for call in calls:
        with autocommit.connect() as connection, pytest.raises(NotInTransaction):
            call(connection)
        with Session(autocommit) as session, pytest.raises(NotInTransaction):
            call(session)
    with autocommit.connect() as connection, pytest.raises(NotInTransaction):
        inbox.check(connection)
    assert recorded(engine) == []


def test_a_missing_table_is_named_with_the_remedy(fresh_engine: Engine) -> None:
    for schema, name in [(None, "processed_message"), ("No such-%", '"No such-%".processed_message')]:
        inbox = Inbox("billing", schema=schema)
        calls: list[Callable[[Connection], object]] = [
            lambda connection, inbox=inbox: inbox.record(connection, "m-1"),  # type: ignore[misc]
            lambda connection, inbox=inbox: inbox.record_many(connection, ["m-1"]),  # type: ignore[misc]
            lambda connection, inbox=inbox: inbox.check(connection),  # type: ignore[misc]
        ]
        for call in calls:
            with fresh_engine.connect() as connection, pytest.raises(SchemaMissing, match="txbox db upgrade") as caught:
                call(connection)
            assert caught.value.table == name
            assert isinstance(caught.value.__cause__, DBAPIError)


def test_errors_of_the_database_pass_through_with_their_cause(engine: Engine, inbox: Inbox) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        with pytest.raises(DBAPIError) as caught:
            inbox.record(connection, "m-1")
    assert sqlstate(caught.value) == "25006"
    assert caught.value.__cause__ is caught.value.orig
