"""What a host registers with its driver changes neither what is kept nor what comes back."""

from typing import Any

import psycopg
import pytest
from psycopg.adapt import Dumper
from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from support.postgres.host_loaders import AsBytes, AsDecimal, Upper
from support.txbox.inbox import recorded
from support.txbox.styles import AsyncpgConnections, Style
from txbox import AsyncInbox, InvalidConfiguration, Recorded

pytestmark = pytest.mark.anyio


class StripsAndLowers(Dumper):
    def dump(self, obj: str) -> bytes:
        return obj.strip().lower().encode()


def texts_as_bytes(adapters: Any) -> None:
    adapters.register_loader("text", AsBytes)


def texts_in_upper_case(adapters: Any) -> None:
    adapters.register_loader("text", Upper)


def numbers_as_decimals(adapters: Any) -> None:
    for name in ("int4", "int8"):
        adapters.register_loader(name, AsDecimal)


def texts_are_sent_stripped(adapters: Any) -> None:
    adapters.register_dumper(str, StripsAndLowers)


REGISTERED = [texts_as_bytes, texts_in_upper_case, numbers_as_decimals, texts_are_sent_stripped]


async def driver_of(lent: Any) -> Any:
    if isinstance(lent, psycopg.Connection | psycopg.AsyncConnection):
        return lent
    if isinstance(lent, AsyncSession):
        lent = await lent.connection()
    if isinstance(lent, AsyncConnection):
        return (await lent.get_raw_connection()).driver_connection
    connection = lent.connection() if isinstance(lent, Session) else lent
    return connection.connection.driver_connection


@pytest.mark.parametrize("register", REGISTERED)
async def test_ids_come_back_as_they_were_sent(engine: Engine, of_psycopg: Style, register: Any) -> None:
    inbox = of_psycopg.inbox("billing", fingerprint=True)
    ids = [f" Message {number} " for number in range(10)]
    async with of_psycopg.open() as lent:
        register((await driver_of(lent)).adapters)
        assert await of_psycopg.call(inbox.record, lent, ids[0], b"body") is True
        found = await of_psycopg.call(inbox.record_many, lent, dict.fromkeys(ids, b"body"))
        assert await of_psycopg.call(inbox.sort_out, lent, {ids[0]: b"other"}) == Recorded(
            frozenset(), frozenset({ids[0]})
        )
        await of_psycopg.commit(lent)
    assert found == set(ids[1:])
    assert [message_id for _, message_id in recorded(engine)] == ids


async def test_a_connection_in_sql_ascii_has_texts(engine: Engine, of_psycopg: Style) -> None:
    inbox = of_psycopg.inbox("billing")
    async with of_psycopg.open() as lent:
        await of_psycopg.sql(lent, "SET client_encoding = 'SQL_ASCII'")
        assert await of_psycopg.call(inbox.record_many, lent, ["ä"]) == {"ä"}
        assert await of_psycopg.call(inbox.record_many, lent, ["ä", "ö"]) == {"ö"}
        await of_psycopg.commit(lent)
    assert recorded(engine) == [("billing", "ä"), ("billing", "ö")]


async def test_a_codec_of_asyncpg_is_refused(schema_url: str) -> None:
    style = AsyncpgConnections(schema_url)
    engine = style.engine("READ COMMITTED")

    @event.listens_for(engine.sync_engine, "connect")
    def set_codec(dbapi_connection: Any, _: object) -> None:
        dbapi_connection.run_async(
            lambda driver: driver.set_type_codec(
                "text", schema="pg_catalog", encoder=str.strip, decoder=str.upper, format="text"
            )
        )

    async with engine.connect() as connection:
        with pytest.raises(InvalidConfiguration, match="codec of yours for text"):
            await AsyncInbox("billing").record_many(connection, ["m-1", "m-2"])
        with pytest.raises(InvalidConfiguration, match="codec of yours for text"):
            await AsyncInbox("billing").record(connection, "m-1")
