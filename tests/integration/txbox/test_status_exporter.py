"""What a scrape finds in a real database, and what it leaves out."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from support.postgres.roles import restricted
from support.postgres.statements import run
from support.postgres.tcp_proxy import TcpProxy
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make
from txbox import DeadLetter, DeadLetters, Failures, Outbox, Reason, RightsMissing
from txbox.status import read_status
from txbox.status.exporter import figures
from txbox.status.exporter.prometheus import CHECK_SECONDS, DatabaseCollector
from txbox_workers.memory_source import MemorySource

HOSTILE = 'a"b\\c\nd{e="f"} 1'


def scrape(collector: DatabaseCollector) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    registry = CollectorRegistry()
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(one.name, frozenset(one.labels.items())): one.value for each in families for one in each.samples}


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"txbox_{name}", frozenset(labels.items())


def schema_of(engine: Engine) -> str:
    with engine.connect() as connection:
        return connection.exec_driver_sql("SELECT current_schema()").scalar_one()


def fill(engine: Engine) -> None:
    letters = DeadLetters(engine)
    for number in range(3):
        letters.park(DeadLetter(HOSTILE, str(number), Reason.FAILED, "error", 1, "queue", b"{}"))
    letters.park(DeadLetter("other", "1", Reason.MISMATCH, "error", 1, "queue", b"{}"))
    Failures(engine, "billing").fail("1", ValueError("no"))
    with engine.begin() as connection:
        for number in range(2):
            Outbox().publish(connection, f"sqs:{HOSTILE}", f"{number}")


def test_hostile_names_are_labels(engine: Engine) -> None:
    fill(engine)
    found = scrape(DatabaseCollector(engine))
    assert found[key("dead_letters", subscriber=HOSTILE, reason="failed")] == 3
    assert found[key("dead_letters", subscriber="other", reason="mismatch")] == 1
    assert found[key("messages_retrying", subscriber="billing")] == 1
    assert found[key("outbox_messages", destination=f"sqs:{HOSTILE}", state="waiting")] == 2
    assert found[key("outbox_oldest_seconds", destination=f"sqs:{HOSTILE}")] >= 0
    assert found[key("exporter_up")] == 1
    succeeded = {labels: value for (name, labels), value in found.items() if name == "txbox_exporter_read_success"}
    assert len(succeeded) == 9
    assert set(succeeded.values()) == {1}


def test_of_many_letters_a_bounded_number_is_counted_for_each_subscriber(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(engine)
    monkeypatch.setattr(figures, "COUNTED_ROWS", 2)
    found = scrape(DatabaseCollector(engine))
    assert found[key("dead_letters", subscriber=HOSTILE, reason="failed")] == 2
    assert found[key("dead_letters", subscriber="other", reason="mismatch")] == 1
    assert found[key("exporter_exact", part="dead_letters")] == 0


def test_a_locked_table_costs_its_own_figures_only(engine: Engine) -> None:
    fill(engine)
    collector = DatabaseCollector(engine, interval_seconds=1e-9)
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE outbox_message"))
        found = scrape(collector)
    assert found[key("exporter_read_success", part="outbox")] == 0
    assert not [name for name, _ in found if name == "txbox_outbox_messages"]
    assert found[key("dead_letters", subscriber="other", reason="mismatch")] == 1
    assert scrape(collector)[key("exporter_read_success", part="outbox")] == 1


def test_what_is_not_read_within_the_limit_is_left_out_and_takes_no_time_from_others(engine: Engine) -> None:
    fill(engine)
    run(
        engine,
        "ALTER TABLE message_failure RENAME TO real_failure; "
        "CREATE VIEW message_failure AS SELECT real_failure.* FROM real_failure, pg_sleep(30)",
    )
    collector = DatabaseCollector(engine, interval_seconds=1e-9, limit_seconds=1.0)
    for others in (0, 1):  # the first time, what comes after it has no time left
        began = time.monotonic()
        found = scrape(collector)
        assert time.monotonic() - began < 3
        assert found[key("exporter_up")] == 1
        assert found[key("exporter_read_success", part="retrying")] == 0
        assert not [name for name, _ in found if name == "txbox_messages_retrying"]
        assert found[key("exporter_read_success", part="workers")] == others
        assert found[key("dead_letters", subscriber="other", reason="mismatch")] == 1


def test_several_statements_have_one_limit(engine: Engine) -> None:
    reader = figures.FiguresReader(engine, None, "")
    with (
        pytest.raises(DBAPIError, match="canceling statement due to user request"),
        reader._bounded(time.monotonic() + 0.5) as connection,
    ):
        list(map(connection.exec_driver_sql, ["SELECT pg_sleep(0.2)"] * 10))
    with reader._bounded(time.monotonic() + 5) as connection:
        connection.exec_driver_sql("SELECT 1")


def test_a_server_that_gives_no_answer_costs_no_more_than_the_limit(proxied: Engine, proxy: TcpProxy) -> None:
    collector = DatabaseCollector(proxied, interval_seconds=1e-9, limit_seconds=1.0)
    assert scrape(collector)[key("exporter_up")] == 1
    proxy.swallow_replies()
    began = time.monotonic()
    assert scrape(collector)[key("exporter_up")] == 0
    assert not collector.database_answers()
    assert time.monotonic() - began < 1 + CHECK_SECONDS + 2
    proxy.accept()
    proxy.cut()
    wait_until(lambda: scrape(collector)[key("exporter_up")] == 1, timeout=20)


def test_reported_activity_that_is_locked_keeps_neither_a_scrape_nor_the_status_waiting(engine: Engine) -> None:
    fill(engine)
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE reported_activity"))
        began = time.monotonic()
        found = scrape(DatabaseCollector(engine))
        assert {one.subscriber_id for one in read_status(engine).subscribers} >= {"billing", "other"}
        assert time.monotonic() - began < 5
    assert {value for (name, _), value in found.items() if name == "txbox_exporter_read_success"} == {1}


def test_a_right_that_is_missing_is_named_with_its_grant(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    fill(engine)
    with restricted(engine, "SELECT ON worker_report") as limited:
        found = scrape(DatabaseCollector(limited))
        with pytest.raises(RightsMissing, match="GRANT SELECT ON worker_report TO this user"):
            read_status(limited)
    assert found[key("exporter_read_success", part="workers")] == 0
    assert found[key("dead_letters", subscriber="other", reason="mismatch")] == 1
    assert "workers cannot be read: the right to SELECT on worker_report is lacking; GRANT SELECT" in caplog.text


def test_a_role_that_may_only_read_is_enough(engine: Engine) -> None:
    fill(engine)
    with restricted(engine, "INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA " + schema_of(engine)) as reader:
        found = scrape(DatabaseCollector(reader))
        read_status(reader)
    assert {value for (name, _), value in found.items() if name == "txbox_exporter_read_success"} == {1}


@pytest.mark.parametrize(("ago", "shown"), [("10 seconds", True), ("2 minutes", False)])
def test_the_age_of_what_workers_receive_is_shown_while_it_says_something(
    engine: Engine, ago: str, shown: bool
) -> None:
    with at_work(make(MemorySource(), engine)):
        wait_until(lambda: scrape(DatabaseCollector(engine)).get(key("workers", subscriber="billing", state="working")))
        run(
            engine,
            f"UPDATE worker_report SET last_batch_at = now() - interval '{ago}', "
            f"oldest_sent_at = now() - interval '{ago}' - interval '7 minutes', seen_at = now() + interval '1 minute'",
        )
        found = scrape(DatabaseCollector(engine)).get(key("workers_received_age_seconds", subscriber="billing"))
    assert found == (pytest.approx(420) if shown else None)


def test_without_the_database_nothing_is_left_of_before(engine: Engine) -> None:
    fill(engine)
    collector = DatabaseCollector(engine, interval_seconds=1e-9)
    assert scrape(collector)[key("exporter_up")] == 1
    reader, away = collector._reader, create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    collector._reader = figures.FiguresReader(away, None, "")
    found = scrape(collector)
    assert {name for name, _ in found} == {"txbox_exporter_up", "txbox_exporter_read_age_seconds"}
    assert found[key("exporter_up")] == 0
    collector._reader = reader
    assert scrape(collector)[key("exporter_up")] == 1


def test_scrapes_at_once_share_one_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    reads = []
    read = figures.FiguresReader.read
    monkeypatch.setattr(figures.FiguresReader, "read", lambda self: reads.append(1) or read(self))
    collector = DatabaseCollector(engine)
    assert len(list(pool.map(lambda _: list(collector.collect()), range(4)))) == 4
    assert len(reads) == 1


def test_what_waits_for_workers_has_no_relays_and_takes_a_time(engine: Engine) -> None:
    with engine.begin() as connection:
        for _ in range(30):
            Outbox().publish(connection, "inbox:billing", "{}")
        connection.exec_driver_sql(
            "INSERT INTO worker_report (worker_id, subscriber_id, source, host, pid, version, state, per_second) "
            "VALUES ('w', 'billing', 'inbox:billing', 'h', 1, '1', 'working', '{\"processed\": 10}')"
        )
    found = scrape(DatabaseCollector(engine))
    assert found[key("outbox_messages", destination="inbox:billing", state="waiting")] == 30
    assert found[key("outbox_oldest_seconds", destination="inbox:billing")] >= 0
    assert found[key("outbox_drain_seconds", destination="inbox:billing")] == 3
    assert key("outbox_unreachable_relays", destination="inbox:billing") not in found
