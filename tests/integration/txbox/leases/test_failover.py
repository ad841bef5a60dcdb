"""What a server forgets that crashes, or that a standby or a restored backup takes the place of: what leases say then.

A server of its own: its WAL is written late, so that what is not insisted on is lost in a crash.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.postgres.crashes import standby_of
from support.postgres.statements import run
from support.txbox.leases import acquired
from support.waiting import wait_until
from txbox import LeaseLost
from txbox.leases import LeaseState, PostgresLedger
from txbox.schema import tables
from txbox_local import LocalPostgres
from txbox_local.process import process_exists

LATE = {"synchronous_commit": "off", "wal_writer_delay": "10s", "autovacuum": "off", "checkpoint_timeout": "1h"}
LONG = 600.0

Served = tuple[LocalPostgres, Engine]


@pytest.fixture
def served() -> Iterator[Served]:
    """A server whose commits are not durable by default, with our tables."""
    # Not pytest's folder: where root runs the tests, another user runs the server, and pytest locks others out.
    with tempfile.TemporaryDirectory(prefix="txbox-failover-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        home.chmod(0o711)
        with LocalPostgres(home / "first", durable=False, settings=LATE) as server:
            engine = create_engine(server.url)
            tables().metadata.create_all(engine)
            yield server, engine
            engine.dispose()


def crash(server: LocalPostgres) -> None:
    """End all of a server's processes at once, and start it again."""
    ended = server.pid
    os.kill(ended, signal.SIGQUIT)
    wait_until(lambda: not process_exists(ended), "the server has ended")
    server.stop()
    server.start()


def test_what_a_ledger_was_told_survives_a_crash_where_commits_are_not_durable(served: Served) -> None:
    server, engine = served
    ledger = PostgresLedger("mailing", engine=engine)
    failed, completed, held = (acquired(ledger, name, lease_seconds=LONG) for name in ("failed", "completed", "held"))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE theirs AS SELECT 1 AS number")
        connection.exec_driver_sql("SELECT pg_switch_wal()")  # which writes all there is
    ledger.release(failed)
    fences = [acquired(ledger, "failed", lease_seconds=LONG).fence]
    ledger.complete(completed, b"done")
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar_one() == "off", "the others' own"
        connection.exec_driver_sql("INSERT INTO theirs VALUES (2)")
    crash(server)
    again = create_engine(server.url)
    ledger = PostgresLedger("mailing", engine=again)
    assert ledger.acquire("completed").result == b"done"
    assert [ledger.acquire(name).state for name in ("failed", "held")] == [LeaseState.IN_FLIGHT] * 2
    with again.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM theirs").scalar_one() == 1, "the crash loses commits"
        connection.exec_driver_sql("UPDATE message_lease SET expires_at = NULL WHERE completed_at IS NULL")
    fences.append(acquired(ledger, "failed").fence)
    assert fences == sorted(set(fences))
    ledger.complete(acquired(ledger, "held", lease_seconds=LONG))
    with pytest.raises(LeaseLost):
        ledger.complete(held)
    again.dispose()


def test_a_promoted_standby_gives_out_no_fence_twice(served: Served) -> None:
    server, engine = served
    ledger = PostgresLedger("mailing", engine=engine)
    for message_id in ("known", "restored"):
        ledger.release(acquired(ledger, message_id))
    # As of a dump from a server that had been promoted seven times, or as after pg_upgrade, which begins at timeline 1.
    run(engine, f"UPDATE message_lease SET fence = fence + {7 << 44} WHERE message_id = 'restored'")
    standby = standby_of(server)
    # What the standby has not heard of.
    lost = [acquired(ledger, message_id, lease_seconds=LONG) for message_id in ("known", "restored", "unknown")]
    fences = {lease.message_id: [lease.fence] for lease in lost}
    for lease in lost:
        ledger.release(lease)
        fences[lease.message_id].append(acquired(ledger, lease.message_id, lease_seconds=LONG).fence)
    with standby() as promoted:
        taken_over = create_engine(promoted.url)
        # Whatever its clock says.
        run(
            taken_over,
            "CREATE SCHEMA late; CREATE FUNCTION late.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE "
            "AS $$SELECT pg_catalog.clock_timestamp() - interval '1 hour'$$",
        )
        taken_over.dispose()
        late = make_url(promoted.url).update_query_dict({"options": "-csearch_path=late,pg_catalog,public"})
        taken_over = create_engine(late)
        ledger = PostgresLedger("mailing", engine=taken_over)
        for message_id, before in fences.items():
            lease = acquired(ledger, message_id)
            assert lease.fence > max(before), "greater than all that the lost primary gave out"
        for lease in lost:
            with pytest.raises(LeaseLost):
                ledger.renew(lease)
        taken_over.dispose()
