"""Audits while messages move: through a relay, a worker, dead letters and redrives. No id is named that is fine."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from integration.txbox.conftest import StartRelay
from support.postgres.statements import run
from support.txbox.audit_world import HERE, make_world, named
from support.txbox.outbox import numbered, publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make
from txbox import DeadLetter, DeadLetters, Message, Reason
from txbox.backoff import Backoff
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.operations.audit import AuditReport, audit, auditor, sides
from txbox.outbox.sent_messages import SentMessages
from txbox.relay import OutboxMessage
from txbox_workers.memory_source import MemorySource

KEEP = (
    "WITH gone AS (DELETE FROM outbox_message WHERE message_id = %s RETURNING *) "
    "INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at) "
    "SELECT message_id, position, destination, headers, body, published_at FROM gone"
)


def processed_and_unsettled(engine: Engine) -> str:
    """A message that was sent and processed long ago by a relay that died before it settled it."""
    world = make_world(engine, engine, 1, 3)
    at = world.some_time()
    message_id = world.new_id(at)
    world.record(message_id, at)
    world.write()
    columns = "lane, message_id, destination, headers, body"
    run(engine, f"INSERT INTO outbox_message ({columns}) VALUES (3, %s, %s, '{{}}', '')", (message_id, HERE))
    return message_id


@pytest.mark.parametrize("moment", ["known", "waiting", "read_kept_since"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_message_that_is_settled_while_it_is_judged_is_not_foreign(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, moment: str, after: bool
) -> None:
    message_id = processed_and_unsettled(engine)
    real: Callable[..., Any] = getattr(sides.Sent, moment)

    def with_settlement(*arguments: Any) -> Any:
        if after:
            result = real(*arguments)
        run(engine, KEEP, (message_id,))
        return result if after else real(*arguments)

    monkeypatch.setattr(sides.Sent, moment, with_settlement)
    report = audit(engine, [HERE], engine, "billing")
    assert report.balanced
    assert not report.findings


@pytest.mark.parametrize("becomes", ["processed", "parked", "redriven", "forgotten"])
def test_a_message_that_arrives_while_it_is_judged_is_not_missing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    world = make_world(engine, engine, 2, 3)
    at = world.some_time()
    message_id = world.new_id(at)
    world.send(message_id, at)
    letters = DeadLetters(engine)
    letter = DeadLetter("billing", message_id, Reason.FAILED, "", 5, HERE, b"")
    number = letters.park(letter) if becomes == "redriven" else None
    if becomes == "forgotten":
        world.record(message_id, at)
    world.write()
    real = sides.RecordedSide.digests
    moved = threading.Event()

    def with_move(self: Any, stretch: Any) -> Any:
        if not moved.is_set() and becomes in ("redriven", "forgotten"):
            move()
        found = real(self, stretch)
        if not moved.is_set():
            move()
        return found

    def move() -> None:
        moved.set()
        if becomes == "processed":
            run(
                engine,
                "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', %s)",
                (message_id,),
            )
        elif becomes == "parked":
            letters.park(letter)
        elif becomes == "redriven":
            letters.redrive(number or 0, lambda _: None)
        else:  # the horizon moves first, then the row goes
            run(engine, "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now())")
            run(engine, "DELETE FROM processed_message WHERE message_id = %s", (message_id,))

    monkeypatch.setattr(sides.RecordedSide, "digests", with_move)
    report = audit(engine, [HERE], engine, "billing")
    assert moved.is_set()
    assert report.balanced
    assert not report.findings
    state = {"redriven": "in_flight"}.get(becomes, becomes)
    assert report.counts[state] > (state == "processed") * 4


def test_what_the_outbox_forgets_meanwhile_is_not_foreign(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(engine, engine, 3, 30)
    world.write()
    real = sides.RecordedSide.check

    def with_purge(self: Any) -> None:
        real(self)  # the outbox's begin is read
        run(engine, "DELETE FROM outbox_sent WHERE sent_at < now() - interval '20 hours'")

    monkeypatch.setattr(sides.RecordedSide, "check", with_purge)
    report = audit(engine, [HERE], engine, "billing")
    assert report.balanced
    assert report.counts["not_kept"] > 0


def test_a_generation_that_is_forgotten_meanwhile_is_not_missing(
    engine: Engine, other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor, "STRETCH_ROWS", 100)
    world = make_world(engine, other_engine, 4, 300)
    world.write()
    generations = Generations(other_engine)
    assert InboxConversion(other_engine).forward()
    assert generations.rotate()
    run(other_engine, "UPDATE inbox_generation SET closed_at = now() - interval '30 hours' WHERE closed_at IS NOT NULL")
    horizons = (
        "INSERT INTO inbox_horizon (subscriber_id, horizon) "
        "SELECT name, now() - interval '20 minutes' FROM unnest('{billing,shipping}'::text[]) AS name"
    )
    real = sides.Sent.digests
    looked: list[str] = []

    def with_drop(self: Any, stretch: Any) -> Any:
        found = real(self, stretch)
        looked.append(stretch.upto)
        if len(looked) == 2:  # the horizon moves first, then the rows go
            run(other_engine, horizons)
            assert generations.forget(settled=generations.settle(seconds=60)) == (1,)
        return found

    monkeypatch.setattr(sides.Sent, "digests", with_drop)
    report = audit(engine, [HERE], other_engine, "billing")
    assert report.findings == ()
    assert report.balanced
    assert report.counts["processed"] == report.counts["sent"] > 0
    assert report.counts["processed"] + report.counts["forgotten"] == 301
    assert report.counts["forgotten"] > 100


def test_a_connection_that_ends_is_replaced(
    engine: Engine, other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica ends those that keep it from replaying."""
    world = make_world(engine, engine, 5, 30)
    world.write()
    monkeypatch.setattr(sides, "_AGAIN", Backoff(first_seconds=0.01, longest_seconds=0.01))
    real = sides.Sent.digests
    ended: list[bool] = []

    def with_end(self: Any, stretch: Any) -> Any:
        with engine.connect() as connection:
            pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        with other_engine.connect() as other:  # returns once it is gone
            ended.append(other.exec_driver_sql("SELECT pg_terminate_backend(%s, 60000)", (pid,)).scalar_one())
        return real(self, stretch)

    monkeypatch.setattr(sides.Sent, "digests", with_end)
    report = audit(engine, [HERE], engine, "billing")
    assert ended == [True]
    assert report.balanced
    assert report.counts["processed"] == 31


def test_audits_beside_a_relay_and_a_worker_find_nothing_until_something_is_lost(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor, "STRETCH_ROWS", 100)
    source = MemorySource()
    letters = DeadLetters(engine)
    redriven: set[str] = set()
    lost: list[str] = []
    reports: list[AuditReport] = []
    lose, stop = threading.Event(), threading.Event()

    def deliver(messages: Sequence[OutboxMessage]) -> None:
        for message in messages:
            if lose.is_set() and not lost:
                lost.append(message.id)
            else:
                source.send(Message(message.id, message.body))

    def handle(_: object, message: Message) -> None:
        if int(message.body) % 7 == 0 and message.id not in redriven:
            raise ValueError("parked, until it is redriven")

    def redrive() -> None:
        while not stop.wait(0.2):
            for letter in letters.list("billing")[1:]:  # one is parked all the time
                redriven.add(letter.message_id)
                letters.redrive(letter.dead_letter_id or 0, lambda one: source.send(Message(one.message_id, one.body)))

    def produce() -> None:
        batches = 0
        while not stop.wait(0.05) or not lost:
            # More of them make the audits longer, and find nothing more; there are some for each audit.
            if batches < 12 * (len(reports) + 1) or stop.is_set():
                batches += 1
                publish(engine, *numbered(10, to=HERE))

    kept = SentMessages(engine)
    start_relay(RecordingPublisher(before=deliver), keep_sent=timedelta(hours=1), listen=False)
    with at_work(make(source, engine, handle, max_attempts=1)), ThreadPoolExecutor(2) as pool:
        done = [pool.submit(redrive), pool.submit(produce)]
        try:
            wait_until(lambda: not kept.is_empty() and letters.list("billing"), "something is kept and parked")
            for _ in range(8):
                before = reports[-1].counts["sent"] if reports else 0
                wait_until(lambda before=before: count(engine, "outbox_sent") > before, "more is kept")
                reports.append(audit(engine, [HERE], engine, "billing", in_flight=timedelta(minutes=5)))
        finally:
            lose.set()
            stop.set()
        for one in done:
            one.result(timeout=30)
        assert source.wait_until_empty(60)
        wait_until(lambda: count(engine, "outbox_message") == 0, "all are sent")
        assert source.wait_until_empty(60)
    assert [report.findings for report in reports if not report.balanced] == []
    assert reports[-1].counts["sent"] > reports[0].counts["sent"] > 0
    assert sum(report.counts["parked"] for report in reports) > 0
    report = audit(engine, [HERE], engine, "billing", in_flight=timedelta(0))
    assert named(report) == {("missing", lost[0])}
    assert report.counts["sent"] == count(engine, "outbox_sent")


def count(engine: Engine, table: str) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())
