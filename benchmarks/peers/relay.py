"""Relays of a backlog to a publisher that takes everything: txbox's, and one DELETE written by hand."""

from collections.abc import Sequence

import psycopg
from sqlalchemy import create_engine

from benchmarks.peers.feed import SCHEMA, Feed, wait_for_the_end
from txbox.outbox import Outbox, Outgoing
from txbox.relay import OutboxMessage, Refused, Relay

BODY = b'{"account": 17, "amount": 3, "currency": "EUR"}'
CLAIM = f"""
DELETE FROM {SCHEMA}.outbox_message WHERE ctid = ANY(ARRAY(
  SELECT ctid FROM {SCHEMA}.outbox_message ORDER BY position LIMIT 1000 FOR UPDATE SKIP LOCKED)) RETURNING body"""


class Taking:
    """Takes everything."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        """Count."""
        self._feed.count(len(messages))
        return ()


def main() -> None:
    """Publish the backlog, then relay it."""
    feed = Feed()
    engine = create_engine(feed.url.replace("postgresql://", "postgresql+psycopg://"), pool_size=16)
    outbox = Outbox(schema=SCHEMA, notify=False)
    for start in range(0, len(feed.deliveries), 1000):
        with engine.begin() as connection:
            part = feed.deliveries[start : start + 1000]
            outbox.publish_many(connection, [Outgoing("benchmark:orders", BODY) for _ in part])
    if feed.variant == "txbox":
        relay = Relay(engine, {"benchmark": Taking(feed)}, schema=SCHEMA)
        feed.begin("txbox", "one relay, defaults")
        relay.start()
        wait_for_the_end()
    with psycopg.connect(feed.url) as client:
        client.execute("SET synchronous_commit = off")
        client.commit()
        feed.begin("psycopg", "one connection, sets of 1,000, synchronous_commit off")
        while not feed.finished.is_set():
            found = client.execute(CLAIM.encode()).fetchall()
            client.commit()
            feed.count(len(found))
    wait_for_the_end()


if __name__ == "__main__":
    main()
