"""Nothing is lost through transactions that commit in another order than they insert; PEERS know what that costs.

A relay that remembered the highest position it has seen would never send what commits below it.
"""

import random
import threading

import pytest
from sqlalchemy import Connection, Engine

from integration.txbox.conftest import Left, StartRelay
from support.txbox.outbox import OUTBOX, OWN
from support.txbox.publishers import RecordingPublisher, first_arrivals
from support.waiting import wait_until
from txbox.relay.poller import MAX_FRESH, MessageFinder
from txbox.relay.sender import RelayStatements

pytestmark = pytest.mark.usefixtures("all_polls")


def positions(connection: Connection) -> list[int]:
    return list(connection.exec_driver_sql("SELECT position FROM outbox_message ORDER BY 1").scalars())


@pytest.mark.parametrize("idle", [False, True], ids=["between two looks", "long after"])
def test_what_commits_late_is_sent_though_later_positions_were(
    engine: Engine, start_relay: StartRelay, idle: bool
) -> None:
    broker = RecordingPublisher()
    start_relay(broker)
    with engine.begin() as late:
        OUTBOX.publish(late, OWN, "late", key="a")
        with engine.begin() as early:
            OUTBOX.publish(early, OWN, "early", key="a")
        broker.wait_for(1)
        if idle:  # many looks later: the transaction is still listed in each snapshot
            with engine.begin() as other:
                OUTBOX.publish(other, OWN, "another", key="b")
            broker.wait_for(2)
    broker.wait_for(3 if idle else 2)
    assert broker.bodies[-1] == "late"


def test_a_look_finds_exactly_what_has_become_visible(engine: Engine) -> None:
    with engine.connect() as looking, engine.connect() as first, engine.connect() as second:
        finder = MessageFinder(looking, RelayStatements.load())
        assert finder.find().fresh == {}
        OUTBOX.publish(first, OWN, "1", key="a")
        OUTBOX.publish(second, OWN, "2", key="a")
        assert finder.find().fresh == {}
        second.commit()
        [(lane, second_position)] = finder.find().fresh.items()
        assert finder.find().fresh == {}, "each message is found once"
        first.commit()
        found = finder.find().fresh
        assert list(found) == [lane]
        assert found[lane] < second_position
        assert finder.find().fresh == {}


def test_a_prepared_transaction_is_found_when_it_is_committed(engine: Engine) -> None:
    with engine.connect() as looking, engine.connect() as writing:
        if looking.exec_driver_sql("SHOW max_prepared_transactions").scalar_one() == "0":
            pytest.skip("TXBOX_TEST_DATABASE_URL names a server that has max_prepared_transactions = 0")
        looking.rollback()
        finder = MessageFinder(looking, RelayStatements.load())
        finder.find()
        OUTBOX.publish(writing, OWN, "1")
        writing.exec_driver_sql("PREPARE TRANSACTION 'outbox'")
        writing.commit()  # nothing is open any more; SQLAlchemy is told so
        assert not finder.find()
        writing.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("COMMIT PREPARED 'outbox'")
        assert finder.find().fresh


def test_of_a_burst_that_is_too_large_the_first_of_each_lane_is_found(engine: Engine) -> None:
    """By transactions, a part of a burst would show a later message of a key before an earlier one."""
    with engine.connect() as looking, engine.connect() as older, engine.connect() as younger:
        finder = MessageFinder(looking, RelayStatements.load())
        finder.find()
        older.exec_driver_sql("SELECT pg_current_xact_id()")  # its number is the lower one
        OUTBOX.publish(younger, OWN, "first", key="a")
        younger.commit()
        OUTBOX.publish(older, OWN, "second", key="a")
        insert = (
            "INSERT INTO outbox_message (lane, message_id, destination, headers, body) "
            "SELECT 7, number, 'own:somewhere', '{}', '' FROM generate_series(1, %s) AS number"
        )
        older.exec_driver_sql(insert, (MAX_FRESH,))
        older.commit()
        first = positions(looking)[0]
        found = finder.find().fresh
        assert first in found.values()
        assert len(found) == 2


def test_interleaved_writers_of_random_lengths_lose_nothing_and_keep_the_order_that_their_locks_made(
    engine: Engine, start_relay: StartRelay
) -> None:
    """A key is a row that writers lock before they publish, so there is an order to keep; commits come as they may."""
    keys, writers, rounds = 6, 8, 40
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE counter (key int PRIMARY KEY, value int NOT NULL)")
        connection.exec_driver_sql(f"INSERT INTO counter SELECT key, 0 FROM generate_series(1, {keys}) AS key")
    broker = RecordingPublisher()
    relays = [start_relay(broker, batch_size=5) for _ in range(2)]
    assert all(relay.running for relay in relays)
    errors: list[BaseException] = []

    def write(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(rounds):
                with engine.connect() as connection, connection.begin() as transaction:
                    for key in sorted(chance.sample(range(1, keys + 1), chance.randint(1, 3))):
                        value = connection.exec_driver_sql(
                            "UPDATE counter SET value = value + 1 WHERE key = %s RETURNING value", (key,)
                        ).scalar_one()
                        OUTBOX.publish(connection, OWN, str(value), key=str(key))
                        connection.exec_driver_sql("SELECT pg_sleep(%s)", (chance.random() * 0.004,))
                    if chance.random() < 0.2:
                        transaction.rollback()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    with engine.connect() as connection:
        counters = connection.exec_driver_sql("SELECT key, value FROM counter").all()
    expected = {str(key): [str(value) for value in range(1, last + 1)] for key, last in counters}
    broker.wait_for(sum(map(len, expected.values())))
    assert first_arrivals(broker.received) == expected


def test_a_dump_that_is_restored_elsewhere_is_sent_whole(engine: Engine, start_relay: StartRelay, left: Left) -> None:
    """Restored rows bear the numbers of another server's transactions: higher ones than this server has, or lower."""
    insert = (
        "INSERT INTO outbox_message (lane, transaction_id, message_id, destination, key, headers, body) "
        "VALUES (%s, %s, %s, 'own:somewhere', 'a', '{}', %s)"
    )
    with engine.begin() as connection:
        for number, transaction in enumerate((2**60, 5, 2**40)):
            connection.exec_driver_sql(insert, (9, transaction, f"m-{number}", str(number).encode()))
    broker = RecordingPublisher()
    start_relay(broker)
    broker.wait_for(3)
    assert broker.bodies == ["0", "1", "2"]
    with engine.begin() as connection:
        OUTBOX.publish(connection, OWN, "new", key="a")
    broker.wait_for(4)
    wait_until(lambda: left() == [], "an empty outbox")
