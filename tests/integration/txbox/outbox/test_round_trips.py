"""The round trips and statements of publishing."""

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from support.postgres.statements import run
from support.postgres.tcp_proxy import CountingProxy
from support.txbox.outbox import OWN, numbered
from txbox import AsyncOutbox, Outbox

UPDATE = "SELECT 'a business update'"

PREPARES = 5
"""The run of a statement, from 0, in which psycopg prepares it first: one round trip more."""

WARM = 7
"""So often a statement runs before its round trips are counted: drivers prepare it, and ask for its types."""


def test_publishing_is_one_round_trip_and_nothing_else(engine: Engine, schema_url: str, proxy: CountingProxy) -> None:
    run(engine, "INSERT INTO subscription (topic, subscriber_id, first_lane) VALUES ('sales', 'billing', -64)")
    own = create_engine(make_url(schema_url).set(host="127.0.0.1", port=proxy.port))
    outbox = Outbox(notify=False)
    publish: list[Callable[[], object]] = [
        lambda: outbox.publish(connection, OWN, "one", key="k", headers={"a": "b"}, delay=60),
        lambda: outbox.publish_many(connection, numbered(50)),
        lambda: outbox.publish(connection, "topic:sales", "one"),
    ]
    with own.connect() as connection:
        for number in range(10):
            for call in publish:
                connection.exec_driver_sql(UPDATE)
                before = proxy.packets
                call()
                if number != PREPARES:
                    assert proxy.packets - before == 1
                connection.commit()
                assert proxy.packets - before == 2 + (number == PREPARES)
    own.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.usefixtures("engine")
def test_publishing_from_a_coroutine_is_one_round_trip(schema_url: str, proxy: CountingProxy, driver: str) -> None:
    url = make_url(schema_url).set(host="127.0.0.1", port=proxy.port, drivername=f"postgresql+{driver}")
    if driver == "asyncpg":
        options = str(url.query["options"]).removeprefix("-csearch_path=")
        url = url.set(query={})
        own = create_async_engine(url, connect_args={"server_settings": {"search_path": options}})
    else:
        own = create_async_engine(url)
    outbox = AsyncOutbox(notify=False)

    async def publish(connection: AsyncConnection) -> None:
        await connection.exec_driver_sql(UPDATE)
        before = proxy.packets
        await outbox.publish(connection, OWN, "one")
        trips.append(proxy.packets - before)
        await connection.commit()

    trips: list[int] = []

    async def main() -> None:
        async with own.connect() as connection:
            for _ in range(2 * WARM):
                await publish(connection)
        await own.dispose()

    asyncio.run(main())
    assert trips[WARM:] == [1] * WARM
