"""What workers report of each minute: exact sums, whatever becomes of a report; and how old is what they receive."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection, Engine, event

from support.postgres.statements import run
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.business import Business
from support.workers.memory_worker import at_work, feed, make, numbered, work_off
from txbox import Message
from txbox.instrumentation import Received
from txbox.status import ActivitySeries, read_activity, read_status
from txbox_workers import reporter
from txbox_workers.memory_source import MemorySource
from txbox_workers.reporter import ReportStatements


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports every few milliseconds."""
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 0.01)


def series(engine: Engine, **options: object) -> tuple[ActivitySeries, ...]:
    with engine.connect() as connection:
        return read_activity(connection, "subscriber", **options)  # type: ignore[arg-type]


def totals(engine: Engine) -> dict[tuple[str, str], int]:
    return {(one.name, one.figure): sum(one.counts) for one in series(engine)}


def test_workers_of_one_subscriber_add_up_also_at_the_same_time(engine: Engine, business: Business) -> None:
    sources = [MemorySource([*numbered(200, prefix), *numbered(40, prefix)], batch_size=5) for prefix in "abc"]
    with at_work(*(make(source, engine, threads=2) for source in sources)):
        assert all(source.wait_until_empty(60) for source in sources)
    assert totals(engine) == {("billing", "processed"): 600, ("billing", "duplicate"): 120}


def test_a_worker_that_is_started_again_adds_what_is_new(engine: Engine, business: Business) -> None:
    source = MemorySource(numbered(10))
    worker = work_off(source, engine)
    feed(source, numbered(5, "later"))
    with at_work(worker):
        assert source.wait_until_empty(20)
    assert totals(engine) == {("billing", "processed"): 15}


def test_a_report_whose_answer_is_lost_is_not_added_twice(engine: Engine, business: Business) -> None:
    lost: Counter[str] = Counter()

    def lose(connection: object) -> None:
        # The commit goes through, and the client is told that it did not.
        if reporting.get("it"):
            reporting["it"] = 0
            lost["answers"] += 1
            connection.connection.dbapi_connection.commit()  # type: ignore[attr-defined]
            raise ConnectionError("the answer is lost")

    reporting: Counter[str] = Counter()

    def note(_c: object, _cursor: object, statement: str, *_: object) -> None:
        if "reported_activity" in statement and "INSERT" in statement and lost["answers"] < 5:
            reporting["it"] = 1

    event.listen(engine, "after_cursor_execute", note)
    event.listen(engine, "commit", lose)
    source = MemorySource(numbered(50), batch_size=5)
    with at_work(make(source, engine)):
        assert source.wait_until_empty(20)
        wait_until(lambda: lost["answers"] == 5)
    assert totals(engine) == {("billing", "processed"): 50}


@pytest.mark.parametrize("reported_before", [True, False])
def test_a_report_whose_commit_arrives_late_is_not_added_twice(
    engine: Engine, pool: ThreadPoolExecutor, *, reported_before: bool
) -> None:
    sql = ReportStatements.load()
    values = {
        **dict.fromkeys(("source_retention_seconds", "last_batch_seconds_ago", "oldest_sent_at")),
        "worker_id": "w",
        "subscriber_id": "billing",
        "source": "s",
        "host": "h",
        "pid": 1,
        "version": "1",
        "state": "working",
        "per_second": "{}",
        "deadlocks": 0,
        "retries": 0,
        "counted_before": "{}",
    }

    def report(connection: Connection, processed: int) -> None:
        connection.exec_driver_sql(sql.bind_report, values)
        connection.exec_driver_sql(sql.report, {**values, "outcomes": f'{{"processed": {processed}}}'})

    def report_again() -> None:
        with engine.begin() as connection:
            report(connection, 100)

    if reported_before:
        with engine.begin() as connection:
            report(connection, 10)
    with engine.begin() as late:
        report(late, 100)
        again = pool.submit(report_again)
        wait_until(lambda: blocked(engine))
    again.result(20)
    assert totals(engine) == {("billing", "processed"): 100}


def blocked(engine: Engine) -> bool:
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%report%%' "
            "OR wait_event = 'advisory'"
        )
        return bool(found.scalar_one())


@pytest.mark.parametrize(
    ("minutes_ago", "told"), [([None], None), ([None, 2, 5], 300.0), ([-5], 0.0)], ids=["unknown", "oldest", "ahead"]
)
def test_the_age_of_the_oldest_message_of_a_batch(
    engine: Engine, minutes_ago: list[int | None], told: float | None
) -> None:
    now = datetime.now(UTC)
    sent = [None if one is None else now - timedelta(minutes=one) for one in minutes_ago]
    kept = Kept()
    source = MemorySource([Message(str(number), b"", sent_at=at) for number, at in enumerate(sent)])
    work_off(source, engine, handler=lambda *_: None, hooks=[kept])
    (event,) = kept.of(Received)
    assert event.oldest_seconds == (None if told is None else pytest.approx(told, abs=60))
    if told == 0:
        assert event.oldest_seconds == 0


def test_how_long_the_oldest_message_of_a_batch_has_waited(engine: Engine, business: Business) -> None:
    sent_at = datetime.now(UTC) - timedelta(hours=2)
    (message,) = numbered(1)
    source = MemorySource([type(message)(message.id, b"", {}, sent_at=sent_at)])
    with at_work(make(source, engine)):
        (worker,) = wait_until(lambda: [one for one in read_status(engine).workers if one.outcomes])
    assert worker.oldest_sent_at == sent_at


def test_a_worker_that_ends_deletes_what_is_old_of_its_subscriber(engine: Engine, business: Business) -> None:
    run(
        engine,
        "INSERT INTO reported_activity (kind, name, minute, figure, count) "
        "SELECT 'subscriber', name, now() - age, 'processed', 1 "
        "FROM unnest(ARRAY['billing', 'other']) AS name, unnest(ARRAY['6 days', '8 days']::interval[]) AS age",
    )
    work_off(MemorySource(numbered(1)), engine)
    with engine.connect() as connection:
        left = connection.exec_driver_sql(
            "SELECT name, count(*) FROM reported_activity WHERE minute < now() - interval '1 day' GROUP BY name"
        )
        assert dict(left.all()) == {"billing": 1, "other": 2}  # type: ignore[arg-type]


def test_stretches_begin_at_multiples_of_their_length_and_the_newest_is_last(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO reported_activity (kind, name, minute, figure, count) "
            "SELECT 'subscriber', name, date_trunc('minute', now()) - make_interval(mins => ago), 'processed', ago + 1 "
            "FROM unnest(ARRAY['a', 'b', '']) AS name, generate_series(0, 400) AS ago"
        )
        found = read_activity(connection, "subscriber", hours=3, stretches=60)
        (one,) = read_activity(connection, "subscriber", name="a", hours=1, stretches=60)
        now: datetime = connection.exec_driver_sql("SELECT date_trunc('minute', now())").scalar_one()
    assert [(each.name, each.stretch_seconds, len(each.counts)) for each in found] == [
        (name, 180, 60) for name in ("", "a", "b")
    ]
    assert found[0].begins_at.timestamp() % 180 == 0
    assert one.counts == tuple(range(60, 0, -1))
    assert one.begins_at == now - timedelta(minutes=59)


def test_times_without_a_zone_keep_no_batch_from_being_processed(engine: Engine, business: Business) -> None:
    first, second = numbered(2)
    zones = (datetime(2026, 1, 1), datetime.now(UTC))  # noqa: DTZ001 - what a careless source gives
    source = MemorySource(
        [type(one)(one.id, b"", {}, sent_at=at) for one, at in zip((first, second), zones, strict=True)], batch_size=2
    )
    work_off(source, engine)
