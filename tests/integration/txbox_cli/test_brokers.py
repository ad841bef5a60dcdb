"""A broker of another package, whose queues are directories: each command that takes a queue finds it by its scheme."""

import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine

from support.directory_broker import DirectorySource, install, write
from support.program import Ended, Running
from support.waiting import wait_until
from txbox import DeadLetter, DeadLetters, Inbox, InvalidConfiguration, Outbox, Reason
from txbox.dead_letters import LetterFilter, LetterOperations, OperationKind
from txbox.outbox import status
from txbox_cli.queue_collector import QueueCollector
from txbox_dashboard.letter_runner import LetterRunner
from txbox_dashboard.settings import DashboardSettings
from txbox_workers.brokers import DatabasePlace, broker_entry, broker_of, scheme

TESTS = Path(__file__).parents[2]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A queue whose package is installed: here, and for the processes that this one starts."""
    installed, folder = install(tmp_path / "site"), tmp_path / "purchases"
    folder.mkdir()
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", f"{installed}:{TESTS}:{os.environ.get('PYTHONPATH', '')}")
    return f"dir:{folder}"


def test_a_worker_parks_what_it_cannot_read_and_redrive_sends_it_back(
    queue: str, tmp_path: Path, txbox: Callable[..., Ended], schema_url: str, engine: Engine
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (id text, cents bigint)")
    (tmp_path / "a.sql").write_text("INSERT INTO account SELECT message_id, cents FROM fresh_event")
    write(queue, "good", b'{"cents": 1}', {})
    write(queue, "bad", b"no JSON", {"tenant": "t-1", "key": "ann"})
    assert "queue: 2 waiting, 0 delivered" in txbox("status", "--queue", queue).out
    options = ["--queue", queue, "--subscriber", "billing", "--apply", "a.sql", "--fields", "cents bigint"]
    with Running("worker", *options, "--visibility-seconds", "7", "--url", schema_url, cwd=tmp_path) as running:
        running.says(f"billing works on {queue}")
        wait_until(lambda: not any(Path(queue[4:]).iterdir()))
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT id, cents FROM account").all() == [("good", 1)]
    (letter,) = DeadLetters(engine).list()
    assert (letter.source, letter.message_id) == (queue, "bad")
    assert "1 sent" in txbox("dead-letters", "redrive", "--all").out
    with closing(DirectorySource(queue)) as source:
        (again,) = source.receive()
    assert (again.message.id, again.body, again.order_key) == ("bad", b"no JSON", "ann")
    assert again.message.headers["tenant"] == "t-1"


def test_a_relay_sends_to_it(queue: str, schema_url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        message_id = Outbox().publish(connection, queue, b"\x00\xff", key="ann", headers={"tenant": "t-1"})
    with Running("relay", "--url", schema_url) as running, closing(DirectorySource(queue)) as source:
        running.says("to dir, sqs, sns, eventbridge")
        (sent,) = wait_until(source.receive)
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    assert (sent.message.id, sent.message.body, sent.order_key) == (message_id, b"\x00\xff", "ann")
    assert sent.message.headers["tenant"] == "t-1"


def test_a_relay_sends_to_the_others_if_one_cannot_be_imported(
    queue: str, tmp_path: Path, txbox: Callable[..., Ended], schema_url: str, engine: Engine
) -> None:
    install(tmp_path / "site", name="broken", value="no_such_module:Broker")
    with engine.begin() as connection:
        Outbox().publish(connection, queue, b"{}")
    with Running("relay", "--url", schema_url) as running, closing(DirectorySource(queue)) as source:
        running.says("to dir, sqs, sns, eventbridge")
        wait_until(source.receive)
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    why = "no_such_module:Broker cannot be used: ModuleNotFoundError: No module named 'no_such_module'"
    assert f"txbox: broken: {why}; what is sent to it waits\n" in running.err
    txbox("status", "--queue", "broken:purchases").failed_in_one_line(1, why)


def test_the_dashboard_sends_letters_back_to_it(queue: str, engine: Engine) -> None:
    letters = DeadLetters(engine)
    letters.park(DeadLetter("billing", "m", Reason.FAILED, "ValueError: no stock", 3, source=queue, body=b"{}"))
    operation = LetterOperations(engine).select(LetterFilter(), OperationKind.REDRIVE, by="anna")
    assert operation is not None
    runner = LetterRunner(engine, DashboardSettings(None, "", False, None, None, False, None, None, None))
    runner.start(operation.operation_id, "anna")
    wait_until(lambda: not runner.running())
    assert runner.error(operation.operation_id) is None
    with closing(DirectorySource(queue)) as source:
        assert [one.message.id for one in source.receive()] == ["m"]


def test_the_exporter_asks_it_for_its_backlog(queue: str, engine: Engine) -> None:
    write(queue, "m", b"{}", {})
    registry = CollectorRegistry()
    queues = [queue, f"{queue}-not"]
    registry.register(QueueCollector(queues, DatabasePlace(engine), interval_seconds=1e-9, limit_seconds=20))
    labels = {"source": queue, "state": "waiting"}
    assert registry.get_sample_value("txbox_queue_messages", labels) == 1
    assert registry.get_sample_value("txbox_queue_up", {"source": f"{queue}-not"}) == 0


def test_a_queue_of_no_installed_package_is_refused_before_anything_is_done(
    txbox: Callable[..., Ended], queue: str
) -> None:
    asked = txbox("status", "--queue", "kafka:purchases")
    asked.failed_in_one_line(
        2, "--queue: no installed package has the queue 'kafka:purchases': they offer dir, inbox, sqs, and not kafka"
    )
    txbox("status", "--queue", "purchases").failed_in_one_line(2, "--queue must be the URL of a queue")


def test_a_queue_is_found_by_its_scheme_and_nothing_is_imported_for_that(queue: str) -> None:
    assert broker_entry(queue).value == "support.directory_broker:DirectoryBroker"
    assert type(broker_of("https://sqs.eu-central-1.amazonaws.com/123456789012/purchases")).__name__ == "SqsBroker"
    assert [scheme(name) for name in (queue, "https://HOST/1/a", "http://HOST/1/a")] == ["dir", "sqs", "sqs"]
    for name in ("memory", "", "dir:", "dir: ", "Dir:/a"):
        with pytest.raises(InvalidConfiguration, match="names no queue"):
            scheme(name)


def test_the_outbox_is_the_queue_of_each_subscriber(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, letter = (
        broker_of("inbox:billing"),
        DeadLetter("billing", "m", Reason.FAILED, "no", 3, "inbox:billing", b"{}"),
    )
    assert broker.publishers() == {}
    queue = broker.queue("inbox:billing", DatabasePlace(engine))
    assert queue.backlog() == {"waiting": 0, "delayed": 0}
    queue.send_back(letter)
    with engine.begin() as connection:
        Outbox().publish(connection, "inbox:billing", "{}", delay=3600)
        Outbox().publish(connection, "inbox:shipping", "{}")
    assert queue.backlog() == {"waiting": 1, "delayed": 1}
    monkeypatch.setattr(status, "COUNTED_MESSAGES", 1)
    assert sum(queue.backlog().values()) >= 1, "estimated"
    with pytest.raises(InvalidConfiguration, match="send it to its source, dir:/a"):
        queue.send_back(replace(letter, source="dir:/a"))
    with pytest.raises(InvalidConfiguration, match="the name behind inbox:"):
        broker.queue(f"inbox:{'x' * 2000}", DatabasePlace(engine))
    registry = CollectorRegistry()
    registry.register(
        QueueCollector(["inbox:shipping"], DatabasePlace(engine), interval_seconds=1e-9, limit_seconds=20)
    )
    assert registry.get_sample_value("txbox_queue_messages", {"source": "inbox:shipping", "state": "waiting"}) == 1


def test_an_inbox_destination_is_for_its_subscriber_alone(engine: Engine) -> None:
    broker = broker_of("inbox:billing")
    with pytest.raises(InvalidConfiguration, match="take inbox:shipping, or the subscriber billing"):
        broker.worker("inbox:billing", visibility_seconds=None, inbox=Inbox("shipping"), engine=engine)
    with pytest.raises(InvalidConfiguration, match="needs inbox="):
        broker.worker("inbox:billing", visibility_seconds=None, engine=engine)


def test_a_worker_for_the_outbox_parks_what_it_cannot_read_and_a_redrive_has_it_run(
    tmp_path: Path, txbox: Callable[..., Ended], schema_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TXBOX_DATABASE_URL")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (id text, cents bigint)")
        Outbox().publish(connection, "inbox:billing", b"no JSON", "ann", {"tenant": "t-1"}, "bad")
        Outbox().publish(connection, "inbox:billing", b'{"cents": 1}', message_id="good")
    (tmp_path / "a.sql").write_text("INSERT INTO account SELECT message_id, cents FROM fresh_event")
    options = ["--queue", "inbox:billing", "--subscriber", "billing", "--apply", "a.sql", "--fields", "cents bigint"]
    with Running("worker", *options, "--url", schema_url, cwd=tmp_path) as running:
        running.says("billing works on inbox:billing")
        (letter,) = wait_until(DeadLetters(engine).list)
        assert (letter.source, letter.envelope, letter.headers["tenant"]) == ("inbox:billing", {"key": "ann"}, "t-1")
        redriven = txbox("dead-letters", "redrive", "--all", "--url", schema_url)
        assert (redriven.out, redriven.err) == ("1 sent through again\n", "")
        (again,) = wait_until(DeadLetters(engine).list)
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    kept = ("message_id", "body", "headers", "envelope", "source")
    assert [getattr(again, name) for name in kept] == [getattr(letter, name) for name in kept]
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT id, cents FROM account").all() == [("good", 1)]
