"""Behind a pooler in transaction mode: no state of a session may be counted on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from integration.txbox.conftest import BOTH_KINDS, StartRelay
from support.postgres.pgbouncer import pgbouncer
from support.postgres.tables import make_tables
from support.postgres.transaction_pooler import TransactionPooler, transaction_pooler
from support.txbox import relay_process
from support.txbox.outbox import OUTBOX, OWN
from support.txbox.publishers import RecordingPublisher, first_arrivals
from support.waiting import wait_until
from txbox import Outgoing
from txbox.outbox.status import read_outbox_status


@pytest.fixture
def pooled(make_database: Callable[..., str]) -> Iterator[tuple[TransactionPooler, Engine]]:
    url = make_database()
    with transaction_pooler(url, size=6) as (pooler, pooled_url):
        # Prepared statements are a session's too; psycopg's documentation says to leave them out behind PgBouncer.
        engine = create_engine(pooled_url, pool_size=20, connect_args={"prepare_threshold": None})
        make_tables(engine)
        yield pooler, engine
        engine.dispose()


def server(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())


def test_the_pooler_of_these_tests_changes_servers_between_transactions(
    pooled: tuple[TransactionPooler, Engine],
) -> None:
    _, engine = pooled
    assert len({server(engine) for _ in range(6)}) == 6


@BOTH_KINDS
def test_messages_are_sent_in_order_through_a_pooler(
    pooled: tuple[TransactionPooler, Engine], start_relay: StartRelay, caplog: pytest.LogCaptureFixture
) -> None:
    pooler, engine = pooled
    broker = RecordingPublisher(lambda message: "later" if message.body == b"7" and message.attempts < 2 else None)
    relays = [start_relay(broker, engine=engine, senders=2) for _ in range(2)]
    expected: dict[str | None, list[str]] = {}
    for number in range(200):
        key = f"k{number % 7}"
        expected.setdefault(key, []).append(str(number))
        with engine.begin() as connection:
            OUTBOX.publish(connection, OWN, str(number), key=key)
    broker.wait_for(200)
    assert first_arrivals(broker.received) == expected
    with engine.connect() as connection:
        reported = connection.exec_driver_sql("SELECT backend_pid FROM outbox_relay").all()
        assert reported == [(None,), (None,)], "a pooler's servers tell nothing of a relay"
    assert [line.stale for line in read_outbox_status(engine).relays] == [False, False]
    for relay in relays:
        assert relay.stop()
    assert claims(engine) == 0
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one() == 0
        assert connection.exec_driver_sql("SHOW enable_seqscan").scalar_one() == "on"
        assert connection.exec_driver_sql("SELECT count(*) FROM pg_listening_channels()").scalar_one() == 0
    assert pooler.transactions > 220


def test_an_idle_relay_looks_for_itself(
    pooled: tuple[TransactionPooler, Engine], start_relay: StartRelay, caplog: pytest.LogCaptureFixture
) -> None:
    _, engine = pooled
    caplog.set_level("INFO", logger="txbox")
    broker = RecordingPublisher()
    start_relay(broker, engine=engine)
    wait_until(lambda: "a pooler is between" in caplog.text, "a word about the pooler")
    with engine.begin() as connection:
        OUTBOX.publish_many(connection, [Outgoing(OWN, "one")])
    broker.wait_for(1)


@pytest.mark.containers
def test_a_relay_that_is_killed_behind_pgbouncer_leaves_no_claim_to_the_next_client(
    make_database: Callable[..., str], tmp_path: Path
) -> None:
    """An async sender's claims are locks of a session: PgBouncer has to end it with the client, in its transaction."""
    url = make_database()
    direct = create_engine(url)
    make_tables(direct)
    with pgbouncer(url, size=3) as through:
        with direct.begin() as connection:
            OUTBOX.publish(connection, "own:file", "one", key="a")
        killed = relay_process.start(through, tmp_path / "broker", kind="async", pause=60.0)
        try:
            wait_until(lambda: claims(direct) == 1, "the message is claimed")
        finally:
            killed.kill()
            killed.wait(20)
        wait_until(lambda: claims(direct) == 0, "the claim is gone")
    direct.dispose()


def claims(engine: Engine) -> int:
    with engine.connect() as connection:
        counting = (
            "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
            "WHERE locktype = 'advisory' AND datname = current_database()"
        )
        return int(connection.exec_driver_sql(counting).scalar_one())
