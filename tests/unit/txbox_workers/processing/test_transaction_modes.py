"""What a worker does about conflicts: another mode when they cost too much, and back when it is time."""

import threading
from itertools import pairwise

import pytest
from psycopg.errors import DeadlockDetected
from sqlalchemy import create_engine

from txbox import Inbox, Message
from txbox.instrumentation import Contended, Event
from txbox_workers.delivery import Delivery
from txbox_workers.processing.deadlocks import ConflictRetries, ConflictStatements
from txbox_workers.processing.processor import ProcessorContext
from txbox_workers.processing.transaction_modes import (
    HOLD_SECONDS,
    LEAST_CONFLICTS,
    LONGEST_HOLD_SECONDS,
    REPORT_SECONDS,
    ConflictReport,
    ModeSelector,
    TransactionMode,
)

BATCH, HALVES, PER_MESSAGE, SERIAL = TransactionMode
DEADLOCK = "40P01"
STALL_SECONDS = 1.0

World = dict[TransactionMode, tuple[float, float]]
"""By mode, how many messages commit in a second without conflicts, and how many seconds pass between conflicts."""

NEVER = float("inf")
HOT: World = {BATCH: (6000, 0.1), HALVES: (5000, 0.5), PER_MESSAGE: (2000, NEVER), SERIAL: (4500, NEVER)}
CALM: World = {BATCH: (6000, NEVER), HALVES: (5000, NEVER), PER_MESSAGE: (2000, NEVER), SERIAL: (4500, NEVER)}


class Story:
    """A worker of one thread, for a clock that only it moves."""

    def __init__(self, *, batches: bool = True) -> None:
        self.now = 1_000.0
        self.selector = ModeSelector(batches=batches, clock=lambda: self.now)
        self.modes = [self.mode]
        self._calm = 0.0

    def commits(self, seconds: float, *, messages: int = 1) -> ConflictReport | None:
        mode = self.selector.begin()
        self.now += seconds
        self.selector.end(mode)
        return self.selector.committed(mode, messages)

    def meets(self, seconds: float = STALL_SECONDS) -> ConflictReport | None:
        mode = self.selector.begin()
        self.now += seconds
        self.selector.end(mode)
        return self.selector.conflicted(mode, DEADLOCK, "stock", seconds)

    def lives(self, world: World, seconds: float, *, step: float = 0.05) -> int:
        """Work for some time; return how many messages were committed."""
        ends, done = self.now + seconds, 0
        while self.now < ends:
            rate, between = world[self.mode]
            if self._calm >= between:
                self.meets()
                self._calm = 0.0
            else:
                self.commits(step, messages=round(rate * step))
                self._calm += step
                done += round(rate * step)
            if self.mode is not self.modes[-1]:
                self.modes.append(self.mode)
        return done

    @property
    def mode(self) -> TransactionMode:
        return self.selector.mode


def test_conflicts_that_cost_little_change_nothing() -> None:
    story = Story()
    for _ in range(100):
        for _ in range(15):
            story.commits(1.0)
        story.meets()
        assert story.mode is BATCH


def test_one_conflict_is_no_verdict() -> None:
    story = Story()
    for _ in range(LEAST_CONFLICTS - 1):
        story.meets()
        assert story.mode is BATCH
    story.meets()
    assert story.mode is HALVES


def test_all_modes_are_tried_and_the_one_that_gets_most_done_is_kept() -> None:
    story = Story()
    story.lives(HOT, 20.0)
    assert story.modes[:4] == [BATCH, HALVES, PER_MESSAGE, SERIAL]
    story.lives(HOT, 600.0)
    assert story.lives(HOT, 600.0) >= 0.95 * 4500 * 600, "and nearly always"


def test_a_handler_that_gains_from_threads_gets_no_turns() -> None:
    """It waits for something else than the database, deadlocks or not."""
    story = Story()
    world = HOT | {PER_MESSAGE: (2000, NEVER), SERIAL: (200, NEVER)}
    story.lives(world, 600.0)
    assert story.lives(world, 600.0) >= 0.95 * 2000 * 600


def test_halves_are_enough_if_they_are_faster() -> None:
    story = Story()
    world = HOT | {HALVES: (5000, 60.0)}
    story.lives(world, 600.0)
    assert story.lives(world, 600.0) >= 0.93 * 5000 * 600


def test_conflicts_that_cost_less_than_the_cure_are_left() -> None:
    """Each second one loses a second, and yet batches are the fastest."""
    story = Story()
    world = {BATCH: (6000, 2.0), HALVES: (2000, NEVER), PER_MESSAGE: (1000, NEVER), SERIAL: (1000, NEVER)}
    story.lives(world, 600.0)
    assert story.lives(world, 600.0) >= 0.9 * 4000 * 600


def test_a_worker_without_batches_begins_per_message() -> None:
    story = Story(batches=False)
    assert story.mode is PER_MESSAGE
    for _ in range(LEAST_CONFLICTS):
        story.meets()
    assert story.mode is SERIAL


def test_less_is_tried_again_after_twice_as_long_each_time_that_it_fails() -> None:
    story = Story()
    held: list[float] = []
    since = story.now
    while len(held) < 12:
        before = story.mode
        story.lives(HOT, 0.05)
        if story.mode is not before:
            if before is SERIAL:
                held.append(story.now - since)
            since = story.now
    assert HOLD_SECONDS < held[1] < held[-1]
    for earlier, later in pairwise(held[1:]):
        assert later == pytest.approx(min(2 * earlier, LONGEST_HOLD_SECONDS), rel=0.05)


def test_when_the_conflicts_are_over_everything_is_as_before() -> None:
    story = Story()
    story.lives(HOT, 120.0)
    story.lives(CALM, 2 * LONGEST_HOLD_SECONDS)
    assert story.modes[-2:] == [HALVES, BATCH]


def test_what_began_in_another_mode_says_nothing_about_this_one() -> None:
    story = Story()
    mode = story.selector.begin()
    for _ in range(LEAST_CONFLICTS):
        story.meets()
    assert (mode, story.mode) == (BATCH, HALVES)
    for _ in range(200):
        story.commits(0.5)
    assert story.mode is HALVES, "it may still be in the way"
    story.selector.end(mode)
    story.selector.conflicted(mode, DEADLOCK, "stock", 100.0)
    for _ in range(30):
        story.commits(0.5)
    assert story.mode is not HALVES


def test_people_are_told_at_once_and_then_once_a_minute() -> None:
    story = Story()
    assert story.meets() == ConflictReport({(DEADLOCK, "stock"): 1}, BATCH)
    told = []
    begun = story.now
    while story.now - begun < 4 * REPORT_SECONDS:
        told += [report for report in (story.meets(), story.commits(9.0)) if report]
    assert 3 <= len(told) <= 4
    assert sum(sum(report.conflicts.values()) for report in told) >= 20


def test_the_last_conflicts_are_told_though_no_other_follows() -> None:
    story = Story()
    assert story.meets()
    assert story.meets() is None
    reports = [story.commits(1.0) for _ in range(200)]
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
