"""Trouble that nobody planned for: restored rows, and a database that can only be read."""

import json
import random
import re
import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.event import listen

from integration.txbox.conftest import Left, StartRelay
from support.postgres.roles import restricted
from support.postgres.statements import run
from support.postgres.tables import make_tables
from support.txbox.outbox import OWN, held, publish
from support.txbox.publishers import RecordingPublisher, first_arrivals
from support.waiting import wait_until
from txbox import Outbox, Outgoing
from txbox.errors import RightsMissing, SchemaMissing
from txbox.instrumentation import DatabaseLost, Event
from txbox.operations.pauses import pause
from txbox.outbox.status import read_outbox_status
from txbox.relay import Relay, poller, reporter
from txbox.relay.poller import MessageFinder, OutboxPoller, Snapshot
from txbox.relay.sender import RelayStatements
from txbox.schema import tables

RESTORE = (
    "INSERT INTO outbox_message (lane, transaction_id, message_id, destination, headers, body) "
    "VALUES (9, %s, %s, 'own:somewhere', '{}', %s)"
)


# --- where no look would find a message ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [5, 2**60], ids=["of an older server", "of a server that has gone further"])
def test_rows_that_are_restored_while_a_relay_runs_are_sent(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(poller, "EVERYTHING_SECONDS", 0.2)
    monkeypatch.setattr(poller, "EVERYTHING_SHARE", 1.0)
    broker = RecordingPublisher()
    start_relay(broker)
    publish(engine, Outgoing(OWN, "before"))
    broker.wait_for(1)
    run(engine, RESTORE, (number, "m-1", b"restored"))
    broker.wait_for(2)


def test_a_server_whose_numbers_are_lower_is_looked_at_from_the_start(engine: Engine) -> None:
    """Behind a pooler, the connection outlives a failover, and the new server has not got as far as the old one."""
    with engine.connect() as connection:
        finder = MessageFinder(connection, RelayStatements.load())
        finder.find()
        publish(engine, Outgoing(OWN, "before the relay looks at the new server"))
        finder._last = Snapshot(2**40, ())
        assert not finder.find()
        assert finder.find().fresh


def test_another_run_of_a_server_is_looked_at_from_the_start_and_nothing_is_sent_by_what_was_seen_before(
    engine: Engine, start_relay: StartRelay
) -> None:
    with engine.connect() as connection:
        finder = MessageFinder(connection, RelayStatements.load())
        assert finder.find().everything
        publish(engine, Outgoing(OWN, "one"))
        assert finder.find().fresh
        assert not finder.find()
        finder._server = "as it was before a crash"
        found = finder.find()
        assert found.everything
        assert found.fresh
    heard: list[Event] = []
    broker = RecordingPublisher()
    relay = start_relay(broker, hooks=[heard.append])
    broker.wait_for(1)
    relay._scheduler._server = "as it was before a crash"
    publish(engine, Outgoing(OWN, "two"))
    broker.wait_for(2)
    assert "restarted or replaced" in str(next(event.error for event in heard if isinstance(event, DatabaseLost)))


def test_a_refusal_is_settled_durably_whatever_the_default_is(engine: Engine) -> None:
    sql = RelayStatements.load()
    for default, settled in (("off", "on"), ("local", "local"), ("on", "on")):
        options = f"{engine.url.query['options']} -csynchronous_commit={default}"
        made = create_engine(engine.url.update_query_dict({"options": options}))
        with made.connect() as connection:
            connection.exec_driver_sql(sql.claim, {"idle_timeout_milliseconds": "1000", "lanes": [7]})
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar_one() == "off"
            connection.exec_driver_sql(sql.wait_for_disk)
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar_one() == settled
        made.dispose()


def test_rows_with_numbers_that_this_server_has_not_reached_are_not_found_at_every_look(engine: Engine) -> None:
    with engine.connect() as connection:
        finder = MessageFinder(connection, RelayStatements.load())
        finder.find()
        run(engine, RESTORE, (2**60, "m-1", b"restored"))
        assert not finder.find()


def test_what_an_open_transaction_has_written_is_not_read_at_every_look(engine: Engine) -> None:
    insert = (
        "INSERT INTO outbox_message (lane, message_id, destination, headers, body) "
        "SELECT 7, number, 'own:somewhere', '{}', '' FROM generate_series(1, 20000) AS number"
    )
    with engine.connect() as writing, engine.connect() as reading:
        writing.exec_driver_sql(insert)
        # Another one ends, or the snapshot ends before the one that writes, which then is not known to be in progress.
        run(engine, "SELECT pg_current_xact_id()")
        finder = MessageFinder(reading, RelayStatements.load())
        finder.find()
        assert finder._last is not None
        assert finder._last.in_progress
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {RelayStatements.load().find_new}"
        parameters = {
            "xmax": finder._last.xmax,
            "in_progress": list(finder._last.in_progress),
            "limit": 10_000,
            "also_due": True,
            "low": 0,
            "high": 2**63 - 1,
        }
        plan = reading.exec_driver_sql(explain, parameters).scalar_one()[0]["Plan"]
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 100, json.dumps(plan, indent=1)
        writing.commit()
        assert finder.find().fresh


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("analyzed", [False, True], ids=["", "with statistics"])
def test_overdue_messages_are_sent_in_the_order_of_their_times(
    engine: Engine, start_relay: StartRelay, analyzed: bool
) -> None:
    chance = random.Random(7)
    numbers = list(range(6_000))
    chance.shuffle(numbers)
    insert = (
        "INSERT INTO outbox_message (lane, message_id, destination, key, headers, body, due_at) "
        "SELECT 64 + mod(number, 20), number, 'own:somewhere', 'k' || mod(number, 20), '{}', number::text::bytea, "
        "now() - interval '1 hour' + number * interval '1 second' / 10 FROM unnest(%s::int[]) AS number"
    )
    run(engine, insert, (numbers,))
    if analyzed:
        run(engine, "ANALYZE outbox_message")
    broker = RecordingPublisher()
    for _ in range(3):
        start_relay(broker)
    broker.wait_for(len(numbers))
    expected = {f"k{key}": [str(number) for number in range(key, len(numbers), 20)] for key in range(20)}
    assert first_arrivals(broker.received) == expected


def test_a_key_whose_failed_message_was_deleted_by_hand_is_not_overtaken(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    broker = RecordingPublisher(lambda message: "no" if message.body == b"bad" else None)
    publish(engine, Outgoing(OWN, "bad", key="a"), Outgoing(OWN, "1", key="a"))
    relay = start_relay(broker, max_attempts=None)
    wait_until(lambda: broker.refused, "a refusal")
    wait_until(lambda: held(engine) == 2, "both are held")
    run(engine, "DELETE FROM outbox_message WHERE body = 'bad'")
    publish(engine, Outgoing(OWN, "2", key="a"), Outgoing(OWN, "other", key="b"))
    broker.wait_for(1)
    wait_until(lambda: held(engine) == 2, "the later one waits too")
    assert broker.bodies == ["other"]
    wait_until(lambda: left() == ["1", "2"], "everything else settled")
    relay.stop()
    relay.start()
    broker.wait_for(3)
    assert broker.bodies == ["other", "1", "2"]


# --- rows that somebody else has written -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("headers", f'{{"n": {"9" * 5_000}}}'),
        ("published_at", "infinity"),
        ("published_at", "-infinity"),
        ("due_at", "-infinity"),
    ],
)
def test_an_odd_row_holds_up_nothing(
    engine: Engine, start_relay: StartRelay, left: Left, column: str, value: str
) -> None:
    given = {"lane": 9, "message_id": "odd", "destination": OWN, "headers": "{}", "body": b"odd", column: value}
    columns, places = ", ".join(given), ", ".join(["%s"] * len(given))
    run(engine, f"INSERT INTO outbox_message ({columns}) VALUES ({places})", tuple(given.values()))
    broker = RecordingPublisher()
    publish(engine, *[Outgoing(OWN, str(number)) for number in range(100)])
    start_relay(broker)
    wait_until(lambda: left() == [], "an empty outbox")
    assert len({message.id for message in broker.received} - {"odd"}) == 100


# --- a database that cannot be written to ----------------------------------------------------------------------------


def test_nothing_is_sent_that_could_not_be_settled(fresh_engine: Engine, start_relay: StartRelay) -> None:
    engine, name = fresh_engine, fresh_engine.url.database
    make_tables(engine)
    broker, heard = RecordingPublisher(), list[Event]()
    relay = start_relay(broker, engine=engine, hooks=[heard.append])
    publish(engine, Outgoing(OWN, "one"))
    broker.wait_for(1)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
            (name,),
        )
        connection.exec_driver_sql("SET default_transaction_read_only = off")
        row = RESTORE.replace("9, %s", "9, pg_current_xact_id()::text::bigint")
        connection.exec_driver_sql(row, ("m-2", b"two"))
        wait_until(lambda: sum(isinstance(event, DatabaseLost) for event in heard) >= 3, "its complaints", timeout=60)
        assert len(broker.received) == 1
        connection.exec_driver_sql(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
            (name,),
        )
    broker.wait_for(2, timeout=60)
    relay.stop()


def test_a_sender_that_is_led_to_a_read_only_server_sends_nothing(engine: Engine, start_relay: StartRelay) -> None:
    """As a pooler may lead it there, while the relay's other connections are as they were."""
    misled = threading.Event()
    misled.set()

    def lead(connection: Any, _record: object, _proxy: object) -> None:
        read_only = misled.is_set() and re.fullmatch(r"txbox-relay-\d+", threading.current_thread().name)
        connection.execute(f"SET default_transaction_read_only = {'on' if read_only else 'off'}")
        connection.commit()

    listen(engine, "checkout", lead)
    broker, heard = RecordingPublisher(), list[Event]()
    start_relay(broker, engine=engine, hooks=[heard.append])
    publish(engine, Outgoing(OWN, "one"))
    wait_until(
        lambda: any("read-only" in str(lost.error) for lost in heard if isinstance(lost, DatabaseLost)), "a refusal"
    )
    assert broker.received == []
    misled.clear()
    broker.wait_for(1)


def test_a_relay_that_may_not_settle_does_not_start(engine: Engine) -> None:
    with (
        restricted(engine, "UPDATE, DELETE ON outbox_message") as limited,
        pytest.raises(RightsMissing, match=r"UPDATE, DELETE on outbox_message") as caught,
    ):
        Relay(limited, {"own": RecordingPublisher()}).start()
    assert caught.value.rights == "UPDATE, DELETE"


@pytest.mark.parametrize("table", ["outbox_message", "outbox_sent", "outbox_relay", "dead_letter"])
def test_every_table_that_it_will_need_is_looked_for(engine: Engine, table: str) -> None:
    run(engine, f"DROP TABLE {table}")
    with pytest.raises(SchemaMissing, match=rf"{table}.*txbox db upgrade"):
        Relay(engine, {"own": RecordingPublisher()}, keep_sent=timedelta(days=1)).start()


def test_a_message_that_is_kept_already_is_no_obstacle(engine: Engine, start_relay: StartRelay, left: Left) -> None:
    """Positions come again after a TRUNCATE … RESTART IDENTITY, and ids after a replay."""
    broker = RecordingPublisher()
    start_relay(broker, keep_sent=timedelta(hours=1))
    publish(engine, Outgoing(OWN, "one", message_id="m-1"))
    wait_until(lambda: broker.received and left() == [], "it is sent")
    run(engine, "TRUNCATE outbox_message RESTART IDENTITY")
    publish(engine, Outgoing(OWN, "one", message_id="m-1"))
    wait_until(lambda: len(broker.received) == 2 and left() == [], "and again")


def test_odd_names_of_schema_and_tables_are_no_obstacle(engine: Engine, start_relay: StartRelay) -> None:
    with engine.begin() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        tables(schema, "Odd'%_").metadata.create_all(connection)
    broker = RecordingPublisher(lambda message: "later" if message.attempts == 0 else None)
    start_relay(broker, schema=schema, prefix="Odd'%_", keep_sent=timedelta(hours=1))
    with engine.begin() as connection:
        Outbox(schema=schema, prefix="Odd'%_").publish(connection, OWN, "one", key="a", delay=0.01)
    broker.wait_for(1)


# --- a lock of another session on what only the status needs ---------------------------------------------------------


@pytest.mark.parametrize(
    ("lock", "level"),
    [
        ("SELECT FROM outbox_relay FOR UPDATE", "READ COMMITTED"),
        ("SELECT FROM outbox_relay FOR UPDATE", "SERIALIZABLE"),
        ("LOCK TABLE outbox_relay IN SHARE MODE", "READ COMMITTED"),
        ("LOCK TABLE outbox_relay, paused IN ACCESS EXCLUSIVE MODE", "SERIALIZABLE"),
    ],
)
def test_a_lock_on_reports_or_pauses_keeps_no_message_waiting_and_no_stop(
    engine: Engine, schema_url: str, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, lock: str, level: str
) -> None:
    for name in ("REPORT_SECONDS", "SOON_SECONDS"):
        monkeypatch.setattr(reporter, name, 0.05)
    monkeypatch.setattr(poller, "PAUSE_SECONDS", 0.05)
    options = f"{engine.url.query['options']} -cdefault_transaction_isolation={level.replace(' ', chr(92) + ' ')}"
    own = create_engine(engine.url.update_query_dict({"options": options}))
    broker = RecordingPublisher()
    relay = start_relay(broker, engine=own)
    wait_until(lambda: len(read_outbox_status(engine).relays) == 1)
    with engine.connect() as other:
        other.exec_driver_sql(lock)
        for number in range(10):
            publish(engine, Outgoing(OWN, str(number), key="k"))
            broker.wait_for(number + 1)
        assert relay.stop(20)
    assert broker.bodies == [str(number) for number in range(10)]
    relay.start()
    wait_until(lambda: [one.stale for one in read_outbox_status(engine).relays] == [False])
    assert relay.stop(20)
    own.dispose()


def test_a_relay_that_cannot_ask_what_is_paused_sends_nothing_before_it_can(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, left: Left
) -> None:
    heard: list[Event] = []
    broker = RecordingPublisher()
    pause(engine, destination=OWN, by="anna")
    publish(engine, Outgoing(OWN, "paused"), Outgoing("own:elsewhere", "other"))
    read = OutboxPoller._read_pauses
    locked = engine.connect()

    def lock_first(self: OutboxPoller, connection: Connection) -> None:
        if not heard and not locked.in_transaction():  # after the start has looked at the table
            locked.exec_driver_sql("LOCK TABLE paused IN ACCESS EXCLUSIVE MODE")
        read(self, connection)

    monkeypatch.setattr(OutboxPoller, "_read_pauses", lock_first)
    with locked:
        start_relay(broker, hooks=[heard.append])
        wait_until(lambda: sum(isinstance(event, DatabaseLost) for event in heard) >= 2)
        assert broker.received == []
    broker.wait_for(1)
    wait_until(lambda: left() == ["paused"], "the other one settled")
    assert broker.bodies == ["other"]
