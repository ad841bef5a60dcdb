"""What the status says of what is kept and forgotten."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, Engine, event

from integration.txbox.maintenance.conftest import KEPT, StartMaintainer, found, record
from support.postgres.statements import run
from support.program import Ended
from support.waiting import wait_until
from txbox.instrumentation import DatabaseLost, DatabaseRestored, Event, RunwayRead
from txbox.instrumentation.prometheus import PrometheusHook
from txbox.maintenance import Retention
from txbox.maintenance.rotation import InboxConversion
from txbox.status import Runway, RunwayReporter, read_status
from txbox_cli.app import run as run_program

BILLING = Retention(inbox={"billing": KEPT})


@pytest.fixture
def txbox(schema_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    monkeypatch.setenv("TXBOX_DATABASE_URL", schema_url)

    def txbox(*arguments: str) -> Ended:
        capsys.readouterr()
        return Ended(run_program(list(arguments)), *capsys.readouterr())

    return txbox


def runway(engine: Engine) -> Runway:
    found = read_status(engine).runway
    assert found is not None
    return found


def days_ago(at: datetime | None) -> float:
    assert at is not None
    return (datetime.now(UTC) - at) / timedelta(days=1)


def test_there_is_none_where_nothing_is_forgotten(engine: Engine, txbox: Callable[..., Ended]) -> None:
    record(engine, "billing", "m-", 10, days_ago=100)
    assert read_status(engine).runway is None
    assert "maintenance" not in txbox("status").out


def test_it_says_how_far_back_a_subscriber_remembers(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "gone-", 40_000, days_ago=40)
    record(engine, "billing", "oldest-", 10, days_ago=29)
    record(engine, "billing", "young-", 40_000, days_ago=1)
    make_maintainer(BILLING).run_once()
    now = runway(engine)
    (line,) = now.horizons
    assert line.subscriber_id == "billing"
    assert days_ago(line.horizon) == pytest.approx(30, abs=0.01)
    assert days_ago(line.oldest_at) == pytest.approx(29, abs=0.01)
    assert now.inbox_bytes == found(engine, "SELECT pg_total_relation_size('processed_message')")
    assert (now.overdue, now.at_work) == (False, False)
    assert now.seconds_ago is not None
    assert now.seconds_ago < 60
    assert {one.task: one.removed for one in now.tasks}["inbox"] == 40_000


def test_a_maintainer_that_does_not_run_shows_within_minutes(
    engine: Engine, make_maintainer: StartMaintainer, txbox: Callable[..., Ended]
) -> None:
    record(engine, "billing", "m-", 10, days_ago=1)
    maintainer = make_maintainer(BILLING)
    maintainer.start()
    try:
        wait_until(lambda: (line := read_status(engine).runway) is not None and line.at_work)
    finally:
        assert maintainer.stop(20)
    make_maintainer(BILLING).run_once()
    assert " ago, by " in txbox("status").out
    run(engine, "UPDATE maintenance SET finished_at = finished_at - interval '6 minutes'")
    assert runway(engine).overdue
    assert "it has not run for 6 min" in txbox("status").out
    read = json.loads(txbox("status", "--json").out)["runway"]
    assert (read["overdue"], read["horizons"][0]["subscriber_id"]) == (True, "billing")


def test_generations_are_listed_with_their_sizes_and_when_the_next_is_due(
    engine: Engine, make_maintainer: StartMaintainer, txbox: Callable[..., Ended]
) -> None:
    assert InboxConversion(engine).forward()
    record(engine, "billing", "m-", 1_000, days_ago=0)
    make_maintainer(BILLING).run_once()
    now = runway(engine)
    assert now.inbox_bytes == found(
        engine, "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('processed_message')"
    )
    assert now.generations[-1].closed_at is None
    assert now.generations[-1].bytes > 0
    assert now.rotation_due_seconds == pytest.approx(10 * 86_400, abs=60)
    assert "the next generation is due in 9 d 23 h" in txbox("status").out


# --- as events and metrics -------------------------------------------------------------------------------------------


def test_the_metrics_show_a_maintainer_that_is_gone_while_none_runs(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    record(engine, "billing", "m-", 1_000, days_ago=10)
    registry = CollectorRegistry()
    hook = PrometheusHook(registry)

    def value(name: str, subscriber: str = "txbox:maintenance", **labels: str) -> float:
        sample = registry.get_sample_value(name, {"subscriber": subscriber, **labels})
        assert sample is not None
        return sample

    make_maintainer(BILLING, hooks=[hook]).run_once()
    assert 0 <= value("txbox_maintenance_age_seconds") < 60
    assert value("txbox_horizon_age_seconds", "billing") == pytest.approx(KEPT.total_seconds(), abs=60)
    assert value("txbox_oldest_id_age_seconds", "billing") == pytest.approx(10 * 86_400, abs=60)
    assert value("txbox_inbox_bytes", generation="0") == found(
        engine, "SELECT pg_total_relation_size('processed_message')"
    )
    run(engine, "UPDATE maintenance SET finished_at = finished_at - interval '6 minutes'")
    reporter = RunwayReporter(engine, interval_seconds=0.05, hooks=[hook])
    reporter.start()
    try:
        assert value("txbox_maintenance_age_seconds") >= 360, "it is read at the start"
        run(engine, "UPDATE maintenance SET finished_at = finished_at - interval '6 minutes'")
        wait_until(lambda: value("txbox_maintenance_age_seconds") >= 720, "it is read again")
    finally:
        assert reporter.stop(20)


def test_a_reporter_tells_of_an_outage_and_goes_on(engine: Engine, make_maintainer: StartMaintainer) -> None:
    make_maintainer().run_once()
    events: list[Event] = []
    cut_off, is_cut = engine.execution_options(), [False]

    @event.listens_for(cut_off, "begin")
    def begin(connection: Connection) -> None:
        if is_cut[0]:
            connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")

    reporter = RunwayReporter(cut_off, interval_seconds=0.05, hooks=[events.append])
    reporter.start()
    try:
        is_cut[0] = True
        wait_until(lambda: any(isinstance(one, DatabaseLost) for one in events), "the outage is told")
        is_cut[0] = False
        wait_until(lambda: any(isinstance(one, DatabaseRestored) for one in events), "it goes on by itself")
    finally:
        assert reporter.stop(20)


def test_where_nothing_is_forgotten_nothing_is_told(engine: Engine) -> None:
    events: list[Event] = []
    assert RunwayReporter(engine, hooks=[events.append]).run_once() is None
    assert events == []


def test_generations_and_the_next_rotation_are_in_the_event(engine: Engine, make_maintainer: StartMaintainer) -> None:
    assert InboxConversion(engine).forward()
    record(engine, "billing", "m-", 1_000, days_ago=0)
    make_maintainer(BILLING).run_once()
    run(engine, "UPDATE inbox_generation SET opened_at = opened_at - interval '11 days'")
    run(engine, "ANALYZE processed_message")
    events: list[Event] = []
    make_maintainer(BILLING, hooks=[events.append]).run_once()
    (told,) = [one for one in events if isinstance(one, RunwayRead)]
    assert [rows for rows, _ in told.generations] == [0, 1_000], "the newest first"
    assert told.rotation_due_seconds == pytest.approx(10 * 86_400, abs=60)


def test_one_that_waits_for_another_tells_of_the_runway_too(engine: Engine, make_maintainer: StartMaintainer) -> None:
    make_maintainer(BILLING).run_once()
    assert make_maintainer()._transactions.acquire()
    events: list[Event] = []
    assert not make_maintainer(BILLING, hooks=[events.append]).run_once().worked
    assert [type(one) for one in events] == [RunwayRead]


def test_it_says_what_a_maintainer_waits_for(
    engine: Engine, make_maintainer: StartMaintainer, txbox: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.maintenance.maintainer.SETTLE_SECONDS", 0.1)
    InboxConversion(engine).forward()
    record(engine, "forever", "f-", 10, days_ago=0)
    record(engine, "billing", "m-", 10, days_ago=0)
    with engine.connect() as other:
        pid = other.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        make_maintainer(BILLING).run_once()
        said = txbox("status").out
        assert f"server processes {pid}; wait, or end one by SELECT pg_terminate_backend({pid})" in said
        assert "maintenance: rotation is not done: 1 of the subscribers" in said
        assert json.loads(txbox("status", "--json").out)["runway"]["waits_for"] == [pid]
    assert "server processes" not in txbox("status").out
