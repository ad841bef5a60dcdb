"""A statement of ours on the driver's cursor: what the host sees of it, and how it fails, is as with SQLAlchemy's."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import (
    InvalidRequestError,
    OperationalError,
    PendingRollbackError,
    ProgrammingError,
    ResourceClosedError,
)
from sqlalchemy.orm import Session

from support.postgres.blocking import backend_pid
from support.txbox.inbox import recorded
from txbox import Inbox
from txbox.postgres.driver_cursor import fetch_one

SQL = "SELECT %(n)s::int + 1, '100%%'"


@pytest.fixture
def by_sqlalchemy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that went through SQLAlchemy."""
    run: list[str] = []
    real = Connection.exec_driver_sql

    def exec_driver_sql(self: Connection, statement: str, *arguments: Any, **options: Any) -> Any:
        run.append(statement)
        return real(self, statement, *arguments, **options)

    monkeypatch.setattr(Connection, "exec_driver_sql", exec_driver_sql)
    return run


def test_where_the_host_does_not_listen_the_driver_runs_it(engine: Engine, by_sqlalchemy: list[str]) -> None:
    with engine.begin() as connection:
        by_sqlalchemy.clear()  # its first look at a server
        assert fetch_one(connection, SQL, {"n": 1}) == (2, "100%")
        assert fetch_one(connection, "SELECT 1 WHERE %(no)s::bool", {"no": False}) is None
    assert by_sqlalchemy == []


def _on_engine(engine: Engine, hear: Callable[..., None]) -> Connection:
    event.listen(engine, "after_cursor_execute", hear)
    return engine.connect()


def _on_connection(engine: Engine, hear: Callable[..., None]) -> Connection:
    connection = engine.connect()
    event.listen(connection, "after_cursor_execute", hear)
    return connection


def _after_connecting(engine: Engine, hear: Callable[..., None]) -> Connection:
    connection = engine.connect()
    event.listen(engine, "after_cursor_execute", hear)
    return connection


def _on_dialect(engine: Engine, hear: Callable[..., None]) -> Connection:
    event.listen(engine, "do_execute", lambda *given: hear(*given))
    return engine.connect()


@pytest.mark.parametrize("listen", [_on_engine, _on_connection, _after_connecting, _on_dialect])
def test_a_listener_of_the_host_sees_the_statement(
    schema_url: str, listen: Callable[[Engine, Callable[..., None]], Connection]
) -> None:
    heard: list[str] = []
    own = create_engine(schema_url)
    with listen(own, lambda *given: heard.extend(one for one in given if isinstance(one, str))) as connection:
        connection.begin()
        assert fetch_one(connection, SQL, {"n": 1}) == (2, "100%")
    own.dispose()
    assert SQL in heard


def test_an_engine_that_echoes_logs_it(schema_url: str, caplog: pytest.LogCaptureFixture) -> None:
    own = create_engine(schema_url, echo=True)
    with caplog.at_level(logging.INFO, "sqlalchemy.engine"), own.begin() as connection:
        fetch_one(connection, SQL, {"n": 1})
    own.dispose()
    assert any(SQL in record.getMessage() for record in caplog.records)


def test_a_transaction_that_is_not_begun_is(engine: Engine, inbox: Inbox) -> None:
    with engine.connect() as connection:
        assert inbox.record(connection, "m-1")
        connection.commit()  # does nothing, unless the record has begun a transaction of SQLAlchemy's
    with Session(engine) as session:
        assert inbox.record(session, "m-2")
        session.commit()
    assert recorded(engine) == [("billing", "m-1"), ("billing", "m-2")]


def test_a_connection_that_is_closed_or_invalidated_is_refused(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.begin()
    with pytest.raises(ResourceClosedError):
        fetch_one(connection, SQL, {"n": 1})
    with engine.connect() as connection:
        connection.begin()
        connection.begin_nested()
        connection.invalidate()
        with pytest.raises(PendingRollbackError):
            fetch_one(connection, SQL, {"n": 1})


@pytest.mark.parametrize("nested", [False, True])
def test_a_block_whose_transaction_has_ended_is_refused(engine: Engine, nested: bool) -> None:
    with engine.connect() as connection, connection.begin() as outer:
        with connection.begin_nested() if nested else nullcontext(outer) as inner:
            inner.rollback()
            with pytest.raises(InvalidRequestError, match="closed transaction"):
                fetch_one(connection, SQL, {"n": 1})
        if nested:
            assert fetch_one(connection, SQL, {"n": 1}) == (2, "100%")


def test_an_error_of_the_server_is_as_from_sqlalchemy(schema_url: str) -> None:
    own, heard = create_engine(schema_url), []
    event.listen(own, "handle_error", lambda context: heard.append(context.statement))
    with own.connect() as connection:
        connection.begin()
        with pytest.raises(ProgrammingError, match="no_such_table") as caught:
            fetch_one(connection, "SELECT * FROM no_such_table WHERE %(n)s::int = 1", {"n": 1})
        assert isinstance(caught.value.orig, psycopg.errors.UndefinedTable)
        assert caught.value.__cause__ is caught.value.orig
        assert caught.value.params == {"n": 1}
        assert not connection.invalidated
        connection.rollback()
        connection.begin()
        assert fetch_one(connection, SQL, {"n": 1}) == (2, "100%")
    own.dispose()
    assert heard == ["SELECT * FROM no_such_table WHERE %(n)s::int = 1"]


def test_what_an_encoding_lacks_is_raised_as_it_is(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL client_encoding = 'LATIN1'"))
        with pytest.raises(UnicodeEncodeError):
            fetch_one(connection, "SELECT %(what)s::text", {"what": "€"})


def test_a_lost_connection_is_invalidated(engine: Engine, schema_url: str) -> None:
    own = create_engine(schema_url, pool_size=2)
    with own.connect() as other:
        pass
    with own.connect() as connection:
        connection.begin()
        with engine.begin() as killer:
            killer.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": backend_pid(connection)})
        with pytest.raises(OperationalError) as caught:
            fetch_one(connection, SQL, {"n": 1})
        assert caught.value.connection_invalidated
        assert connection.invalidated
    with own.begin() as connection:
        assert fetch_one(connection, SQL, {"n": 1}) == (2, "100%")
    own.dispose()
    assert other.closed
