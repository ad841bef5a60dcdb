"""A rotating inbox: what is recorded once is a duplicate in every later generation, whatever comes between."""

import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from integration.txbox.maintenance.conftest import letter
from support.postgres.statements import run
from support.postgres.tables import make_tables
from support.txbox.horizon import id_of
from support.waiting import wait_until
from txbox import DeadLetters, Expired, Inbox, InvalidConfiguration
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.maintenance.rotation.generations import MOST_GENERATIONS
from txbox.postgres.sqlstates import sqlstate
from txbox.schema import tables

PLACES = [(None, ""), ('Odd "a"-%', "Odd'%_")]
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture
def generations(engine: Engine) -> Generations:
    assert InboxConversion(engine).forward()
    return Generations(engine)


@pytest.fixture
def inbox(generations: Generations) -> Inbox:
    return Inbox("billing")


def record(engine: Engine, inbox: Inbox, *ids: str) -> set[str]:
    with engine.begin() as connection:
        return inbox.record_many(connection, ids)


def set_horizon(engine: Engine, subscriber_id: str, expression: str = "now() + interval '1 hour'") -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES (%s, {expression}) "
            "ON CONFLICT (subscriber_id) DO UPDATE SET horizon = excluded.horizon",
            (subscriber_id,),
        )


def rows(engine: Engine) -> list[tuple[str, int]]:
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT message_id, generation FROM processed_message ORDER BY 1, 2")
        return [(row[0], row[1]) for row in found]


def rows_of_one_table(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT to_regclass('processed_message_g1')").scalar_one() is None
        return list(connection.exec_driver_sql("SELECT message_id FROM processed_message ORDER BY 1").scalars())


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_an_id_is_a_duplicate_in_every_later_generation(fresh_engine: Engine, schema: str | None, prefix: str) -> None:
    place = {"schema": schema, "prefix": prefix}
    make_tables(fresh_engine, schema, prefix)
    inbox = Inbox("billing", fingerprint=True, **place)
    with fresh_engine.begin() as connection:
        assert inbox.record(connection, "before", b"body")
    generations = Generations(fresh_engine, **place)
    assert not generations.rotating()
    assert generations.list() == []
    assert InboxConversion(fresh_engine, **place).forward()
    assert generations.rotating()
    for number in (1, 2, 3):
        with fresh_engine.begin() as connection:
            assert inbox.record(connection, f"one-{number}", b"body")
            assert inbox.record_many(connection, {f"many-{number}": b"body", "before": b"body"}) == {f"many-{number}"}
        assert generations.rotate()
    again = {f"{kind}-{number}": b"body" for kind in ("one", "many") for number in (1, 2, 3)}
    with fresh_engine.begin() as connection:
        assert inbox.record_many(connection, again) == set()
        assert not any(inbox.record(connection, message_id, b"body") for message_id in again)
        assert inbox.sort_out(connection, {"many-1": b"other"}).mismatched == {"many-1"}
    with fresh_engine.connect() as connection:
        assert len(connection.execute(tables(schema, prefix).processed_message.select()).all()) == 7
    listed = generations.list()
    assert [one.generation for one in listed] == [1, 2, 3, 4]
    assert [one.closed_at is None for one in listed] == [False, False, False, True]
    assert all(one.bytes > 0 for one in listed)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("many", [False, True])
def test_a_snapshot_from_before_a_rotation_lets_no_id_in_twice(
    engine: Engine, generations: Generations, inbox: Inbox, level: str, many: bool
) -> None:
    with engine.connect() as connection:
        connection.execution_options(isolation_level=level)
        with connection.begin():
            connection.exec_driver_sql("SELECT FROM dead_letter")  # here is its snapshot
            assert record(engine, inbox, "m-1") == {"m-1"}
            assert generations.rotate()
            if level == "READ COMMITTED":
                assert inbox.record_many(connection, ["m-1"]) == set()
            else:
                with pytest.raises(DBAPIError) as raised:
                    inbox.record_many(connection, ["m-1"]) if many else inbox.record(connection, "m-1")
                assert sqlstate(raised.value) == "40001"
    with engine.connect() as connection:  # run again
        connection.execution_options(isolation_level=level)
        with connection.begin():
            assert inbox.record_many(connection, ["m-1", "m-2"]) == {"m-2"}
    assert rows(engine) == [("m-1", 1), ("m-2", 2)]


def test_a_rotation_waits_for_who_records_and_gives_way(engine: Engine, generations: Generations, inbox: Inbox) -> None:
    with engine.begin() as connection:
        assert inbox.record(connection, "m-1")
        assert generations.rotate(tries=2) is False
        assert len(generations.list()) == 1
        rotated = threading.Thread(target=generations.rotate, daemon=True)
        rotated.start()
        # It waits, again and again; others do not wait behind it for long.
        waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
        wait_until(lambda: connection.exec_driver_sql(waits).all() != [])
        assert record(engine, inbox, "m-2") == {"m-2"}
    rotated.join(30)
    assert record(engine, inbox, "m-1", "m-2", "m-3") == {"m-3"}
    assert rows(engine) == [("m-1", 1), ("m-2", 1), ("m-3", 2)]


@pytest.mark.parametrize("subscriber_id", ["billing", "a new one"])
def test_recording_over_generations_is_not_planned_each_time(
    engine: Engine, generations: Generations, subscriber_id: str
) -> None:
    inbox = Inbox(subscriber_id)
    for generation in (1, 2):
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO processed_message (subscriber_id, message_id) "
                "SELECT 'billing', %s || to_char(number, 'FM' || repeat('0', 34)) "
                "FROM generate_series(1, 20000) AS number",
                (f"m-{generation}",),
            )
        assert generations.rotate()
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("VACUUM ANALYZE processed_message")
    for batch in (1, 2, 10, 100):
        engine.dispose()  # plans are a connection's
        with engine.connect() as connection:
            for turn in range(30):
                ids = [f"m-3{batch:03}{turn:014}{number:017}" for number in range(batch)]
                if batch == 1:
                    inbox.record(connection, ids[0])
                else:
                    inbox.record_many(connection, ids)
                connection.commit()
            plans = connection.exec_driver_sql(
                "SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE '%%earlier%%'"
            ).all()
        assert [generic > custom for generic, custom in plans] == [True], (batch, plans)


def test_a_new_generation_is_stored_as_the_one_before(engine: Engine, generations: Generations) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "ALTER TABLE processed_message_g1 SET (autovacuum_vacuum_insert_scale_factor = 0.05, fillfactor = 70)"
        )
        connection.exec_driver_sql("ALTER INDEX processed_message_g1_pkey SET (fillfactor = 95)")
    assert generations.rotate()
    assert generations.rotate()
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT oid::regclass::text, reloptions FROM pg_class "
            "WHERE oid IN ('processed_message_g3'::regclass, 'processed_message_g3_pkey'::regclass)"
        ).all()
    assert dict(map(tuple, found)) == {
        "processed_message_g3": ["autovacuum_vacuum_insert_scale_factor=0.05", "fillfactor=70"],
        "processed_message_g3_pkey": ["fillfactor=95"],
    }


@pytest.fixture
def tablespace(engine: Engine) -> Iterator[str]:
    """A tablespace of the server, inside its own directory."""
    name = f"txbox_test_{uuid.uuid4().hex}"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        able = "SELECT rolsuper AND current_setting('server_version_num')::int >= 150000 FROM pg_roles"
        if not connection.exec_driver_sql(f"{able} WHERE rolname = current_user").scalar():
            pytest.skip("a tablespace inside the server's directory needs a superuser and PostgreSQL 15")
        connection.exec_driver_sql("SET allow_in_place_tablespaces = on")
        connection.exec_driver_sql(f"CREATE TABLESPACE {name} LOCATION ''")
        yield name
        connection.exec_driver_sql("DROP TABLE processed_message CASCADE")
        connection.exec_driver_sql(f"DROP TABLESPACE {name}")


def test_a_new_generation_is_in_the_tablespaces_of_the_one_before(
    engine: Engine, generations: Generations, tablespace: str
) -> None:
    def stored_in(generation: int) -> dict[str, str]:
        with engine.connect() as connection:
            names = f"processed_message_g{generation}", f"processed_message_g{generation}_pkey"
            rows = connection.exec_driver_sql(
                "SELECT relname, coalesce(spcname, 'the usual one') FROM pg_class LEFT JOIN pg_tablespace AS its "
                "ON its.oid = reltablespace WHERE pg_class.oid = ANY(%s::regclass[]) ORDER BY relkind = 'i'",
                (list(names),),
            )
            return dict(zip(("table", "key"), rows.scalars("coalesce"), strict=True))

    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE processed_message_g1 SET TABLESPACE {tablespace}")
    assert generations.rotate()
    assert stored_in(2) == {"table": tablespace, "key": "the usual one"}
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE processed_message_g2 SET TABLESPACE pg_default")
        connection.exec_driver_sql(f"ALTER INDEX processed_message_g2_pkey SET TABLESPACE {tablespace}")
    assert generations.rotate()
    assert stored_in(3) == {"table": "the usual one", "key": tablespace}


def test_too_many_generations_are_not_opened(
    engine: Engine, generations: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    while len(generations.list()) < MOST_GENERATIONS:
        assert generations.rotate()
    assert generations.rotate() is False
    assert len(generations.list()) == MOST_GENERATIONS
    assert "has 24 generations" in caplog.text
    set_horizon(engine, "billing")
    assert generations.forget(settled=generations.settle(seconds=60)) == tuple(range(1, MOST_GENERATIONS))
    assert generations.rotate()


def test_one_table_is_not_rotated(engine: Engine) -> None:
    with pytest.raises(DBAPIError, match="does not rotate"):
        Generations(engine).rotate()
    assert Generations(engine).forget(settled={}) == ()


def test_a_generation_is_forgotten_when_all_its_subscribers_are_past_it(
    engine: Engine, generations: Generations, inbox: Inbox
) -> None:
    record(engine, inbox, "m-1")
    record(engine, Inbox("shipping"), "m-1")
    assert generations.rotate()
    record(engine, inbox, "m-2")
    set_horizon(engine, "billing")
    assert generations.forget(settled=generations.settle(seconds=60)) == (), "shipping has no horizon"
    set_horizon(engine, "shipping", "now() - interval '1 hour'")
    assert generations.forget(settled=generations.settle(seconds=60)) == (), "its horizon is older than the generation"
    set_horizon(engine, "shipping", "now() + interval '1 minute'")
    assert generations.forget(settled=generations.settle(seconds=60)) == (), "clocks may differ by more"
    assert generations.forget(settled=generations.settle(seconds=60), slack=timedelta(seconds=10)) == (1,)
    assert rows(engine) == [("m-2", 2)]
    assert generations.forget(settled=generations.settle(seconds=60)) == (), "the current one is never forgotten"
    assert record(engine, inbox, "m-1", "m-2") == {"m-1"}


def test_files_are_removed_when_nobody_waits_also_if_that_was_cut_off(
    engine: Engine, generations: Generations, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(engine, inbox, "m-1")
    assert generations.rotate()
    set_horizon(engine, "billing")
    with monkeypatch.context() as cut_off:
        cut_off.setattr(Generations, "drop_detached", lambda *_, **__: ())
        assert generations.forget(settled=generations.settle(seconds=60), slack=timedelta()) == ()
    assert [one.generation for one in generations.list()] == [2]
    with engine.connect() as reader:
        assert reader.exec_driver_sql("SELECT count(*) FROM processed_message_g1").scalar_one() == 1
        assert generations.forget(settled={}, tries=1) == ()
        assert record(engine, inbox, "m-1") == {"m-1"}
        assert not InboxConversion(engine).back(tries=1)
        assert generations.rotating()
    assert InboxConversion(engine).back()
    assert rows_of_one_table(engine) == ["m-1"]
    assert InboxConversion(engine).forward()
    assert generations.rotate()


def test_what_is_parked_goes_along_and_is_redriven_once(engine: Engine, generations: Generations, inbox: Inbox) -> None:
    letters = DeadLetters(engine)
    waiting, discarded, redriven = (letters.park(letter(name)) or 0 for name in ("waiting", "discarded", "redriven"))
    letters.discard(discarded, note="why")
    letters.redrive(redriven, lambda _: None)
    record(engine, inbox, "processed")
    assert generations.rotate()
    assert letters.park(letter("waiting")) == waiting, "it is parked once"
    assert letters.park(letter("processed")) is None
    set_horizon(engine, "billing", "now() - interval '1 hour'")
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE inbox_generation SET closed_at = now() - interval '3 hours' WHERE generation = 1"
        )
    assert generations.forget(settled=generations.settle(seconds=60)) == (1,)
    assert rows(engine) == [("discarded", 2), ("waiting", 2)]
    assert record(engine, inbox, "waiting", "discarded") == set()
    letters.redrive(waiting, lambda _: None)
    assert record(engine, inbox, "waiting") == {"waiting"}


def test_a_letter_that_is_being_redriven_is_not_moved(engine: Engine, generations: Generations, inbox: Inbox) -> None:
    letters = DeadLetters(engine)
    number = letters.park(letter("m-1")) or 0
    assert generations.rotate()
    set_horizon(engine, "billing")
    settled = generations.settle(seconds=60)
    with engine.begin() as connection:
        letters.redrive_in(connection, number, lambda *_: None)
        assert generations.move_parked(1) == 0
        assert generations.forget(settled=settled, tries=1) == ()
    assert generations.forget(settled=generations.settle(seconds=60)) == (1,)
    assert record(engine, inbox, "m-1") == {"m-1"}
    assert record(engine, inbox, "m-1") == set()


def test_transactions_that_run_are_waited_for_and_younger_ones_are_not(
    engine: Engine, generations: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    set_horizon(engine, "billing")
    older = engine.connect()
    first = older.begin()
    pid = older.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    assert generations.settle(seconds=0.3) == {}
    assert f"server processes {pid}" in caplog.text
    ended: list[Mapping[str, float]] = []
    began = threading.Event()

    def note(seconds: float) -> None:
        began.set()
        time.sleep(seconds)

    waiter = threading.Thread(target=lambda: ended.append(Generations(engine, wait=note).settle(seconds=60)))
    waiter.start()
    assert began.wait(30)
    with engine.begin() as younger:
        younger.exec_driver_sql("SELECT 1")
        first.rollback()
        older.close()
        wait_until(lambda: bool(ended), "it ends while a younger one runs")
    waiter.join()
    assert [*ended[0]] == ["billing"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("moves", ["during the wait", "after the wait"])
def test_a_horizon_that_a_running_transaction_may_not_see_forgets_nothing(
    engine: Engine, generations: Generations, inbox: Inbox, level: str, moves: str
) -> None:
    """A worker begins, and then a maintainer moves the horizon, while somebody else waits for what ran before."""
    old = id_of(datetime.now(UTC) - timedelta(hours=3))
    record(engine, inbox, old)
    assert generations.rotate()
    run(engine, "UPDATE inbox_generation SET closed_at = now() - interval '2 hours' WHERE generation = 1")
    set_horizon(engine, "billing", "now() - interval '10 days'")
    with engine.connect().execution_options(isolation_level=level) as worker, engine.connect() as earlier:
        earlier.begin()
        earlier.exec_driver_sql("SELECT 1")

        def move() -> None:
            worker.exec_driver_sql("SELECT FROM inbox_horizon")  # here is its snapshot
            set_horizon(engine, "billing", "now() - interval '1 hour'")

        def let_go(_seconds: float) -> None:
            if moves == "during the wait":
                move()
            earlier.rollback()

        settled = Generations(engine, wait=let_go).settle(seconds=60)
        if moves == "after the wait":
            move()
        assert generations.forget(settled=settled, slack=timedelta()) == ()
        assert not inbox.record(worker, old), "it is a duplicate still"
        worker.commit()
    assert generations.forget(settled=generations.settle(seconds=60), slack=timedelta()) == (1,)
    with engine.begin() as connection, pytest.raises(Expired):
        inbox.record(connection, old)


def test_horizons_that_nobody_has_settled_are_refused(generations: Generations) -> None:
    settled: Any = None
    with pytest.raises(InvalidConfiguration, match=r"what Generations\.settle returned, not None"):
        generations.forget(settled=settled)
