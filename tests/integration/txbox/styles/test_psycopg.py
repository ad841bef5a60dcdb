"""Connections of psycopg's own, as a service may have set them: in a pipeline, or in another encoding."""

import psycopg
import pytest
from sqlalchemy import Engine, make_url

import txbox_migrations
from support.txbox.inbox import recorded
from txbox import AsyncInbox, AsyncOutbox, Inbox, InFlight, NotInTransaction, Outbox

pytestmark = pytest.mark.anyio


@pytest.fixture
def conninfo(schema_url: str) -> str:
    return make_url(schema_url).set(drivername="postgresql").render_as_string(hide_password=False)


def test_in_a_pipeline_the_answers_are_waited_for(engine: Engine, conninfo: str) -> None:
    inbox = Inbox("billing", wait_seconds=0.05)
    with psycopg.connect(conninfo) as connection, psycopg.connect(conninfo) as other:
        with connection.pipeline():
            connection.execute("SELECT 1")
            assert inbox.record(connection, "m-1") is True
            assert inbox.record_many(connection, ["m-1", "m-2"]) == {"m-2"}
            Outbox().publish(connection, "own:somewhere", "body")
        with other.pipeline(), pytest.raises(InFlight):
            inbox.record(other, "m-1")
        connection.commit()
        with connection.pipeline(), connection.transaction():
            assert inbox.record(connection, "m-1") is False
    assert recorded(engine) == [("billing", "m-1"), ("billing", "m-2")]


async def test_in_an_async_pipeline_too(engine: Engine, conninfo: str) -> None:
    inbox = AsyncInbox("billing")
    async with await psycopg.AsyncConnection.connect(conninfo) as connection, connection.pipeline():
        assert await inbox.record(connection, "m-1") is True
        assert await inbox.record(connection, "m-1") is False
        await AsyncOutbox().publish(connection, "own:somewhere", "body")
    assert recorded(engine) == [("billing", "m-1")]


def test_a_pipeline_that_commits_by_itself_is_refused_whatever_is_under_way(engine: Engine, conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        with connection.pipeline():
            connection.execute("SELECT 1")
            with pytest.raises(NotInTransaction):
                Inbox("billing").record(connection, "m-1")
        with connection.pipeline(), connection.transaction():
            connection.execute("SELECT 1")
            assert Inbox("billing").record(connection, "m-2") is True
    assert recorded(engine) == [("billing", "m-2")]


async def test_so_is_an_async_one(engine: Engine, conninfo: str) -> None:
    async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection:
        async with connection.pipeline():
            await connection.execute("SELECT 1")
            with pytest.raises(NotInTransaction):
                await AsyncInbox("billing").record(connection, "m-1")
        async with connection.pipeline(), connection.transaction():
            await connection.execute("SELECT 1")
            assert await AsyncInbox("billing").record(connection, "m-2") is True
    assert recorded(engine) == [("billing", "m-2")]


@pytest.mark.parametrize("encoding", ["latin1", "sql_ascii"])
async def test_a_schema_is_found_whatever_the_encoding(fresh_database: str, encoding: str) -> None:
    txbox_migrations.upgrade_database(fresh_database, schema="schön")
    url = make_url(fresh_database).set(drivername="postgresql", query={"client_encoding": encoding})
    conninfo = url.render_as_string(hide_password=False)
    with psycopg.connect(conninfo) as connection:
        assert Inbox("billing", schema="schön").record(connection, "ä") is True
    async with await psycopg.AsyncConnection.connect(conninfo) as asynchronous:
        assert await AsyncInbox("billing", schema="schön").record(asynchronous, "ä") is False
