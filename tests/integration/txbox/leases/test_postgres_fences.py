"""Fences of a ledger in Postgres grow, across waits, restores and clocks; a lease begins when it has its row."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from support.txbox.leases import acquired
from support.waiting import wait_until
from txbox.leases import PostgresLedger

LONG = 600.0

MakeEngine = Callable[..., Engine]


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
    """Two wait for the row; the one that has it later has the greater fence, in whatever order they have asked."""
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
    lines = [record.message for record in caplog.records if "does not report its timeline" in record.message]
    assert len(lines) == 1
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE message_lease SET expires_at = NULL")
    assert acquired(PostgresLedger("mailing", engine=engine), "m").fence > 1 << 44, (
        "a server that tells its timeline gives out greater fences"
    )


def is_blocked(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(
            connection.exec_driver_sql(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%ON CONFLICT%%'"
            ).scalar_one()
        )
