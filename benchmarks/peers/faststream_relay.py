"""faststream-outbox: a subscriber that relays a backlog to what takes everything."""

import asyncio

from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from benchmarks.peers.feed import Feed

BATCH = 1_000
WORKERS = 16


async def main() -> None:
    """Publish the backlog, then relay it."""
    feed = Feed()
    engine = create_async_engine(feed.url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=feed.connections)
    metadata = MetaData()
    broker = OutboxBroker(engine, outbox_table=make_outbox_table(metadata, table_name="outbox"))

    @broker.subscriber(
        "orders", max_workers=WORKERS, fetch_batch_size=BATCH, terminal_flush_batch_size=100, min_fetch_interval=0.01
    )
    async def relay(body: dict[str, int]) -> None:  # noqa: ARG001 - it is what the library reads the body for
        feed.count()

    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    for start in range(0, len(feed.deliveries), 1000):
        part = feed.deliveries[start : start + 1000]
        async with async_sessionmaker(engine)() as session, session.begin():
            await broker.publish_batch(*({"account": account} for _, account in part), queue="orders", session=session)
    settings = f"asyncpg, max_workers={WORKERS}, fetch_batch_size={BATCH}, terminal_flush_batch_size=100"
    feed.begin("faststream-outbox", settings)
    await broker.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
