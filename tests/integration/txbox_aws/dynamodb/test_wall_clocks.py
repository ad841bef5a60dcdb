"""A client that takes it for an hour earlier or later than it is: nobody runs a message twice, nobody is kept out.

The client is a process of its own with another wall clock; the store, and this process, have the right one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.txbox.leases import Store, acquired
from txbox.leases import LeaseState
from txbox_aws.dynamodb.ledger import RETENTION_SECONDS

PROGRAM = """
import datetime, json, sys, time
import time_machine

shift, table, steps = float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
wrong = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=shift)
with time_machine.travel(wrong, tick=True):
    from txbox_aws.dynamodb import DynamoDBLedger
    ledger, leases, answers = DynamoDBLedger("mailing", table=table), {}, []
    for step, message_id in steps:
        if step == "acquire":
            found = ledger.acquire(message_id, lease_seconds=200)
            leases[message_id] = found.lease
            answers.append([found.state, found.seconds_left])
        else:
            getattr(ledger, step)(leases[message_id])
            answers.append([step, 0])
    print(json.dumps({"time": time.time(), "answers": answers}))
"""

Item = Callable[..., dict[str, Any]]
Run = Callable[..., list[list[Any]]]

pytestmark = [pytest.mark.chaos, pytest.mark.parametrize("shift", [3_600, -3_600], ids=["fast", "slow"])]


@pytest.fixture
def shifted(table: str, shift: int) -> Run:
    """Take steps in a process with another wall clock: shifted(("acquire", "m1"), …)."""

    def run(*steps: tuple[str, str]) -> list[list[Any]]:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(shift), table, json.dumps(steps)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        report = json.loads(ended.stdout)
        assert abs(report["time"] - time.time() - shift) < 60, "its wall clock was not wrong"
        return report["answers"]

    return run


def test_its_leases_are_as_long_for_others_as_they_should_be(store: Store, item: Item, shifted: Run) -> None:
    before = time.time()
    assert shifted(("acquire", "m1"), ("acquire", "m2"), ("renew", "m2"))[0][0] == "acquired"
    for message_id in ("m1", "m2"):
        assert before + 200 <= item(message_id)["expires_at"] / 1000 <= time.time() + 202
        refused = store.ledger().acquire(message_id)
        assert refused.state is LeaseState.IN_FLIGHT
        assert refused.seconds_left <= 204
    # The process is dead. Once its leases have run out, nobody is kept out.
    store.expire("m1")
    assert acquired(store.ledger(), "m1").unknown_attempts == 1


def test_it_takes_nobodys_lease_away(store: Store, shifted: Run) -> None:
    ledger = store.ledger()
    lease = acquired(ledger, "m1", lease_seconds=600)
    ((state, seconds),) = shifted(("acquire", "m1"))
    assert state == "in_flight"
    assert 300 < seconds <= 604
    ledger.complete(lease)
    assert shifted(("acquire", "m1")) == [["completed", 0.0]]


def test_it_takes_over_what_has_run_out(store: Store, item: Item, put: Callable[..., None], shifted: Run) -> None:
    first = acquired(store.ledger(), "m1")
    put("m1", expires_at=int((time.time() - 5) * 1000))
    assert shifted(("acquire", "m1"))[0][0] == "acquired"
    assert item()["fence"] > first.fence


@pytest.mark.parametrize("end", ["complete", "release"])
def test_what_it_leaves_is_removed_when_it_should_be(item: Item, shifted: Run, end: str) -> None:
    shifted(("acquire", "m1"), (end, "m1"), ("acquire", "m2"))
    left = item()
    assert abs(left["remove_at"] - time.time() - RETENTION_SECONDS) < 30
    assert abs(item("m2")["remove_at"] - time.time() - 200 - RETENTION_SECONDS) < 30
    if end == "complete":
        assert abs(left["completed_at"] / 1000 - time.time()) < 30


def test_the_fence_of_a_new_item_is_reckoned_by_the_stores_clock(item: Item, shifted: Run) -> None:
    """So it is greater than that of an item which was removed long ago, whoever made that."""
    before = time.time()
    shifted(("acquire", "m1"))
    assert (before - 2) * 1000 < item()["fence"] <= time.time() * 1000 + 1
