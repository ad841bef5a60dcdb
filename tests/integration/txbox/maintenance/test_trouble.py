"""What a maintainer meets: missing rights, timeouts, prepared transactions, many windows, what loads have left."""

import json
import uuid
from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine, event

from integration.txbox.maintenance.conftest import KEPT, StartMaintainer, found, left, record
from support.postgres.roles import restricted
from support.postgres.statements import run
from support.waiting import wait_until
from txbox import Inbox
from txbox.backoff import Backoff
from txbox.maintenance import Retention
from txbox.status import read_status
from txbox_cli.app import run as run_program

BILLING = Retention(inbox={"billing": KEPT})
HOUR = timedelta(hours=1)


def old_failures_workers_and_ids(engine: Engine) -> None:
    record(engine, "billing", "old-", 100, days_ago=40)
    run(
        engine,
        "INSERT INTO message_failure (subscriber_id, message_id, attempts, error, last_failed_at) "
        "SELECT subscriber_id, message_id, 1, 'no', now() - interval '2 days' FROM processed_message LIMIT 10",
    )
    run(
        engine,
        "INSERT INTO outbox_relay (relay_id, host, pid, seen_at) VALUES ('a', 'h', 1, now() - interval '2 days')",
    )


# --- rights, timeouts, locks -----------------------------------------------------------------------------------------


def test_a_right_that_is_missing_keeps_one_task_from_being_done_and_no_other(
    engine: Engine, make_maintainer: StartMaintainer, caplog: pytest.LogCaptureFixture
) -> None:
    old_failures_workers_and_ids(engine)
    with restricted(engine, "DELETE ON message_failure") as of_role:
        maintainer = make_maintainer(BILLING, engine=of_role)
        report = maintainer.run_once()
        maintainer.run_once()
    assert report.worked
    assert report.failed.keys() == {"failures"}
    assert (report.removed["relays"], report.removed["inbox"]) == (1, 100)
    assert caplog.text.count("failures: not done") == 1, "once, while it does not change"
    runway = read_status(engine).runway
    assert runway is not None
    (failed,) = [task for task in runway.tasks if task.error]
    assert (failed.task, failed.finished_at) == ("failures", None)
    assert "permission denied for table message_failure" in str(failed.error)
    assert make_maintainer(BILLING).run_once().removed["failures"] == 0, (
        "its ids are gone: it looks like one that waits"
    )
    assert all(task.error is None for task in read_status(engine).runway.tasks)  # type: ignore[union-attr]


def test_once_ends_with_status_1_if_a_task_was_not_done(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old_failures_workers_and_ids(engine)
    with restricted(engine, "DELETE ON message_failure") as of_role:
        monkeypatch.setenv("TXBOX_DATABASE_URL", of_role.url.render_as_string(hide_password=False))
        assert run_program(["maintain", "--once", "--keep-inbox", "*=30d", "--json"]) == 1
        out, err = capsys.readouterr()
        assert json.loads(out)["removed"]["inbox"] == 100
        assert err.count("\n") == 1
        assert "failures was not done: permission denied for table message_failure" in err
        assert run_program(["status"]) == 0
        assert "maintenance: failures is not done: permission denied" in capsys.readouterr().out


def test_a_service_goes_on_beside_a_task_that_fails(
    engine: Engine, make_maintainer: StartMaintainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.maintenance.maintainer.AGAIN", Backoff(first_seconds=0.05, longest_seconds=0.1))
    run(
        engine,
        "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, owner, acquired_at, completed_at, "
        "result) VALUES ('billing', 'm', 1, 1, 'me', now(), now() - interval '2 days', 'x')",
    )
    with restricted(engine, "UPDATE ON message_lease") as of_role:
        retention = Retention(inbox={"billing": KEPT}, results=timedelta(days=1))
        service = make_maintainer(retention, engine=of_role, interval_seconds=0.05)
        service.start()
        try:
            for name in ("first-", "second-"):
                record(engine, "billing", name, 100, days_ago=40)
                wait_until(lambda: not left(engine), "the ids are forgotten")
        finally:
            assert service.stop(20)
    assert found(engine, "SELECT detail ->> 'error' FROM maintenance WHERE task = 'results'") is not None


def test_timeouts_of_the_role_do_not_count(engine: Engine, make_maintainer: StartMaintainer) -> None:
    run(
        engine,
        "CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.15); RETURN old; END $$",
    )
    record(engine, "billing", "old-", 10, days_ago=31)
    run(engine, "CREATE TRIGGER slow BEFORE DELETE ON processed_message FOR EACH ROW EXECUTE FUNCTION be_slow()")
    schema = found(engine, "SELECT current_schema()")
    options = f"-csearch_path={schema} -cstatement_timeout=1000 -clock_timeout=1"
    of_role = create_engine(engine.url.update_query_dict({"options": options}))
    try:
        assert make_maintainer(BILLING, engine=of_role).run_once().removed["inbox"] == 10
    finally:
        of_role.dispose()


def test_a_prepared_transaction_from_days_ago_keeps_nothing_from_being_forgotten(
    engine: Engine,
    make_maintainer: StartMaintainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It runs no statement any more: what it has recorded is there, and locked, until it ends."""
    if found(engine, "SHOW max_prepared_transactions") == "0":
        pytest.skip("TXBOX_TEST_DATABASE_URL names a server that has max_prepared_transactions = 0")
    for name in ("HELD_SECONDS", "HELD_TRANSACTIONS"):
        monkeypatch.setattr(f"txbox.outbox.snapshot_holders.{name}", 0)
    record(engine, "billing", "old-", 100, days_ago=31)
    name = f"pending-{uuid.uuid4().hex}"
    with engine.connect() as connection:
        assert Inbox("billing").record(connection, "prepared")
        connection.exec_driver_sql("UPDATE processed_message SET fingerprint = '' WHERE message_id = 'old-7'")
        connection.exec_driver_sql(f"PREPARE TRANSACTION '{name}'")
    try:
        assert make_maintainer(BILLING).run_once().removed["inbox"] == 99
        assert name in caplog.text, "who keeps Postgres from cleaning up is named"
    finally:
        with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            connection.exec_driver_sql(f"COMMIT PREPARED '{name}'")
    assert left(engine) == {"old-": 1, "prepared": 1}
    with engine.begin() as connection:
        assert not Inbox("billing").record(connection, "prepared")


def test_a_transaction_that_stays_open_for_long_leaves_nothing_behind_that_the_next_round_would_not_find(
    engine: Engine, make_maintainer: StartMaintainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(engine, "billing", "first-", 100, days_ago=40)
    make_maintainer(BILLING).run_once()
    record(engine, "billing", "old-", 30_000, days_ago=31)
    record(engine, "billing", "young-", 60_000, days_ago=1)
    run(engine, "UPDATE inbox_horizon SET horizon = horizon - interval '5 days'")
    detail = "jsonb_set(detail, '{settled,billing}', to_jsonb(extract(epoch FROM now() - interval '35 days')))"
    run(engine, f"UPDATE maintenance SET detail = {detail} WHERE task = 'horizons'")
    with monkeypatch.context() as patch, engine.connect() as recording:
        patch.setattr("txbox.maintenance.maintainer.SETTLE_SECONDS", 0.1)
        recording.exec_driver_sql("SELECT 1")
        assert make_maintainer(BILLING).run_once().removed["inbox"] == 0
    monkeypatch.setattr("txbox.maintenance.sweeper.SWEEP_BLOCKS", 0)  # what the first cursor finds
    assert make_maintainer(BILLING).run_once().removed["inbox"] == 30_000


# --- shapes of an inbox ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("days_ago", [None, 10])
def test_an_inbox_that_is_empty_or_younger_than_its_window(
    engine: Engine, make_maintainer: StartMaintainer, days_ago: int | None
) -> None:
    if days_ago is not None:
        record(engine, "billing", "young-", 1_000, days_ago=days_ago)
    report = make_maintainer(Retention(inbox={"*": timedelta(days=30_000)}, leases=KEPT, results=KEPT)).run_once()
    assert report.worked
    assert not report.failed
    assert not any(report.removed.values())
    assert left(engine) == ({} if days_ago is None else {"young-": 1_000})


def test_two_hundred_windows_do_not_read_the_table_two_hundred_times(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    windows = {f"s{number}": timedelta(days=30 + number) for number in range(200)}
    for days_ago, name in ((400, "old-"), (1, "young-")):
        run(
            engine,
            "INSERT INTO processed_message (subscriber_id, message_id, processed_at) "
            "SELECT 's' || number %% 200, %s || number, now() - make_interval(days => %s) "
            "FROM generate_series(1, 60000) AS number",
            (name, days_ago),
        )
    run(
        engine,
        "INSERT INTO processed_message (subscriber_id, message_id, processed_at) "
        "SELECT 's' || number, 'due' || number, now() - make_interval(days => 31 + number) "
        "FROM generate_series(0, 199) AS number",
    )
    seen: Counter[int] = Counter()

    @event.listens_for(engine, "after_cursor_execute")  # not of one that took too long, and is made smaller
    def note(_connection: object, _cursor: object, statement: str, parameters: dict[str, str], *_: object) -> None:
        if "DELETE FROM processed_message" in statement:
            first, beyond = (int(parameters[name].strip("()").partition(",")[0]) for name in ("first", "beyond"))
            seen.update(range(first, beyond))

    assert make_maintainer(Retention(inbox=windows)).run_once().removed["inbox"] == 60_200
    assert left(engine) == {"young-": 60_000}
    assert max(seen.values()) <= 20, "a few cursors, and the second one"


# --- staging tables of bulk loads ------------------------------------------------------------------------------------


def stage(engine: Engine, run_id: str, state: str | None, *, partitions: int = 2) -> str:
    """Leave the staging table of a run behind; its state: a pair of finished_at and heartbeat_at, None: no such run."""
    name = f"bulk_load_staging_{run_id}_1"
    run(engine, f"CREATE TABLE {name} (message_id text) PARTITION BY RANGE (message_id)")
    for number in range(partitions):
        bounds = f"FROM ('{number:03}') TO ('{number + 1:03}')"
        run(engine, f"CREATE UNLOGGED TABLE {name}_{number} PARTITION OF {name} FOR VALUES {bounds}")
    if state is not None:
        run(
            engine,
            "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds, staging_table, "
            f"finished_at, heartbeat_at) VALUES (%s, 'billing', 's', '', 'jdbc', 1, '[]', %s, {state})",
            (run_id, name),
        )
    return name


def staged(engine: Engine) -> set[str]:
    names = "SELECT array_agg(relname) FROM pg_class WHERE relname LIKE 'bulk_load_staging%%' AND NOT relispartition"
    return set(found(engine, f"{names} AND relnamespace = current_schema()::regnamespace") or ())


def test_staging_tables_go_but_those_of_loads_that_work_or_may_be_resumed(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    finished = stage(engine, "a" * 12, "now(), now()", partitions=70)
    unknown = stage(engine, "b" * 12, None)
    at_work = stage(engine, "c" * 12, "NULL, now()")
    crashed = stage(engine, "d" * 12, "NULL, now() - interval '3 hours'")
    run(engine, "CREATE TABLE bulk_load_staging_mine (n int)")
    mine = "bulk_load_staging_mine"
    assert staged(engine) == {finished, unknown, at_work, crashed, mine}
    for retention, gone in ((Retention(), {finished, unknown}), (Retention(staging=HOUR), {crashed})):
        before, maintainer = staged(engine), make_maintainer(retention)
        assert {one.task: one.rows for one in maintainer.plan()}["staging"] == len(gone)
        assert staged(engine) == before, "a plan drops nothing"
        assert maintainer.run_once().removed["staging"] == len(gone)
        assert staged(engine) == before - gone
    assert staged(engine) == {at_work, mine}
    assert found(engine, "SELECT removed FROM maintenance WHERE task = 'staging'") == 3
    assert found(engine, "SELECT count(*) FROM pg_class WHERE relname LIKE %s", "bulk_load_staging_aaa%") == 0


def test_a_staging_table_that_is_locked_keeps_none_of_the_others(
    engine: Engine, make_maintainer: StartMaintainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.maintenance.transactions.LOCK_MS", 10)
    monkeypatch.setattr("txbox.maintenance.transactions.RUNS", 1)
    locked, free = (stage(engine, letter * 12, "now(), now()") for letter in "ab")
    with engine.connect() as executor:
        executor.exec_driver_sql(f"SELECT FROM {locked}")
        report = make_maintainer().run_once()
        assert "lock timeout" in report.failed["staging"]
        assert report.removed["workers"] == 0, "the others are done"
    assert staged(engine) == {locked}
    assert not make_maintainer().run_once().failed
    assert staged(engine) == set()
    assert free not in staged(engine)
