"""What a worker does about conflicts: another mode when they cost too much, and back when it is time."""

import threading

import pytest
from psycopg.errors import DeadlockDetected
from sqlalchemy import create_engine

from txbox import Inbox, Message
from txbox.instrumentation import Contended, Event
from txbox_workers.delivery import Delivery
from txbox_workers.processing.deadlocks import (
    HOLD_SECONDS,
    LONGEST_HOLD_SECONDS,
    REPORT_SECONDS,
    ConflictReport,
    ConflictRetries,
    ConflictStatements,
    ModeSelector,
    TransactionMode,
)
from txbox_workers.processing.processor import ProcessorContext

DEADLOCK = "40P01"


class Story:
    """A worker of one thread, for a clock that only it moves."""

    def __init__(self, *, batches: bool = True) -> None:
        self.now = 1_000.0
        self.selector = ModeSelector(batches=batches, clock=lambda: self.now)

    def commits(self, seconds: float, *, messages: int = 1) -> ConflictReport | None:
        self.now += seconds
        return self.selector.committed(messages, seconds)

    def meets(self, seconds: float = 1.0, mode: TransactionMode | None = None) -> ConflictReport | None:
        self.now += seconds
        return self.selector.conflicted(self.mode if mode is None else mode, DEADLOCK, "stock", seconds)

    @property
    def mode(self) -> TransactionMode:
        return self.selector.mode


def test_conflicts_that_cost_little_change_nothing() -> None:
    story = Story()
    for _ in range(100):
        for _ in range(15):
            story.commits(1.0)
        story.meets()
        assert story.mode is TransactionMode.BATCH


def test_what_costs_too_much_changes_the_mode_step_by_step() -> None:
    story = Story()
    story.meets()
    assert story.mode is TransactionMode.PER_MESSAGE
    story.meets(mode=TransactionMode.BATCH)
    assert story.mode is TransactionMode.PER_MESSAGE, "it had begun before"
    story.meets()
    assert story.mode is TransactionMode.SERIAL
    story.meets()
    assert story.mode is TransactionMode.SERIAL, "there is no other"


def test_a_worker_without_batches_begins_per_message() -> None:
    story = Story(batches=False)
    assert story.mode is TransactionMode.PER_MESSAGE
    story.meets()
    assert story.mode is TransactionMode.SERIAL


def test_the_old_mode_is_tried_again_after_twice_as_long_each_time_it_fails() -> None:
    story = Story()
    story.meets()
    held = []
    for _ in range(8):
        begun = story.now
        while story.mode is TransactionMode.PER_MESSAGE:
            story.commits(0.5)
        held.append(story.now - begun)
        story.commits(0.5)
        story.meets()
        assert story.mode is TransactionMode.PER_MESSAGE
    assert held == [min(HOLD_SECONDS * 2**trial, LONGEST_HOLD_SECONDS) for trial in range(8)]


def test_when_the_conflicts_are_over_everything_is_as_before() -> None:
    story = Story()
    story.meets()
    story.meets()
    assert story.mode is TransactionMode.SERIAL
    seen = []
    for _ in range(200):
        story.commits(0.5)
        seen.append(story.mode)
    assert list(dict.fromkeys(seen)) == [TransactionMode.SERIAL, TransactionMode.PER_MESSAGE, TransactionMode.BATCH]


def test_turns_that_are_slower_than_conflicts_are_given_up() -> None:
    """A handler that waits for something else than the database gains from threads, deadlocks or not."""
    story = Story()
    story.meets()
    for _ in range(5):
        story.commits(1.0, messages=20)
    story.meets()
    assert story.mode is TransactionMode.SERIAL
    for _ in range(4):
        story.commits(1.0, messages=2)
    assert story.mode is TransactionMode.PER_MESSAGE


def test_people_are_told_at_once_and_then_once_a_minute() -> None:
    story = Story()
    assert story.meets() == ConflictReport({(DEADLOCK, "stock"): 1}, TransactionMode.PER_MESSAGE)
    told = []
    begun = story.now
    while story.now - begun < 2 * REPORT_SECONDS:
        told += [report for report in (story.meets(), story.commits(9.0)) if report]
    assert sum(sum(report.conflicts.values()) for report in told) == 12
    assert len(told) == 2


def test_the_last_conflicts_are_told_though_no_other_follows() -> None:
    story = Story()
    assert story.meets()
    assert story.meets() is None
    reports = [story.commits(10.0) for _ in range(10)]
    (report,) = [report for report in reports if report]
    assert report.conflicts == {(DEADLOCK, "stock"): 1}


def test_a_report_reads_no_file_in_the_midst_of_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in it would be taken for a failure of the handler."""
    events: list[Event] = []
    context = ProcessorContext(
        subscriber_id="billing",
        source_name="memory",
        hooks=(events.append,),
        wants_details=lambda: False,
        stopping=threading.Event(),
    )
    engine = create_engine("postgresql+psycopg://127.0.0.1:1")
    retries = ConflictRetries(Inbox("billing"), engine, context, batches=True)
    monkeypatch.setattr(ConflictStatements, "load", lambda *_: pytest.fail("read"))
    runs = iter([DeadlockDetected("once"), None])

    def transaction(_: object) -> str:
        if (error := next(runs)) is not None:
            raise error
        return "done"

    assert retries.run(transaction, [Delivery(Message("a", b""), "a-1")]) == "done"
    assert any(isinstance(event, Contended) for event in events)
