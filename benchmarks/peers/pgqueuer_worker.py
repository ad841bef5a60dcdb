"""pgqueuer: its queue manager over a pool of asyncpg."""

import asyncio
from datetime import timedelta

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.models import Job

from benchmarks.peers.feed import RECORD, UPDATE, Feed

BATCH = 100


async def main() -> None:
    """Enqueue, then work; the variant "record" records each message in the transaction of its effect."""
    feed = Feed()
    record, update = RECORD.replace("%s", "$1"), UPDATE.replace("%s", "$1")
    async with asyncpg.create_pool(feed.url, min_size=feed.connections, max_size=feed.connections) as pool:
        worker = PgQueuer(AsyncpgPoolDriver(pool))
        await worker.qm.queries.install()

        @worker.entrypoint("apply")
        async def apply(job: Job) -> None:
            message_id, account = (job.payload or b"").decode().split()
            if feed.variant == "record":
                async with pool.acquire() as connection, connection.transaction():
                    if await connection.execute(record, message_id) == "INSERT 0 1":
                        await connection.execute(update, int(account))
            else:
                await pool.execute(update, int(account))
            feed.count()

        payloads: list[bytes | None] = [f"{one} {account}".encode() for one, account in feed.deliveries]
        for start in range(0, len(payloads), 1000):
            part = payloads[start : start + 1000]
            await worker.qm.queries.enqueue(["apply"] * len(part), part, [0] * len(part))
        feed.begin("pgqueuer", f"asyncpg, a pool of {feed.connections}, batch_size={BATCH}")
        await worker.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=1))


if __name__ == "__main__":
    asyncio.run(main())
