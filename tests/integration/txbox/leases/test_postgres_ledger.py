"""A ledger in Postgres: isolation, round trips, durable commits, and where its table may be."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.schema import CreateSchema, DropSchema

from support.postgres.statements import statements_sent
from support.postgres.tcp_proxy import CountingProxy
from support.txbox.leases import acquired, postgres_store
from txbox import InvalidConfiguration, LeaseLost, SchemaMissing
from txbox.leases import LeaseState, PostgresLedger
from txbox.leases.postgres_ledger import LeaseStatements
from txbox.schema import tables

LONG = 600.0
THREADS = 16

MakeEngine = Callable[..., Engine]

T = TypeVar("T")


LEVELS: dict[str, tuple[str, dict[str, str]]] = {
    "autocommit": ("", {"isolation_level": "AUTOCOMMIT"}),
    "read committed": ("", {"isolation_level": "READ COMMITTED"}),
    "repeatable read": ("", {"isolation_level": "REPEATABLE READ"}),
    "serializable": ("", {"isolation_level": "SERIALIZABLE"}),
    "server's default: repeatable read": (" -cdefault_transaction_isolation=repeatable\\ read", {}),
    "server's default: serializable": (" -cdefault_transaction_isolation=serializable", {}),
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
        for number in range(6):
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
    assert sorted(message_id for message_id, _ in completed) == sorted(f"m-{number}" for number in range(6))


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


def test_a_ledger_needs_a_name(engine: Engine) -> None:
    for name in ("", "a\0b", "x" * 201):
        with pytest.raises(InvalidConfiguration, match=r"PostgresLedger\.subscriber_id"):
            PostgresLedger(name, engine=engine)
    assert repr(PostgresLedger("mailing", engine=engine)) == "PostgresLedger('mailing')"
