"""What is special about the ledger in Postgres: isolation, schemas, lost connections, and what it says of failures."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.schema import CreateSchema, DropSchema

from support.leases import acquired, postgres_store
from support.statements import statements_sent
from support.tcp_proxy import TcpProxy
from support.waiting import wait_until
from txbox import InvalidConfiguration, LeaseLost, LedgerError, SchemaMissing
from txbox.leases import LeaseState, PostgresLedger
from txbox.leases.statements import LeaseStatements
from txbox.schema import tables

LONG = 600.0
THREADS = 16
SECRET = "hunter2"

T = TypeVar("T")

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(schema_url: str) -> Iterator[MakeEngine]:
    """Make an engine on the test's schema: make_engine(settings=" -cname=value", **options)."""
    made: list[Engine] = []

    def make(settings: str = "", **options: object) -> Engine:
        url = make_url(schema_url)
        url = url.update_query_dict({"options": f"{url.query['options']}{settings}"})
        made.append(create_engine(url, pool_size=THREADS, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.dispose()


LEVELS: dict[str, tuple[str, dict[str, str]]] = {
    "autocommit": ("", {"isolation_level": "AUTOCOMMIT"}),
    "read committed": ("", {"isolation_level": "READ COMMITTED"}),
    "repeatable read": ("", {"isolation_level": "REPEATABLE READ"}),
    "serializable": ("", {"isolation_level": "SERIALIZABLE"}),
    "server's default: repeatable read": (" -cdefault_transaction_isolation=repeatable\\ read", {}),
    "server's default: serializable": (" -cdefault_transaction_isolation=serializable", {}),
    "both": (" -cdefault_transaction_isolation=serializable", {"isolation_level": "SERIALIZABLE"}),
}


@pytest.mark.parametrize("level", LEVELS)
def test_16_threads_at_any_isolation_have_one_owner_for_each_lease(
    engine: Engine, schema_url: str, make_engine: MakeEngine, level: str
) -> None:
    settings, options = LEVELS[level]
    ledger = PostgresLedger("mailing", engine=make_engine(settings, **options))
    store = postgres_store(engine, schema_url)
    gate = threading.Barrier(THREADS)
    completed: list[tuple[str, int]] = []

    def work(index: int) -> list[LeaseState]:
        states = []
        for number in range(12):
            message_id = f"m-{number}"
            gate.wait(60)
            answer = ledger.acquire(message_id, lease_seconds=LONG)
            states.append(answer.state)
            gate.wait(60)
            if answer.lease is not None:
                ledger.renew(answer.lease)
                match number % 3:
                    case 0:
                        ledger.release(answer.lease)
                    case 1:
                        store.expire(message_id)
            gate.wait(60)
            # Once more: free, expired, or still held; and whoever has it now completes it.
            again = ledger.acquire(message_id, lease_seconds=LONG)
            held = again.lease or (answer.lease if number % 3 == 2 else None)
            gate.wait(60)
            if held is not None:
                ledger.complete(held, b"done")
                completed.append((message_id, held.fence))
            if answer.lease is not None and held is None:
                for settle in (ledger.renew, ledger.release, ledger.complete):
                    with pytest.raises(LeaseLost):
                        settle(answer.lease)
            gate.wait(60)
            assert ledger.acquire(message_id).state is LeaseState.COMPLETED
        return states

    with ThreadPoolExecutor(THREADS) as pool:
        columns = list(zip(*pool.map(work, range(THREADS)), strict=True))
    for states in columns:
        assert sorted(states) == [LeaseState.ACQUIRED] + [LeaseState.IN_FLIGHT] * (THREADS - 1)
    assert sorted(message_id for message_id, _ in completed) == sorted(f"m-{number}" for number in range(12))


def test_16_threads_at_serializable_work_on_messages_of_their_own(make_engine: MakeEngine) -> None:
    ledger = PostgresLedger("mailing", engine=make_engine(" -cdefault_transaction_isolation=serializable"))

    def work(index: int) -> None:
        for number in range(20):
            lease = acquired(ledger, f"{index}-{number}")
            ledger.renew(lease)
            if number % 2:
                ledger.release(lease)
                lease = acquired(ledger, f"{index}-{number}")
            ledger.complete(lease)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


class CountingProxy(TcpProxy):
    """Counts what goes to the server; one round trip begins with one packet, as statements are small."""

    packets = 0

    def _is_lost(self, request: bytes) -> bool:
        self.packets += 1
        return super()._is_lost(request)


def test_each_step_is_one_round_trip(schema_url: str) -> None:
    url = make_url(schema_url)
    with CountingProxy(url.host or "127.0.0.1", url.port or 5432) as proxy:
        proxied = create_engine(url.set(host="127.0.0.1", port=proxy.port), isolation_level="SERIALIZABLE")
        ledger = PostgresLedger("mailing", engine=proxied)
        trips: list[int] = []

        def counted(step: Callable[..., T], *arguments: object) -> T:
            before = proxy.packets
            answer = step(*arguments)
            trips.append(proxy.packets - before)
            return answer

        # Psycopg prepares a statement when it has seen it a few times, which is one more, once.
        for number in range(12):
            trips.clear()
            lease = counted(acquired, ledger, f"m-{number}")
            counted(ledger.acquire, lease.message_id)
            counted(ledger.renew, lease)
            counted(ledger.release, lease)
            lease = counted(acquired, ledger, lease.message_id)
            counted(ledger.complete, lease, b"result")
            counted(ledger.acquire, lease.message_id)
        assert trips == [1] * 7
        with statements_sent(proxied) as sent:
            acquired(ledger, "n")
        assert len([statement for statement in sent if statement not in ("COMMIT", "ROLLBACK")]) == 1
        proxied.dispose()


def test_nothing_is_left_in_a_transaction(engine: Engine, make_engine: MakeEngine) -> None:
    single = make_engine()
    ledger = PostgresLedger("mailing", engine=single)
    lease = acquired(ledger, "m")
    with engine.connect() as connection:
        states = connection.exec_driver_sql(
            "SELECT state FROM pg_stat_activity WHERE query LIKE '%%ON CONFLICT%%' AND pid <> pg_backend_pid()"
        ).scalars()
        assert set(states) <= {"idle"}
    ledger.complete(lease)
    with single.connect() as connection:
        assert not connection.connection.driver_connection.autocommit, "as the engine's other users expect it"  # type: ignore[union-attr]


@pytest.mark.parametrize(("schema", "prefix"), [('ledger\'s "own" %', ""), (None, "our_"), ("%s", "a b%")])
def test_the_table_may_be_anywhere(engine: Engine, schema: str | None, prefix: str) -> None:
    table = tables(schema, prefix).message_lease
    ledger = PostgresLedger("mailing", engine=engine, schema=schema, prefix=prefix)
    with pytest.raises(SchemaMissing):
        ledger.check()
    try:
        with engine.begin() as connection:
            if schema is not None:
                connection.execute(CreateSchema(schema))
            table.create(connection)
        ledger.check()
        lease = acquired(ledger, "m")
        ledger.renew(lease)
        ledger.release(lease)
        ledger.complete(acquired(ledger, "m"), b"done")
        assert ledger.acquire("m").result == b"done"
        assert PostgresLedger("mailing", engine=engine).acquire("m").state is LeaseState.ACQUIRED, "another table"
    finally:
        if schema is not None:
            with engine.begin() as connection:
                connection.execute(DropSchema(schema, cascade=True))


def test_a_table_that_is_missing_is_missed_by_every_step(engine: Engine) -> None:
    ledger = PostgresLedger("mailing", engine=engine)
    lease = acquired(ledger, "m")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE message_lease")
    for step in (
        ledger.check,
        lambda: ledger.acquire("m"),
        lambda: ledger.renew(lease),
        lambda: ledger.complete(lease),
        lambda: ledger.release(lease),
    ):
        with pytest.raises(SchemaMissing, match=r"message_lease.*txbox db upgrade"):
            step()


@pytest.mark.parametrize("step", ["acquire", "renew", "complete", "release"])
def test_a_pooled_connection_that_is_dead_is_replaced(engine: Engine, make_engine: MakeEngine, step: str) -> None:
    pooled = make_engine()
    ledger = PostgresLedger("mailing", engine=pooled)
    lease = acquired(ledger, "m")
    with ThreadPoolExecutor(4) as pool:  # several of them
        list(pool.map(lambda number: ledger.acquire(f"n-{number}"), range(8)))
    with engine.begin() as connection:
        ended = connection.exec_driver_sql(
            "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity "
            "WHERE query LIKE '%%message_lease%%' AND pid <> pg_backend_pid() AND state = 'idle'"
        ).scalar_one()
    assert ended
    if step == "acquire":
        assert ledger.acquire("m").state is LeaseState.IN_FLIGHT
        assert acquired(ledger, "o").attempt == 1
    else:
        getattr(ledger, step)(lease)
        expected = {"renew": LeaseState.IN_FLIGHT, "complete": LeaseState.COMPLETED, "release": LeaseState.ACQUIRED}
        assert ledger.acquire("m").state is expected[step]


def test_an_answer_that_is_lost_after_the_commit_changes_nothing_twice(
    schema_url: str, make_engine: MakeEngine
) -> None:
    url = make_url(schema_url)
    with TcpProxy(url.host or "127.0.0.1", url.port or 5432) as proxy:
        proxied = create_engine(url.set(host="127.0.0.1", port=proxy.port))
        ledger = PostgresLedger("mailing", engine=proxied)
        ledger.check()

        def losing(part: bytes) -> None:
            proxy.lose_next(part, reaches_server=True)

        lease = acquired(ledger, "failed")
        losing(b"failures = CASE")
        ledger.release(lease)
        again = acquired(ledger, "failed")
        assert (again.attempt, again.unknown_attempts) == (2, 0)
        losing(b"SET expires_at")
        ledger.renew(again)
        losing(b"completed_at = coalesce")
        ledger.complete(again, b"once")
        assert ledger.acquire("failed").result == b"once"
        losing(b"INSERT INTO")
        assert ledger.acquire("new").state is LeaseState.IN_FLIGHT, "by somebody whom nobody knows: by us"
        assert proxy.lost == 4
        proxied.dispose()


def test_a_connection_that_is_lost_for_good_is_an_error_that_may_pass(schema_url: str) -> None:
    url = make_url(schema_url)
    with TcpProxy(url.host or "127.0.0.1", url.port or 5432) as proxy:
        proxied = create_engine(url.set(host="127.0.0.1", port=proxy.port))
        ledger = PostgresLedger("mailing", engine=proxied)
        lease = acquired(ledger, SECRET)
        proxy.refuse()
        proxy.cut()
        for step in (ledger.renew, ledger.complete, ledger.release):
            with pytest.raises(LedgerError) as caught:
                step(lease)
            assert not caught.value.permanent
            assert SECRET not in str(caught.value)
        assert not lease.lost, "who cannot be reached says nothing about it"
        proxy.accept()
        ledger.complete(lease)
        proxied.dispose()


def test_a_pool_that_is_exhausted_is_an_error_that_may_pass(schema_url: str) -> None:
    engine = create_engine(schema_url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    with engine.connect(), pytest.raises(LedgerError) as caught:
        PostgresLedger("mailing", engine=engine).acquire("m")
    assert not caught.value.permanent
    engine.dispose()


def test_a_permission_that_is_denied_is_for_good_and_shows_no_values(engine: Engine, make_engine: MakeEngine) -> None:
    with engine.begin() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        connection.exec_driver_sql(f"CREATE ROLE reader_{schema}")
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO reader_{schema}")
        connection.exec_driver_sql(f"GRANT SELECT ON message_lease TO reader_{schema}")
    try:
        restricted = make_engine(f" -crole=reader_{schema}")
        ledger, writer = PostgresLedger(SECRET, engine=restricted), PostgresLedger(SECRET, engine=engine)
        lease = acquired(writer, SECRET)
        for step in (
            ledger.check,
            lambda: ledger.acquire(SECRET, fingerprint=SECRET.encode()),
            lambda: ledger.renew(lease),
            lambda: ledger.complete(lease, SECRET.encode()),
            lambda: ledger.release(lease),
        ):
            with pytest.raises(LedgerError, match="permission denied for table message_lease") as caught:
                step()
            assert caught.value.permanent
            assert SECRET not in str(caught.value)
            assert caught.value.__cause__ is not None
        restricted.dispose()
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY reader_{schema}; DROP ROLE reader_{schema}")


@pytest.mark.parametrize("limit", ["lock_timeout", "statement_timeout"])
def test_a_row_that_somebody_locks_for_long_is_an_error_that_may_pass(
    engine: Engine, make_engine: MakeEngine, limit: str
) -> None:
    ledger = PostgresLedger("mailing", engine=make_engine(f" -c{limit}=100ms"))
    lease = acquired(ledger, "m")
    with engine.begin() as connection:
        connection.exec_driver_sql("SELECT FROM message_lease FOR UPDATE")
        with pytest.raises(LedgerError) as caught:
            ledger.complete(lease)
    assert not caught.value.permanent
    ledger.complete(lease)


def test_a_server_that_is_no_primary_any_more_is_an_error_that_may_pass(
    engine: Engine, make_engine: MakeEngine
) -> None:
    lease = acquired(PostgresLedger("mailing", engine=engine), "m")
    demoted = PostgresLedger("mailing", engine=make_engine(" -cdefault_transaction_read_only=on"))
    with pytest.raises(LedgerError) as caught:
        demoted.complete(lease)
    assert not caught.value.permanent, "after a failover, the next connection leads to the new primary"


def test_the_lease_begins_when_the_row_is_there_and_not_when_it_was_asked_for(engine: Engine) -> None:
    ledger = PostgresLedger("mailing", engine=engine)
    lease = acquired(ledger, "m", lease_seconds=LONG)
    ledger.release(lease)
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as connection:
            connection.exec_driver_sql("SELECT FROM message_lease FOR UPDATE")
            asked = pool.submit(acquired, ledger, "m", lease_seconds=LONG)
            wait_until(lambda: is_blocked(engine), "it waits for the row")
            let_go = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
        again = asked.result(20)
    with engine.connect() as connection:
        begun = connection.exec_driver_sql("SELECT expires_at - interval '600 s' FROM message_lease").scalar_one()
    assert begun >= let_go
    assert again.seconds_left < LONG, "the owner itself counts from when it asked"


def test_a_number_that_was_drawn_before_a_wait_is_no_fence(engine: Engine) -> None:
    """Two wait for the row; whoever has it later has the greater fence, in whatever order they have asked."""
    ledger = PostgresLedger("mailing", engine=engine)
    fences = [acquired(ledger, "m", lease_seconds=LONG).fence]
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE message_lease SET expires_at = NULL")
            waiting = pool.submit(acquired, ledger, "m", lease_seconds=LONG)
            wait_until(lambda: is_blocked(engine), "it waits for the row")
            # Meanwhile another one has come, and gone again: with a fence that was made after the first one asked.
            fences.append(
                connection.exec_driver_sql(
                    "UPDATE message_lease SET fence = fence + 3600000 RETURNING fence"
                ).scalar_one()
            )
        fences.append(waiting.result(20).fence)
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("ahead", [1, 10**9, 7 << 44])
def test_fences_grow_where_the_server_is_behind_what_the_rows_know(engine: Engine, ahead: int) -> None:
    """As after a restore into a new server, of a lower timeline, or when its clock was set back."""
    ledger = PostgresLedger("mailing", engine=engine)
    ledger.release(acquired(ledger, "m"))
    with engine.begin() as connection:
        known = connection.exec_driver_sql(
            "UPDATE message_lease SET fence = fence + %s RETURNING fence", (ahead,)
        ).scalar_one()
    assert acquired(ledger, "m").fence > known


def test_a_server_that_does_not_tell_its_timeline_has_fences_by_its_clock(
    engine: Engine, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.begin() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        connection.exec_driver_sql(
            f"CREATE FUNCTION {schema}.pg_walfile_name(pg_lsn) RETURNS text LANGUAGE plpgsql AS "
            "$$BEGIN RAISE insufficient_privilege USING MESSAGE = 'permission denied for function'; END$$"
        )
    managed = make_engine(f" -csearch_path={schema},pg_catalog")
    ledger = PostgresLedger("mailing", engine=managed)
    ledger.check()
    fences = []
    for _ in range(3):
        lease = acquired(ledger, "m")
        fences.append(lease.fence)
        ledger.release(lease)
    assert fences == sorted(set(fences))
    with managed.begin() as connection:
        now = connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())::float").scalar_one()
        connection.exec_driver_sql("DELETE FROM message_lease")
    assert fences[0] == pytest.approx(now * 1000, abs=60_000)
    assert acquired(ledger, "m").fence > fences[-1], "of a row that was deleted, too"
    told = [record.message for record in caplog.records if "does not tell its timeline" in record.message]
    assert len(told) == 1
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE message_lease SET expires_at = NULL")
    assert acquired(PostgresLedger("mailing", engine=engine), "m").fence > 1 << 44, (
        "where it is told, fences are greater"
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"), ("remote_apply", "remote_apply")],
)
def test_every_step_of_a_ledger_insists_on_a_durable_commit(engine: Engine, theirs: str, ours: str) -> None:
    sql = LeaseStatements.load()
    key = {"subscriber_id": "mailing", "message_id": "m"}
    asking = {"owner": "test", "fingerprint": None, "lease_seconds": LONG, "latest": None}
    steps: list[tuple[str, dict[str, object]]] = [
        (sql.acquire, asking),
        (sql.renew, {"lease_seconds": LONG}),
        (sql.release, {"attempts": 0, "failures": 1, "uncounted": 0, "forget": False, "unknown_now": 0}),
        (sql.acquire, asking),
        (sql.complete, {"result": None}),
    ]
    fence = None
    with engine.connect() as connection:
        for statement, parameters in steps:
            connection.exec_driver_sql(f"SET synchronous_commit = {theirs}")
            connection.commit()
            done = connection.exec_driver_sql(statement, {**key, "fence": fence, **parameters})
            assert done.rowcount == 1
            if statement == sql.acquire:
                fence = done.one()[0]
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar_one() == ours
            connection.commit()
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar_one() == theirs, "for others, as it was"


def test_a_ledger_needs_a_name(engine: Engine) -> None:
    for name in ("", "a\0b", "x" * 201):
        with pytest.raises(InvalidConfiguration, match=r"PostgresLedger\.subscriber_id"):
            PostgresLedger(name, engine=engine)
    assert repr(PostgresLedger("mailing", engine=engine)) == "PostgresLedger('mailing')"


def is_blocked(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(
            connection.exec_driver_sql(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%ON CONFLICT%%'"
            ).scalar_one()
        )
