"""What a worker does about conflicts: another way when they cost too much, and back when it is time."""

import threading

import pytest
from psycopg.errors import DeadlockDetected
from sqlalchemy import create_engine

from txbox import Inbox
from txbox.instrumentation import Contended, Event
from txbox_workers.processing.context import ProcessorContext
from txbox_workers.processing.deadlocks import (
    HOLD_SECONDS,
    LONGEST_HOLD_SECONDS,
    REPORT_SECONDS,
    ConflictReport,
    ConflictRetries,
    ConflictStatements,
    Contention,
    Way,
)

DEADLOCK = "40P01"


class Story:
    """A worker of one thread, for a clock that only it moves."""

    def __init__(self, *, together: bool = True) -> None:
        self.now = 1_000.0
        self.contention = Contention(together=together, clock=lambda: self.now)

    def commits(self, seconds: float, *, messages: int = 1) -> ConflictReport | None:
        self.now += seconds
        return self.contention.committed(messages, seconds)

    def meets(self, seconds: float = 1.0, way: Way | None = None) -> ConflictReport | None:
        self.now += seconds
        return self.contention.conflicted(self.way if way is None else way, DEADLOCK, "stock", seconds)

    @property
    def way(self) -> Way:
        return self.contention.way


def test_conflicts_that_cost_little_change_nothing() -> None:
    story = Story()
    for _ in range(100):
        for _ in range(15):
            story.commits(1.0)
        story.meets()
        assert story.way is Way.TOGETHER


def test_what_costs_too_much_goes_another_way_step_by_step() -> None:
    story = Story()
    story.meets()
    assert story.way is Way.ALONE
    story.meets(way=Way.TOGETHER)
    assert story.way is Way.ALONE, "it had begun before"
    story.meets()
    assert story.way is Way.IN_TURN
    story.meets()
    assert story.way is Way.IN_TURN, "there is no other"


def test_a_worker_without_batches_begins_alone() -> None:
    story = Story(together=False)
    assert story.way is Way.ALONE
    story.meets()
    assert story.way is Way.IN_TURN


def test_the_old_way_is_tried_again_after_twice_as_long_each_time_it_fails() -> None:
    story = Story()
    story.meets()
    held = []
    for _ in range(8):
        begun = story.now
        while story.way is Way.ALONE:
            story.commits(0.5)
        held.append(story.now - begun)
        story.commits(0.5)
        story.meets()
        assert story.way is Way.ALONE
    assert held == [min(HOLD_SECONDS * 2**trial, LONGEST_HOLD_SECONDS) for trial in range(8)]


def test_when_the_conflicts_are_over_everything_is_as_before() -> None:
    story = Story()
    story.meets()
    story.meets()
    assert story.way is Way.IN_TURN
    seen = []
    for _ in range(200):
        story.commits(0.5)
        seen.append(story.way)
    assert list(dict.fromkeys(seen)) == [Way.IN_TURN, Way.ALONE, Way.TOGETHER]


def test_turns_that_are_slower_than_conflicts_are_given_up() -> None:
    """A handler that waits for something else than the database gains from threads, deadlocks or not."""
    story = Story()
    story.meets()
    for _ in range(5):
        story.commits(1.0, messages=20)
    story.meets()
    assert story.way is Way.IN_TURN
    for _ in range(4):
        story.commits(1.0, messages=2)
    assert story.way is Way.ALONE


def test_people_are_told_at_once_and_then_once_a_minute() -> None:
    story = Story()
    assert story.meets() == ConflictReport({(DEADLOCK, "stock"): 1}, Way.ALONE)
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
        source_name="memory",
        hooks=(events.append,),
        wants_details=lambda: False,
        stopping=threading.Event(),
    )
    engine = create_engine("postgresql+psycopg://127.0.0.1:1")
    retries = ConflictRetries(Inbox("billing"), engine, context, together=True)
    monkeypatch.setattr(ConflictStatements, "load", lambda *_: pytest.fail("read"))
    runs = iter([DeadlockDetected("once"), None])

    def transaction() -> str:
        if (error := next(runs)) is not None:
            raise error
        return "done"

    assert retries.run(1, transaction) == "done"
    assert any(isinstance(event, Contended) for event in events)
