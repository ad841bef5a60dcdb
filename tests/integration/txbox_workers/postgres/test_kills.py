"""Workers over the outbox of their database that are killed: what has committed is not even delivered again."""

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from support.waiting import wait_until
from support.workers import worker_process
from support.workers.business import Business, once
from support.workers.supervisor import BOTH_KINDS, KILLED, Start, ids, runs, supervise, worker_processes
from txbox import Outbox
from txbox.outbox import Outgoing

pytestmark = pytest.mark.chaos


def send(business: Business, messages: list[str], key: Callable[[str], str | None] = lambda _: None) -> None:
    with business.engine.begin() as connection:
        outgoing = [Outgoing("inbox:billing", b"{}", key=key(one), message_id=one) for one in messages]
        Outbox().publish_many(connection, outgoing)


def waiting(business: Business) -> int:
    return len(business.rows("SELECT message_id FROM outbox_message WHERE lane < 0"))


@pytest.fixture
def business(engine: Engine) -> Business:
    return worker_process.prepare(engine)


@pytest.fixture
def start(schema_url: str, request: pytest.FixtureRequest) -> Iterator[Start]:
    with worker_processes(schema_url, "inbox:billing", request) as start:
        yield start


@BOTH_KINDS
@pytest.mark.parametrize("max_attempts", [1, 4])
def test_a_message_that_kills_its_process_is_parked_and_its_neighbours_are_processed(
    business: Business, start: Start, max_attempts: int
) -> None:
    send(business, ids(8))
    settings = {"deadly": ["m0003"], "max_attempts": max_attempts}
    supervise([start(**settings)], start, lambda: not waiting(business), **settings)
    innocent = [id_ for id_ in ids(8) if id_ != "m0003"]
    assert business.letters() == {"m0003": "crashed"}
    assert business.applied() == once(innocent)
    assert business.balance() == len(innocent)
    assert 1 <= runs(business)["m0003"] <= max_attempts + (max_attempts > 1)
    assert business.failing() == {}


@BOTH_KINDS
@pytest.mark.parametrize(
    ("moment", "run_again"),
    [
        ({"kill_at": "Received"}, []),
        ({"deadly_once": ["m0004"], "transactions": "batch"}, 5),
        ({"deadly_once": ["m0004"], "transactions": "message"}, 1),
        ({"kill_at": "Committed", "transactions": "batch"}, 0),
        ({"kill_at": "Committed", "transactions": "message"}, 0),
        ({"kill_at": "Settled"}, 0),
    ],
)
def test_killed_at_any_moment(business: Business, start: Start, moment: dict[str, Any], run_again: int) -> None:
    send(business, ids(10))
    assert start(**moment).wait(60) == KILLED
    committed = business.applied()
    left = set(business.rows("SELECT message_id FROM outbox_message"))
    assert left == set(ids(10)) - committed.keys(), "a message is in the outbox, or its effect is there"
    supervise([start()], start, lambda: not waiting(business))
    assert business.applied() == once(ids(10))
    assert business.balance() == 10
    assert business.letters() == {}
    assert sum((runs(business) - once(ids(10))).values()) == (run_again or 0), "what has committed is not run again"


@pytest.mark.parametrize("number", range(1, 17))
def test_killed_before_each_round_trip(business: Business, start: Start, number: int) -> None:
    """A kill at any moment leaves each message in the outbox, or its effect in the database; never both, never none."""
    send(business, ids(6), key=lambda _: "k")
    assert start(kill_before=number, transactions="message", ordered=True).wait(60) == KILLED
    left = set(business.rows("SELECT message_id FROM outbox_message"))
    assert left == set(ids(6)) - business.applied().keys()
    supervise([start(ordered=True)], start, lambda: not waiting(business))
    assert business.order() == ids(6)
    assert business.balance() == 6
    assert business.letters() == {}


@pytest.mark.parametrize(
    "settings",
    [{}, {"in_sql": True}, {"ordered": True}, {"coroutines": True, "threads": 8, "batch_size": 2}],
    ids=["handler", "effect", "ordered", "coroutines"],
)
def test_random_kills_of_workers(business: Business, start: Start, settings: dict[str, Any]) -> None:
    messages, kills, chance = ids(500), 10, random.Random(7)
    every = messages + chance.sample(messages, 50)  # the producer sends some again, under the same ids
    portions = [every[first : first + 100] for first in range(0, len(every), 100)]
    settings = {"pause": 0.015, "threads": 2, "max_attempts": 10, **settings}
    processes = [start(**settings) for _ in range(3)]
    left = kills

    def done() -> bool:
        nonlocal left
        at_work = Counter(business.rows("SELECT pid FROM run"))
        busy = [p for p in processes if p.poll() is None and at_work[p.pid] >= chance.randint(1, 12)]
        if left and busy:
            victim = chance.choice(busy)
            victim.kill()
            victim.wait(20)
            left -= 1
        if waiting(business):
            return False
        if portions:
            send(business, portions.pop(0), key=lambda one: one[-1])
            return False
        return True

    supervise(processes, start, done, **settings)
    assert business.letters() == {}
    assert business.applied() == once(messages)
    assert business.balance() == len(messages)
    assert business.failing() == {}
    if settings.get("ordered"):
        for key in "0123456789":
            of_key = [one for one in business.order() if one[-1] == key]
            assert of_key == sorted(of_key), "messages of a key are applied in their order"
    assert kills - left >= kills // 2, "enough kills to mean something"


@BOTH_KINDS
def test_a_process_that_is_stopped_loses_its_claims_and_applies_nothing_twice(business: Business, start: Start) -> None:
    send(business, ids(40))
    stopped = start(pause=0.3, threads=4, batch_size=2, transaction_seconds=3, visibility_seconds=2)
    wait_until(lambda: runs(business), timeout=60)
    stopped.send_signal(signal.SIGSTOP)
    other = start(threads=4)
    wait_until(lambda: business.applied() == once(ids(40)), "another worker has done all of it", timeout=60)
    stopped.send_signal(signal.SIGCONT)
    supervise([stopped, other], start, lambda: not waiting(business))
    assert business.applied() == once(ids(40))
    assert business.balance() == 40
    assert business.letters() == {}


@BOTH_KINDS
def test_sigterm_finishes_what_was_begun_and_leaves_the_rest(business: Business, start: Start) -> None:
    send(business, ids(10))
    process = start(pause=2, transactions="message", visibility_seconds=300)
    wait_until(lambda: runs(business), timeout=60)
    process.terminate()
    assert process.wait(20) == 0
    done = business.applied()
    assert runs(business) == done, "what was begun was finished"
    assert waiting(business) == 10 - len(done) > 0
    supervise([start()], start, lambda: not waiting(business))
    assert business.applied() == once(ids(10))
