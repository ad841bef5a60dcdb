"""What a ledger in Postgres makes of failures: a missing table, lost connections and answers, locks, permissions."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.leases import acquired
from txbox import LedgerError, SchemaMissing
from txbox.leases import LeaseState, PostgresLedger

SECRET = "hunter2"

MakeEngine = Callable[..., Engine]


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
        assert ledger.acquire("new").state is LeaseState.IN_FLIGHT, "its owner is not known, and it is us"
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
        assert not lease.lost, "a server that cannot be reached has not answered"
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
