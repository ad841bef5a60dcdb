"""A live inbox becomes a rotating one, and one table again: nothing is let in twice, nothing is lost."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.exc import DBAPIError

from integration.txbox.maintenance.conftest import found, letter
from support.postgres.statements import run
from support.waiting import wait_until
from txbox import DeadLetters, Inbox
from txbox.errors import InvalidConfiguration, SchemaMissing
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.maintenance.rotation.conversion import ConversionStatements
from txbox.postgres.server import estimate_rows
from txbox.postgres.sqlstates import is_retryable
from txbox.schema import tables
from txbox.status import read_status
from txbox_local import LocalPostgres


def ids(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.exec_driver_sql("SELECT message_id FROM processed_message ORDER BY 1").scalars())


def test_what_reads_the_whole_inbox_may_take_longer_than_its_role(engine: Engine, schema_url: str) -> None:
    run(engine, "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', 'm-1')")
    sql = ConversionStatements.load()
    run(engine, sql.add_generation)
    run(engine, sql.add_check)
    of_role = create_engine(f"{schema_url}%20-cstatement_timeout=1000")
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE query ~ 'VALIDATE' AND wait_event_type = 'Lock' "
        "AND clock_timestamp() - query_start > interval '1500 milliseconds'"
    )
    try:
        with ThreadPoolExecutor() as pool, engine.begin() as other:
            other.exec_driver_sql("LOCK TABLE processed_message IN SHARE UPDATE EXCLUSIVE MODE")
            turned = pool.submit(InboxConversion(of_role).forward)
            wait_until(lambda: turned.done() or found(engine, waiting), "it takes long")
            other.commit()
            assert turned.result(60)
    finally:
        of_role.dispose()


class Recorders:
    """Threads that record the same ids again and again, and count what they were told is first."""

    def __init__(self, engine: Engine, threads: int = 3) -> None:
        self.first: list[str] = []
        self.errors: list[DBAPIError] = []
        self._engine, self._stop = engine, threading.Event()
        levels = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
        self._threads = [threading.Thread(target=self._run, args=(n, levels[n % 3])) for n in range(threads)]

    def __enter__(self) -> "Recorders":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, level: str) -> None:
        inbox, step = Inbox("billing"), 0
        with self._engine.connect() as connection:
            connection.execution_options(isolation_level=level)
            while not self._stop.is_set():
                step += 1
                wanted = [f"m-{max(0, step - back):05}" for back in range(0, 40, 3)]
                try:
                    with connection.begin():
                        if step % 2:
                            first = inbox.record_many(connection, wanted)
                        else:
                            first = {wanted[0]} if inbox.record(connection, wanted[0]) else set()
                    self.first += first
                except DBAPIError as error:
                    if not is_retryable(error):
                        self.errors.append(error)
                        return


def test_workers_go_on_there_and_back(engine: Engine) -> None:
    generations = Generations(engine)
    said: list[str] = []
    conversion = InboxConversion(engine, say=said.append)
    with Recorders(engine) as recorders:
        for _ in range(2):
            for change in (conversion.forward, *[generations.rotate] * 3, conversion.back):
                enough = len(recorders.first) + 20
                wait_until(lambda enough=enough: len(recorders.first) >= enough or recorders.errors, "more is recorded")
                wait_until(change, "it found a moment", timeout=120)  # it gives up where each transaction is too long
    assert recorders.errors == []
    assert len(recorders.first) == len(set(recorders.first)) >= 200
    assert sorted(recorders.first) == ids(engine)
    assert any("rows of generation 1 moved" in step for step in said)
    assert generations.list() == []


STEPS = ["add_generation", "add_check", "validate_check", "make_rotating"]


@pytest.mark.parametrize("step", STEPS)
def test_what_was_interrupted_goes_on_or_back(engine: Engine, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox("billing")
    with engine.begin() as connection:
        inbox.record_many(connection, ["m-1", "m-2"])
    for forward in (False, True):
        broken = InboxConversion(engine)
        statements = type(broken._sql)(None, "")
        setattr(statements, step, "SELECT 1/0")
        monkeypatch.setattr(broken, "_sql", statements)
        with pytest.raises(Exception, match="division by zero"):
            broken.forward()
        with engine.begin() as connection:
            assert inbox.record_many(connection, ["m-1", "m-3"]) == (set() if forward else {"m-3"})
        conversion = InboxConversion(engine)
        assert conversion.forward() if forward else conversion.back()
        assert conversion.rotating() is forward
    with engine.begin() as connection:
        assert inbox.record_many(connection, ["m-1", "m-3", "m-4"]) == {"m-4"}
        columns = connection.exec_driver_sql("SELECT * FROM processed_message").keys()
        assert list(columns)[-1] == "generation"


def test_letters_come_back_with_their_rows_and_are_redriven_meanwhile(engine: Engine) -> None:
    letters, inbox = DeadLetters(engine), Inbox("billing")
    conversion, generations = InboxConversion(engine, wait=lambda _: True), Generations(engine)
    assert conversion.forward()
    number = letters.park(letter("parked")) or 0
    with engine.begin() as connection:
        inbox.record(connection, "processed")
        connection.exec_driver_sql(
            "INSERT INTO processed_message (subscriber_id, message_id, dead_letter_id) VALUES ('billing', 'orphan', 99)"
        )
    assert generations.rotate()
    with engine.begin() as connection:
        letters.redrive_in(connection, number, lambda *_: None)
        assert conversion.back(tries=1) is False, "its row is left to the redrive"
    assert conversion.rotating()
    assert InboxConversion(engine).back()
    assert ids(engine) == ["orphan", "processed"]
    with engine.begin() as connection:
        assert inbox.record_many(connection, ["parked", "processed", "orphan"]) == {"parked"}


HINDRANCES = [
    ("CREATE VIEW report AS SELECT message_id FROM processed_message", "view report"),
    ("CREATE INDEX by_time ON processed_message (processed_at)", "index by_time"),
    ("ALTER TABLE processed_message ENABLE ROW LEVEL SECURITY", "row security"),
    ("ALTER TABLE processed_message ADD CONSTRAINT short CHECK (length(message_id) < 10)", "constraint short"),
    (
        "CREATE TABLE child (s text, m text, FOREIGN KEY (s, m) REFERENCES processed_message)",
        "foreign key child_s_m_fkey of child",
    ),
    (
        "CREATE TRIGGER t BEFORE INSERT ON processed_message EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "trigger t",
    ),
    ("CREATE PUBLICATION {publication} FOR TABLE processed_message", "publication {publication}"),
    (
        "CREATE PUBLICATION {publication} FOR TABLES IN SCHEMA {schema}",
        "publication {publication} (without publish_via_partition_root)",
    ),
    ("GRANT SELECT (message_id) ON processed_message TO pg_monitor", "a right on the column message_id"),
]


@pytest.mark.parametrize(("made", "named"), HINDRANCES)
def test_what_others_have_made_of_the_table_is_named(schema_url: str, engine: Engine, made: str, named: str) -> None:
    schema = schema_url.rpartition("search_path%3D")[2]
    publication = f"of_{schema}"
    with engine.begin() as connection:
        connection.exec_driver_sql(made.format(publication=publication, schema=schema))
    conversion = InboxConversion(engine)
    try:
        assert conversion.hindrances() == [named.format(publication=publication)]
        with pytest.raises(InvalidConfiguration, match=re.escape(named.format(publication=publication))):
            conversion.forward()
        assert not conversion.rotating()
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP PUBLICATION IF EXISTS {publication}")


def test_what_is_deleted_of_a_rotating_inbox_is_deleted_where_it_is_replicated() -> None:
    """The publication sends it under the name of the whole table, which has no key."""
    with LocalPostgres(durable=False, settings={"wal_level": "logical"}) as server:
        url = make_url(server.url)
        engine = create_engine(url)
        tables().metadata.create_all(engine)
        assert InboxConversion(engine).forward()
        run(engine, "CREATE PUBLICATION of_inbox FOR TABLE processed_message WITH (publish_via_partition_root)")
        run(engine, "SELECT pg_create_logical_replication_slot('of_inbox', 'pgoutput')")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("CREATE DATABASE replica")
        replica = create_engine(url.set(database="replica"), isolation_level="AUTOCOMMIT")
        tables().metadata.create_all(replica)
        run(replica, "ALTER TABLE processed_message ADD COLUMN generation integer")
        source = f"host={url.host} port={url.port} user={url.username} password={url.password} dbname={url.database}"
        run(
            replica,
            f"CREATE SUBSCRIPTION of_inbox CONNECTION '{source}' PUBLICATION of_inbox "
            "WITH (create_slot = false, copy_data = false)",
        )
        letters, inbox = DeadLetters(engine), Inbox("billing")
        with engine.begin() as connection:
            inbox.record(connection, "m-1")
        number = letters.park(letter("parked"))
        assert Generations(engine).rotate()
        with engine.begin() as connection:
            inbox.record(connection, "m-2")
        wait_until(lambda: ids(replica) == ["m-1", "m-2", "parked"], "what is recorded is replicated")
        letters.redrive(number or 0, lambda _: None)
        run(engine, "UPDATE processed_message SET generation = 2 WHERE message_id = 'm-1'")  # as parked rows are moved
        run(engine, "DELETE FROM processed_message WHERE message_id = 'm-2'")
        wait_until(lambda: ids(replica) == ["m-1"], "what is deleted is deleted there")
        engine.dispose()
        replica.dispose()


def test_without_an_inbox_there_is_nothing_to_convert(fresh_engine: Engine) -> None:
    with pytest.raises(SchemaMissing):
        InboxConversion(fresh_engine).forward()


def test_one_that_is_in_use_is_left_alone(engine: Engine) -> None:
    with engine.begin() as connection:
        Inbox("billing").record(connection, "m-1")
        assert InboxConversion(engine).forward(tries=2) is False
    assert InboxConversion(engine).forward()


def test_a_role_with_rights_on_the_inbox_alone_records_in_every_generation(
    engine: Engine, schema_url: str, admin_engine: Engine
) -> None:
    role = "role_" + schema_url.rpartition("search_path%3D")[2]
    schema = schema_url.rpartition("search_path%3D")[2]
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {schema} TO {role}; "
            f"GRANT SELECT, INSERT, DELETE ON processed_message TO {role}; "
            f"GRANT SELECT ON processed_earlier, inbox_horizon TO {role}"
        )
    as_role = create_engine(f"{schema_url}%20-crole%3D{role}")
    inbox = Inbox("billing")
    try:
        conversion, generations = InboxConversion(engine), Generations(engine)
        for number, change in enumerate((lambda: True, conversion.forward, generations.rotate, conversion.back)):
            assert change()
            with as_role.begin() as connection:
                assert inbox.record_many(connection, ["m-0", f"m-{number}"]) == {f"m-{number}"}
                assert inbox.record(connection, f"x-{number}")
                assert inbox.unrecord(connection, [f"x-{number}"]) == 1
    finally:
        as_role.dispose()
        with admin_engine.connect() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_the_status_counts_all_generations(engine: Engine) -> None:
    assert InboxConversion(engine).forward()
    generations = Generations(engine)
    for number in range(3):
        with engine.begin() as connection:
            Inbox("billing").record(connection, f"m-{number}")
        assert generations.rotate()
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("ANALYZE processed_message")
        assert estimate_rows(connection, "processed_message") == 3
    assert [one.processed for one in read_status(engine, exact=True).subscribers] == [3]
