"""Clients whose wall clocks are an hour off, beside one whose clock is right: nobody runs twice, nobody is kept out.

Each is a process of its own, in which time-machine moves the wall clock and leaves the clock that measures intervals.
"""

import json
import os
import subprocess
import sys

import pytest
from sqlalchemy import Engine

from support.txbox.leases import Store, acquired, postgres_store
from txbox.leases import LeaseState

pytestmark = pytest.mark.chaos

LONG = 600.0
HOUR = 3600
SHIFTS = pytest.mark.parametrize("shift", [-HOUR, HOUR], ids=["an hour slow", "an hour fast"])

PROGRAM = """
import datetime, json, sys, time
import time_machine
from sqlalchemy import create_engine
from txbox.leases import idempotent
from txbox.leases import PostgresLedger

url, shift, script = json.loads(sys.argv[1])
real = time.time()
with time_machine.travel(real + shift, tick=True):
    assert abs(time.time() - real - shift) < 60
    assert abs(datetime.datetime.now(datetime.timezone.utc).timestamp() - real - shift) < 60
    ledger = PostgresLedger("mailing", engine=create_engine(url))
    answers = []
    for step, message_id, seconds in script:
        if step == "acquire":
            answer = ledger.acquire(message_id, lease_seconds=seconds)
            lease = answer.lease
            answers.append([answer.state, lease.seconds_left if lease else answer.seconds_left])
        elif step == "renew":
            ledger.renew(lease, lease_seconds=seconds)
            answers.append(["renewed", lease.seconds_left])
        elif step == "handle":
            ran = []
            idempotent(ran.append, ledger=ledger, identify=lambda id: id)(message_id)
            answers.append(["ran" if ran else "skipped", 0])
    print(json.dumps(answers))
"""


@pytest.fixture
def store(engine: Engine, schema_url: str) -> Store:
    return postgres_store(engine, schema_url)


def shifted(store: Store, shift: int, *script: tuple[str, str, float]) -> list[list[object]]:
    """Run a script in a process whose wall clock is off; return what each of its steps came to."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([store.arguments["url"], shift, script])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    answers: list[list[object]] = json.loads(ended.stdout)
    return answers


@SHIFTS
def test_it_takes_over_nothing_that_is_held(store: Store, shift: int) -> None:
    ledger = store.ledger()
    lease = acquired(ledger, "m", lease_seconds=LONG)
    ((state, seconds),) = shifted(store, shift, ("acquire", "m", LONG))
    assert state == LeaseState.IN_FLIGHT
    assert isinstance(seconds, float)
    assert LONG - 60 < seconds <= LONG
    ledger.complete(lease)
    assert shifted(store, shift, ("handle", "m", 0)) == [["skipped", 0]]


@SHIFTS
def test_what_it_holds_is_held_for_as_long_as_was_asked_and_no_longer(store: Store, shift: int) -> None:
    (state, left), (_, renewed) = shifted(store, shift, ("acquire", "m", LONG), ("renew", "m", 2 * LONG))
    assert state == LeaseState.ACQUIRED
    assert isinstance(left, float)
    assert isinstance(renewed, float)
    assert LONG - 60 < left <= LONG, "it takes its own lease for no longer than that either"
    assert 2 * LONG - 60 < renewed <= 2 * LONG
    ledger = store.ledger()
    held = ledger.acquire("m")
    assert held.state is LeaseState.IN_FLIGHT
    assert 2 * LONG - 60 < held.seconds_left <= 2 * LONG, "others are not kept out for an hour more, nor let in before"
    store.expire("m")
    lease = acquired(ledger, "m")
    assert (lease.attempt, lease.unknown_attempts) == (2, 1)


@SHIFTS
def test_it_takes_over_what_has_run_out(store: Store, shift: int) -> None:
    acquired(store.ledger(), "m", lease_seconds=LONG)
    store.expire("m")
    assert shifted(store, shift, ("handle", "m", 0), ("handle", "m", 0)) == [["ran", 0], ["skipped", 0]]
    assert store.ledger().acquire("m").state is LeaseState.COMPLETED


def test_one_that_is_slow_and_one_that_is_fast_keep_each_other_out(store: Store) -> None:
    for first, second in ((-HOUR, HOUR), (HOUR, -HOUR)):
        message_id = f"by {first}"
        assert shifted(store, first, ("acquire", message_id, LONG))[0][0] == LeaseState.ACQUIRED
        assert shifted(store, second, ("acquire", message_id, LONG))[0][0] == LeaseState.IN_FLIGHT
