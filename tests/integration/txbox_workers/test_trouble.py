"""Trouble that is no message's fault: nothing can be recorded, or no connection is to be had."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from support.postgres.statements import run
from support.txbox.events import Kept, Unloggable
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.memory_worker import at_work, delivery, feed, make, messages, numbered, process, work_off
from txbox import Message, Outcome
from txbox.instrumentation import DatabaseLost, DatabaseRestored, Received
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource
from txbox_workers.processing.outage_errors import DatabaseUnavailable


class Trouble:
    """Makes recording impossible for a while, without the connection being lost."""

    def __init__(self, engine: Engine, schema_url: str) -> None:
        self._admin = engine
        self._role = f"worker_{make_url(schema_url).query['options'].removeprefix('-csearch_path=')}"  # type: ignore[union-attr]
        self.read_only = False
        schema = self._role.removeprefix("worker_")
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE ROLE {self._role}")
            connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {self._role}")
            connection.exec_driver_sql(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {self._role}")
            connection.exec_driver_sql(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO {self._role}")
        url = make_url(schema_url).update_query_dict({"options": f"-csearch_path={schema} -crole={self._role}"})
        self.engine = create_engine(url, poolclass=NullPool)
        event.listen(self.engine, "connect", self._on_connect)

    def _on_connect(self, dbapi_connection: Any, _record: Any) -> None:
        if self.read_only:
            dbapi_connection.execute("SET default_transaction_read_only = on")
            dbapi_connection.commit()

    def begin(self, kind: str) -> None:
        self._change(kind, begins=True)

    def end(self, kind: str) -> None:
        self._change(kind, begins=False)

    def _change(self, kind: str, *, begins: bool) -> None:
        verb, preposition = ("REVOKE", "FROM") if begins else ("GRANT", "TO")
        names = ("processed_message", "elsewhere") if begins else ("elsewhere", "processed_message")
        sql = {
            "renamed": f"ALTER TABLE {names[0]} RENAME TO {names[1]}",
            "insert revoked": f"{verb} INSERT ON processed_message {preposition} {self._role}",
            "everything revoked": f"{verb} ALL ON processed_message {preposition} {self._role}",
            "schema revoked": f"{verb} USAGE ON SCHEMA {self._role.removeprefix('worker_')} {preposition} {self._role}",
        }
        if kind == "read only":
            self.read_only = begins
            return
        run(self._admin, sql[kind])

    def close(self) -> None:
        self.engine.dispose()
        run(self._admin, f"DROP OWNED BY {self._role}")
        run(self._admin, f"DROP ROLE {self._role}")


@pytest.fixture
def trouble(engine: Engine, business: Business, schema_url: str) -> Iterator[Trouble]:
    trouble = Trouble(engine, schema_url)
    yield trouble
    trouble.close()


@pytest.mark.parametrize("kind", ["renamed", "insert revoked", "everything revoked", "schema revoked", "read only"])
def test_trouble_with_recording_is_no_message_s_fault(trouble: Trouble, business: Business, kind: str) -> None:
    kept = Kept()
    source = MemorySource(messages("a", "b"))
    with at_work(make(source, trouble.engine, hooks=[kept], max_attempts=2)):
        assert source.wait_until_empty(20)
        trouble.begin(kind)
        try:
            feed(source, messages("c", "d", "e"))
            wait_until(lambda: len(kept.of(DatabaseLost)) >= 6, "tried again and again")
            deliveries = len(kept.of(Received))
            assert not kept.of(DatabaseRestored)
        finally:
            trouble.end(kind)
        assert deliveries <= 3, "nothing more was taken while nothing could be recorded"
        assert source.wait_until_empty(20)
    assert kept.of(DatabaseRestored)
    assert business.applied() == once("abcde")
    assert business.letters() == {}
    assert business.failing() == {}


def test_trouble_with_recording_does_not_count_against_a_suspect(trouble: Trouble, business: Business) -> None:
    """A message is suspect after a few deliveries, and these may all have fallen into the trouble."""
    worker = make(MemorySource(), trouble.engine, max_attempts=3)
    trouble.begin("insert revoked")
    for receive_count in range(1, 12):
        with pytest.raises(DatabaseUnavailable):
            process(worker, delivery("a", receive_count=receive_count))
    trouble.end("insert revoked")
    assert business.failing() == {}
    assert [outcome for _, outcome in process(worker, delivery("a", receive_count=12))] == [Outcome.PROCESSED]


def test_trouble_with_our_own_notes_parks_nothing_and_loses_nothing(
    trouble: Trouble, engine: Engine, business: Business
) -> None:
    def fail_b(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "b":
            raise ValueError("no")

    kept = Kept()
    source = MemorySource(messages("a", "b", "c"))

    def fail_b_in_trouble(session: Session, message: Message) -> None:
        if not kept.of(DatabaseLost):
            run(engine, "ALTER TABLE IF EXISTS message_failure RENAME TO elsewhere")
        fail_b(session, message)

    with at_work(make(source, trouble.engine, fail_b_in_trouble, hooks=[kept], max_attempts=5)):
        wait_until(lambda: len(kept.of(DatabaseLost)) >= 3)
        run(engine, "ALTER TABLE elsewhere RENAME TO message_failure")
        assert source.wait_until_empty(20)
    assert business.applied() == once("ac")
    assert set(business.letters()) == {"b"}


def test_a_pool_that_is_too_small_is_no_message_s_fault(schema_url: str, business: Business) -> None:
    engine = create_engine(schema_url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    source = MemorySource(batch_size=2)
    kept = Kept()

    def taken() -> Connection | None:
        try:
            return engine.connect()
        except PoolTimeout:  # a report of the worker has it
            return None

    with at_work(make(source, engine, hooks=[kept], max_attempts=1)):
        with wait_until(taken):
            feed(source, numbered(20))
            wait_until(lambda: kept.of(DatabaseLost))
        assert source.wait_until_empty(30)
    engine.dispose()
    assert business.applied() == once(message.id for message in numbered(20))
    assert business.letters() == {}


def test_what_cannot_even_be_logged_takes_no_message_away(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MemorySource(messages("a"))
    worker = make(source, engine)
    process_all, raised = worker._processor.process, []

    def broken(deliveries: Sequence[Delivery]) -> Any:
        if not raised:
            raised.append(deliveries)
            raise Unloggable
        return process_all(deliveries)

    monkeypatch.setattr(worker._processor, "process", broken)
    with at_work(worker):
        assert source.wait_until_empty(20)
    assert raised
    assert business.applied() == once("a")


def test_an_ack_that_raises_anything_does_not_keep_others_from_being_handed_back(
    engine: Engine, business: Business
) -> None:
    class Interrupted(MemorySource):
        def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
            acked = super().ack(deliveries)
            if len(failed) == 2:
                raise KeyboardInterrupt
            return acked

    failed: list[str] = []

    def fail_b_in_its_batch_and_alone(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "b" and len(failed) < 2:
            failed.append("b")
            raise ValueError("no")

    source = Interrupted(messages("a", "b"))
    work_off(source, engine, fail_b_in_its_batch_and_alone)
    assert business.applied() == once("ab")
