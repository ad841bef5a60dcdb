"""Who keeps Postgres from cleaning up: found while somebody really does, and also by an ordinary user."""

import struct
from collections.abc import Callable, Iterator

import pytest
from psycopg import pq
from sqlalchemy import Connection, Engine, create_engine, make_url

from support.postgres.blocking import backend_pid
from support.postgres.roles import restricted
from support.postgres.statements import run
from support.waiting import wait_until
from txbox.outbox.snapshot_holders import SnapshotHolder
from txbox.outbox.status import read_outbox_status
from txbox.schema import tables
from txbox_local import LocalPostgres


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has held a snapshot for any time, over five transactions of others."""
    monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_SECONDS", 0.0)
    monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_TRANSACTIONS", 5)


def holders(engine: Engine) -> dict[int | str | None, SnapshotHolder]:
    found = read_outbox_status(engine).snapshot_holders
    return {holder.name if holder.pid is None else holder.pid: holder for holder in found}


def go_on(engine: Engine, transactions: int) -> None:
    """Begin and end transactions that have a number."""
    with engine.connect() as connection:
        for _ in range(transactions):
            connection.exec_driver_sql("SELECT pg_current_xact_id()")
            connection.commit()


@pytest.fixture
def session(schema_url: str) -> Iterator[Connection]:
    url = make_url(schema_url).update_query_dict({"application_name": "a report"})
    engine = create_engine(url, isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def test_a_session_that_holds_a_snapshot_is_shown_without_its_values(engine: Engine, session: Connection) -> None:
    pid = backend_pid(session)
    session.exec_driver_sql("SELECT 'hunter2' AS password, 4711 -- don't")
    go_on(engine, 7)
    found = holders(engine)[pid]
    assert (found.kind, found.name, found.state) == ("session", "a report", "idle in transaction")
    assert found.query == "SELECT ? AS password, ?"
    assert found.owner
    assert found.seconds is not None
    assert 7 <= found.transactions < 5_000
    session.commit()
    assert pid not in holders(engine)


def test_one_that_has_written_holds_back_as_well(engine: Engine, schema_url: str) -> None:
    with engine.connect() as writer:  # at READ COMMITTED, so without a snapshot between its statements
        pid = backend_pid(writer)
        writer.exec_driver_sql("CREATE TEMPORARY TABLE held (n int)")
        go_on(engine, 7)
        assert pid in holders(engine)


def test_who_does_no_harm_is_not_shown(engine: Engine, session: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = backend_pid(session)
    go_on(engine, 7)
    assert pid in holders(engine)
    monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_SECONDS", 3600.0)
    assert pid not in holders(engine), "not for long"
    monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_MANY_TRANSACTIONS", 5)
    assert pid in holders(engine), "but over many transactions"
    monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_SECONDS", 0.0)
    monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_MANY_TRANSACTIONS", 1_000_000)
    monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_TRANSACTIONS", 500_000)
    assert pid not in holders(engine), "nobody has done anything since"


def test_of_another_database_nobody_is_shown(engine: Engine, make_database: Callable[..., str]) -> None:
    other = create_engine(make_database(), isolation_level="REPEATABLE READ")
    with other.connect() as connection:
        pid = backend_pid(connection)
        go_on(engine, 7)
        assert pid not in holders(engine)
    other.dispose()


def test_an_ordinary_user_sees_who_and_how_far_but_not_what(
    engine: Engine, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = backend_pid(session)
    go_on(engine, 7)
    with restricted(engine) as ordinary:
        assert read_outbox_status(engine).sees_all_sessions
        assert not read_outbox_status(ordinary).sees_all_sessions
        assert pid not in holders(ordinary), "how long is hidden from him, so it takes many transactions"
        monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_MANY_TRANSACTIONS", 5)
        found = holders(ordinary)[pid]
    assert (found.kind, found.name, found.state, found.seconds, found.query) == (
        "session",
        "a report",
        None,
        None,
        None,
    )
    assert found.transactions >= 7


class Standby:
    """What a standby says to its server: "somebody here still needs the rows that this transaction deletes"."""

    def __init__(self, server: LocalPostgres, slot: str | None) -> None:
        url = make_url(server.url).set(drivername="postgresql").update_query_dict({"replication": "true"})
        self._connection = pq.PGconn.connect(url.render_as_string(hide_password=False).encode())
        start = self._ask("IDENTIFY_SYSTEM").get_value(0, 2)
        assert start is not None
        named = f"SLOT {slot} " if slot else ""
        answer = self._connection.exec_(f"START_REPLICATION {named}PHYSICAL {start.decode()}".encode())
        assert answer.status == pq.ExecStatus.COPY_BOTH, self._connection.error_message

    def needs(self, transaction: int) -> None:
        # https://www.postgresql.org/docs/current/protocol-replication.html, "Hot standby feedback message"
        self._connection.put_copy_data(struct.pack("!cqIIII", b"h", 0, transaction, 0, 0, 0))
        self._connection.flush()

    def close(self) -> None:
        self._connection.finish()

    def _ask(self, command: str) -> pq.abc.PGresult:
        return self._connection.exec_(command.encode())


def test_what_is_no_session_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_prepared_transactions": "1", "wal_level": "replica", "max_wal_senders": "2"}
    with LocalPostgres(durable=False, settings=settings) as server:
        engine = create_engine(server.url)
        tables().metadata.create_all(engine)
        with engine.connect() as connection:
            held = int(connection.exec_driver_sql("SELECT pg_current_xact_id()::text").scalar_one())
            connection.exec_driver_sql("PREPARE TRANSACTION 'left behind'")
            connection.commit()
        go_on(engine, 7)
        prepared = holders(engine)["left behind"]
        assert (prepared.kind, prepared.pid, prepared.state, prepared.query) == (
            "prepared transaction",
            None,
            None,
            None,
        )
        assert prepared.transactions >= 7
        assert prepared.seconds is not None

        monkeypatch.setattr("txbox.outbox.snapshot_holders.HELD_MANY_TRANSACTIONS", 5)  # the others have no times
        run(engine, "SELECT pg_create_physical_replication_slot('elsewhere')")
        by_slot, by_feedback = Standby(server, "elsewhere"), Standby(server, None)
        by_slot.needs(held)
        by_feedback.needs(held)

        def kinds() -> set[str]:
            return {holder.kind for holder in read_outbox_status(engine).snapshot_holders}

        wait_until(lambda: kinds() == {"prepared transaction", "replication slot", "standby"})
        by_slot.close()
        by_feedback.close()
        # A slot outlives its reader: that is what it is for.
        wait_until(lambda: kinds() == {"prepared transaction", "replication slot"})
        assert wait_until(lambda: holders(engine).get("elsewhere")).state == "inactive"
        with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            connection.exec_driver_sql("ROLLBACK PREPARED 'left behind'")
            connection.exec_driver_sql("SELECT pg_drop_replication_slot('elsewhere')")
        assert holders(engine) == {}
        engine.dispose()
