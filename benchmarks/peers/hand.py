"""By hand: loops with psycopg, or with a session of SQLAlchemy, over messages in memory."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from benchmarks.peers.feed import RECORD, UPDATE, Feed, wait_for_the_end
from benchmarks.shared.database import AMOUNT, INSERT_MANY, SCHEMA

Delivery = tuple[str, int]
Apply = Callable[[Sequence[Delivery]], None]


@contextmanager
def by_psycopg(feed: Feed) -> Iterator[Apply]:
    """Yield what applies deliveries: singly, each in a transaction, or together, ids and accounts in order."""
    with psycopg.connect(feed.url) as connection:

        def single(deliveries: Sequence[Delivery]) -> None:
            for message_id, account in deliveries:
                with connection.transaction():
                    if connection.execute(RECORD, (message_id,)).rowcount:
                        connection.execute(UPDATE, (account,))

        def tens(deliveries: Sequence[Delivery]) -> None:
            given = dict(deliveries)
            with connection.transaction(), connection.cursor() as cursor:
                first = cursor.execute(INSERT_MANY.encode(), (sorted(given),)).fetchall()
                accounts = sorted(given[message_id] for (message_id,) in first)
                cursor.executemany(UPDATE, [(account,) for account in accounts])

        yield tens if feed.variant == "tens" else single


@contextmanager
def by_session(feed: Feed) -> Iterator[Apply]:
    """Yield what applies deliveries, each in a session's transaction."""
    engine = create_engine(feed.url.replace("postgresql://", "postgresql+psycopg://"), pool_size=1)
    record = text(
        f"INSERT INTO {SCHEMA}.processed_message (subscriber_id, message_id) VALUES ('benchmark', :id) "
        "ON CONFLICT DO NOTHING RETURNING message_id"
    )
    update = text(f"UPDATE {SCHEMA}.account SET balance = balance + :amount WHERE account_id = :account")

    def apply(deliveries: Sequence[Delivery]) -> None:
        for message_id, account in deliveries:
            with Session(engine) as session, session.begin():
                if session.execute(record, {"id": message_id}).first():
                    session.execute(update, {"amount": AMOUNT, "account": account})

    yield apply


def main() -> None:
    """Let each thread take tens of deliveries until there are none."""
    feed = Feed()
    begun, lock = threading.Event(), threading.Lock()
    tens = iter([feed.deliveries[start : start + 10] for start in range(0, len(feed.deliveries), 10)])

    def loop() -> None:
        with (by_session if feed.variant == "session" else by_psycopg)(feed) as apply:
            begun.wait()
            while True:
                with lock:
                    deliveries = next(tens, None)
                if deliveries is None:
                    return
                apply(deliveries)
                feed.count(len(deliveries))

    for _ in range(feed.connections):
        threading.Thread(target=loop, daemon=True).start()
    package = "sqlalchemy" if feed.variant == "session" else "psycopg"
    feed.begin(package, f"{feed.connections} threads, messages in memory")
    begun.set()
    wait_for_the_end()


if __name__ == "__main__":
    main()
