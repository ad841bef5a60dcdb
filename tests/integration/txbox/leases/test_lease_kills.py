"""Processes that are killed and stopped at their work: every message is completed, and none of them twice."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.txbox.lease_process import (
    ALLOWED,
    COMPLETED,
    COROUTINE,
    EFFECT,
    FUNCTION,
    LOST,
    READY,
    REFUSED,
    WORKER,
    notes,
    start,
)
from support.txbox.leases import Store, acquired
from support.waiting import wait_until
from txbox.leases import LeaseState

pytestmark = pytest.mark.chaos

LONG = 600.0
PATIENCE = 60.0
CLOCK_TOLERANCE = 0.05
"""Seconds: the store's clock need not go as fast as that of the machine."""

Start = Callable[..., "subprocess.Popen[bytes]"]


def styles(*more: str) -> pytest.MarkDecorator:
    """Run a test with ``idempotent`` functions over both stores, and with these styles over Postgres."""
    each = [("postgres", FUNCTION), ("dynamodb", FUNCTION), *(("postgres", one) for one in more)]
    return pytest.mark.parametrize(("store", "style"), each, indirect=True)


@pytest.fixture
def style(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", FUNCTION))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of notes."""
    return tmp_path / "notes"


@pytest.fixture
def begin(store: Store, path: Path, style: str) -> Iterator[Start]:
    """Start a process; none outlives the test."""
    with contextlib.ExitStack() as stack:

        def begin(**settings: Any) -> "subprocess.Popen[bytes]":
            process = start(store.arguments, path, style=style, **settings)
            stack.callback(end, process)
            return process

        yield begin


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(PATIENCE)


def wait_until_stopped(process: "subprocess.Popen[bytes]") -> None:
    def stopped() -> bool:
        pid, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
        assert not pid or os.WIFSTOPPED(status), f"it ended instead: {status}"
        return bool(pid)

    wait_until(stopped, "the process stopped by itself", timeout=PATIENCE)


@styles(COROUTINE, WORKER)
@pytest.mark.parametrize(
    ("moment", "effects", "unknown"),
    [("before effect", 1, 1), ("after effect", 2, 1), ("before complete", 2, 1), ("after complete", 1, 0)],
)
def test_a_process_is_killed_and_the_next_one_goes_on(
    store: Store, begin: Start, path: Path, moment: str, effects: int, unknown: int
) -> None:
    killed = begin(messages=["m"], lease=LONG, moments={"m": [moment, "SIGKILL"]})
    assert killed.wait(PATIENCE) == -signal.SIGKILL
    if moment != "after complete":
        assert store.ledger().acquire("m").state is LeaseState.IN_FLIGHT, "nobody has it before its lease has run out"
        store.expire("m")
    assert begin(messages=["m"], lease=LONG).wait(PATIENCE) == 0
    ran = notes(path, EFFECT)
    assert len(ran) == effects
    assert ran[-1].unknown == unknown, "a handler is told that it may have happened before"
    assert [each.fence for each in ran] == sorted({each.fence for each in ran})
    assert len(notes(path, COMPLETED)) == 1
    assert not notes(path, LOST)
    assert store.ledger().acquire("m").state is LeaseState.COMPLETED


@styles(WORKER)
def test_a_process_that_was_stopped_past_its_lease_finds_its_work_taken_over_and_done(
    store: Store, begin: Start, path: Path, style: str
) -> None:
    late = begin(messages=["m"], lease=LONG, moments={"m": ["after effect", "SIGSTOP"]})
    wait_until_stopped(late)
    store.expire("m")
    other = begin(messages=["m"], lease=LONG)
    assert other.wait(PATIENCE) == 0
    late.send_signal(signal.SIGCONT)
    assert late.wait(PATIENCE) == 0
    assert [each.pid for each in notes(path, EFFECT)] == [late.pid, other.pid]
    assert [each.pid for each in notes(path, COMPLETED)] == [other.pid]
    assert [each.pid for each in notes(path, LOST)] == [late.pid]
    done = store.ledger().acquire("m")
    assert done.state is LeaseState.COMPLETED
    assert done.result == (None if style == WORKER else f'"by {other.pid}"'.encode()), "a worker keeps none"


def test_a_process_that_was_stopped_while_its_work_is_taken_over_cannot_complete_it(
    store: Store, begin: Start, path: Path
) -> None:
    late = begin(messages=["m"], lease=LONG, moments={"m": ["after effect", "SIGSTOP"]})
    wait_until_stopped(late)
    store.expire("m")
    ledger = store.ledger()
    lease = acquired(ledger, "m", lease_seconds=LONG)
    assert (lease.attempt, lease.unknown_attempts) == (2, 1)
    late.send_signal(signal.SIGCONT)
    wait_until(lambda: notes(path, LOST), "the late one has been told", timeout=PATIENCE)
    ledger.complete(lease, b'"mine"')
    assert late.wait(PATIENCE) == 0, "it goes on, and finds the message completed"
    assert notes(path, COMPLETED) == []
    assert ledger.acquire("m").result == b'"mine"'


@pytest.mark.parametrize("taken_over", [True, False], ids=["taken over", "not taken over"])
@pytest.mark.parametrize("step", ["renew", "complete", "release"])
def test_what_a_late_owner_may_do_depends_on_whether_somebody_was_quicker(
    store: Store, begin: Start, path: Path, step: str, taken_over: bool
) -> None:
    late = begin(messages=["m"], lease=LONG, steps=[step])
    wait_until_stopped(late)
    store.expire("m")
    ledger = store.ledger()
    lease = acquired(ledger, "m", lease_seconds=LONG) if taken_over else None
    late.send_signal(signal.SIGCONT)
    assert late.wait(PATIENCE) == 0
    assert [each.what for each in notes(path)] == [READY, f"{REFUSED if taken_over else ALLOWED} {step}"]
    if lease is not None:
        assert lease.fence > notes(path, READY)[0].fence
        ledger.complete(lease)
        assert ledger.acquire("m").state is LeaseState.COMPLETED


@styles(WORKER)
@pytest.mark.parametrize(
    ("messages", "disturbances"),
    [(40, 5), pytest.param(2_000, 120, marks=[pytest.mark.slow, pytest.mark.timeout(1_800)])],
)
def test_three_processes_are_killed_and_stopped_at_random_and_complete_each_message_once(
    store: Store, begin: Start, path: Path, messages: int, disturbances: int
) -> None:
    ids = [f"m-{number}" for number in range(messages)]
    settings: dict[str, Any] = {"messages": ids, "lease": 1.0, "pause": 0.08}
    # One comes late for certain, and the others take over from it; what else happens is by chance.
    late = begin(**settings | {"messages": ids[:1]}, moments={ids[0]: ["after effect", "SIGSTOP"]})
    wait_until_stopped(late)
    workers = [begin(**settings) for _ in range(3)]
    disturbed = {late.pid}
    wait_until(lambda: len({each.pid for each in notes(path, EFFECT) if each.message == ids[0]}) > 1, timeout=PATIENCE)
    late.send_signal(signal.SIGCONT)
    for number in range(disturbances):
        done = (number + 1) * messages // (disturbances + 2)
        wait_until(lambda done=done: len(notes(path, COMPLETED)) >= done, f"{done} completed", timeout=PATIENCE)
        index = random.randrange(len(workers))
        victim = workers[index]
        # In the middle of an effect, or, every now and then, whenever this is.
        if number % 4 != 3:
            seen = effects_of(path, victim)
            wait_until(
                lambda victim=victim, seen=seen: effects_of(path, victim) > seen or victim.poll() is not None,
                every=0.002,
            )
        if victim.poll() is not None:
            continue  # it has found everything completed
        disturbed.add(victim.pid)
        if number % 2:
            victim.kill()
            victim.wait(PATIENCE)
            workers[index] = begin(**settings)
        else:
            victim.send_signal(signal.SIGSTOP)
            resume_once_overtaken(path, victim)
    for worker in (*workers, late):
        assert worker.wait(PATIENCE) == 0

    completed = Counter(each.message for each in notes(path, COMPLETED))
    assert set(completed.values()) <= {1}, "a double completion"
    ledger = store.ledger()
    assert {ledger.acquire(message_id).state for message_id in ids} == {LeaseState.COMPLETED}
    ran: dict[str, list[Any]] = {message_id: [] for message_id in ids}
    for each in notes(path, EFFECT):
        ran[each.message].append(each)
    lost = {(each.pid, each.message) for each in notes(path, LOST)}
    for message_id, effects in ran.items():
        assert effects, f"{message_id} never ran"
        # Who was stopped between its acquisition and its effect has it late, after that of the next owner.
        for earlier, later in itertools.pairwise(sorted(effects, key=lambda each: each.fence)):
            assert earlier.pid in disturbed or (earlier.pid, message_id) in lost, "it ran twice, and nothing happened"
            assert later.fence > earlier.fence
            assert later.unknown >= 1, "a handler is told that it may have happened before"
            if earlier.noted_at < earlier.ends_at:
                assert later.noted_at > earlier.ends_at - CLOCK_TOLERANCE, "its owner still had it"
            else:
                assert earlier.pid in disturbed, "only who was stopped begins when its lease is over"
    # A campaign that never hit anything proves nothing.
    assert any(len(effects) > 1 for effects in ran.values()), "nobody has taken anything over"
    assert any(pid in disturbed for pid, _ in lost), "nobody has come late"


def effects_of(path: Path, process: "subprocess.Popen[bytes]") -> int:
    return sum(each.pid == process.pid for each in notes(path, EFFECT))


def resume_once_overtaken(path: Path, stopped: "subprocess.Popen[bytes]") -> None:
    """Let a stopped process go on once somebody else has done what it was at; if it was at nothing, at once."""
    mine = [each for each in notes(path, EFFECT) if each.pid == stopped.pid]
    done = {each.message for each in notes(path, COMPLETED)}
    if mine and mine[-1].message not in done:
        message_id, until = mine[-1].message, time.monotonic() + 10
        wait_until(
            lambda: (
                any(each.message == message_id and each.pid != stopped.pid for each in notes(path, EFFECT))
                or time.monotonic() > until  # it has completed it, and was stopped before it could note that
            ),
            timeout=PATIENCE,
        )
    stopped.send_signal(signal.SIGCONT)
