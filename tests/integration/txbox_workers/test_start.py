"""The start of a worker: what it refuses, and signals and calls that come during it."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from sqlalchemy import Engine

from support.postgres.statements import run
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.business import Business, once
from support.workers.memory_worker import make, messages
from txbox import Inbox, InvalidConfiguration, NotInTransaction, SchemaMissing, TableLocked
from txbox.postgres import transactions
from txbox.relay import Relay
from txbox_workers.memory_source import MemorySource


def test_start_refuses_a_database_that_cannot_be_used(engine: Engine, business: Business) -> None:
    with pytest.raises(NotInTransaction):
        make(MemorySource(), engine.execution_options(isolation_level="AUTOCOMMIT")).start()
    for table in ("processed_message", "message_failure", "dead_letter"):
        run(engine, f"ALTER TABLE {table} RENAME TO elsewhere")
        with pytest.raises(SchemaMissing, match=table):
            make(MemorySource(), engine).start()
        run(engine, f"ALTER TABLE elsewhere RENAME TO {table}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_is_not_forgotten(engine: Engine, business: Business, number: signal.Signals) -> None:
    class Slow(MemorySource):
        def open(self) -> None:
            # Where it would hurt most: while the interrupted code holds the lock of the event that says stop.
            with worker._stopping._cond:
                signal.raise_signal(number)

    before = signal.getsignal(number)
    source = Slow(messages("a"))
    worker = make(source, engine)
    assert worker.run() is True
    assert not worker.running
    assert signal.getsignal(number) is before


def test_signals_are_given_back_when_the_start_fails(engine: Engine, business: Business) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run(engine, "ALTER TABLE processed_message RENAME TO elsewhere")
    with pytest.raises(SchemaMissing):
        make(MemorySource(), engine).run()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("made", ["worker", "relay"])
def test_a_signal_ends_a_start_that_waits_for_a_lock(
    engine: Engine, business: Business, caplog: pytest.LogCaptureFixture, made: str
) -> None:
    service = make(MemorySource(), engine) if made == "worker" else Relay(engine, {"own": RecordingPublisher()})
    asked = threading.Thread(target=lambda: [wait_until(lambda: waiting(engine)), signal.raise_signal(signal.SIGTERM)])
    with engine.connect() as other:
        other.exec_driver_sql("LOCK TABLE dead_letter IN ACCESS EXCLUSIVE MODE")
        asked.start()
        assert service.run(0.5) is False
        assert "while starting" in caplog.text
        with pytest.raises(InvalidConfiguration, match="running already"):
            service.start()
    asked.join()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("txbox-start")])
    assert service.stop(20) is True, "what it has started since has ended"
    asked = threading.Thread(target=service.stop)
    assert service.run(20, started=asked.start) is True, "another start works"
    asked.join()


@pytest.mark.parametrize(
    ("made", "table"),
    [
        *(("worker", table) for table in ("processed_message", "message_failure", "dead_letter", "worker_report")),
        *(("relay", table) for table in ("outbox_message", "outbox_relay", "dead_letter")),
        ("worker", "paused"),
        ("relay", "paused"),
    ],
)
def test_a_start_waits_for_a_locked_table_for_so_long_and_names_it(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch, made: str, table: str
) -> None:
    monkeypatch.setattr(transactions, "LOCK_SECONDS", 0.1)
    service = make(MemorySource(), engine) if made == "worker" else Relay(engine, {"own": RecordingPublisher()})
    with engine.connect() as other:
        other.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(TableLocked, match=f"{table} is locked by another session"):
            service.start()
        assert not service.running
    monkeypatch.undo()
    service.start()
    assert service.stop(20) is True


def waiting(engine: Engine) -> bool:
    """Whether some session waits for the lock on the dead letters."""
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'dead_letter'::regclass"
    with engine.connect() as connection:
        return bool(connection.exec_driver_sql(waits).scalar_one())


def test_of_two_threads_that_start_a_worker_at_once_one_does_and_the_other_is_told(
    engine: Engine, business: Business
) -> None:
    class Slow(MemorySource):
        opened = 0

        def open(self) -> None:
            self.opened += 1
            # Holds the start up where two of them would meet, if they were let in together.
            with suppress(threading.BrokenBarrierError):
                together.wait(1)

    together = threading.Barrier(2)
    source = Slow(messages("a", "b"))
    worker = make(source, engine, inbox=Inbox("started twice"), threads=2)
    with ThreadPoolExecutor(2) as pool:
        errors = [start.exception(20) for start in [pool.submit(worker.start) for _ in range(2)]]
    polling = [thread for thread in threading.enumerate() if thread.name.startswith("txbox-started twice-")]
    assert source.wait_until_empty(20)
    assert worker.stop(20) is True
    assert [type(error) for error in errors if error is not None] == [InvalidConfiguration]
    assert len(polling) == 2, "the threads that were asked for, once"
    assert source.opened == 1
    assert not any(thread.is_alive() for thread in polling), "stop knows all of them"
    assert business.applied() == once("ab")
