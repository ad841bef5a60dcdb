"""What a scrape finds in a real database, and what it leaves out."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, create_engine, text

from txbox import DeadLetter, DeadLetters, Failures, Outbox, Reason
from txbox.status.exporter import figures
from txbox.status.exporter.prometheus import DatabaseCollector

HOSTILE = 'a"b\\c\nd{e="f"} 1'


def scrape(collector: DatabaseCollector) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    registry = CollectorRegistry()
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(one.name, frozenset(one.labels.items())): one.value for each in families for one in each.samples}


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"txbox_{name}", frozenset(labels.items())


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
