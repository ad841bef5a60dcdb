"""procrastinate: a worker with coroutine tasks."""

import asyncio

import procrastinate
from psycopg_pool import AsyncConnectionPool

from benchmarks.peers.feed import RECORD, UPDATE, Feed


async def main() -> None:
    """Defer, then work; each message is recorded in the transaction of its effect."""
    feed = Feed()
    connector = procrastinate.PsycopgConnector(conninfo=feed.url, min_size=4, max_size=feed.connections)
    app = procrastinate.App(connector=connector)
    async with (
        AsyncConnectionPool(feed.url, min_size=feed.connections, max_size=feed.connections) as pool,
        app.open_async(),
    ):
        await app.schema_manager.apply_schema_async()

        @app.task
        async def apply(message_id: str, account: int) -> None:
            async with pool.connection() as connection, connection.transaction():
                if (await connection.execute(RECORD, (message_id,))).rowcount:
                    await connection.execute(UPDATE, (account,))
            feed.count()

        await apply.batch_defer_async(*({"message_id": one, "account": account} for one, account in feed.deliveries))
        feed.begin("procrastinate", f"concurrency={feed.connections}, psycopg")
        await app.run_worker_async(concurrency=feed.connections, install_signal_handlers=False)


if __name__ == "__main__":
    asyncio.run(main())
