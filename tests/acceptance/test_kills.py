"""Workers that are killed: with SIGKILL at every moment of a message's life, by a message, and by their supervisor."""

import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine

from support.aws.queues import held, send, wait_until_empty
from support.waiting import wait_until
from support.workers import worker_process
from support.workers.business import Business, once
from support.workers.supervisor import BOTH_KINDS, KILLED, Start, ids, runs, supervise, worker_processes

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

pytestmark = pytest.mark.chaos


@pytest.fixture
def business(engine: Engine) -> Business:
    return worker_process.prepare(engine)


@pytest.fixture
def start(schema_url: str, queue: str, request: pytest.FixtureRequest) -> Iterator[Start]:
    with worker_processes(schema_url, queue, request) as start:
        yield start


# --- a message that kills --------------------------------------------------------------------------------------------


@BOTH_KINDS
@pytest.mark.parametrize(("max_attempts", "fifo"), [(1, False), (4, True)])
def test_a_message_that_kills_its_process_is_parked_and_its_neighbours_are_processed(
    business: Business,
    sqs: "SQSClient",
    make_queue: Callable[..., str],
    start: Start,
    max_attempts: int,
    fifo: bool,
) -> None:
    queue = make_queue(fifo=fifo)
    settings = {"deadly": ["m0003"], "max_attempts": max_attempts, "queue": queue}
    send(sqs, queue, ids(8), group="g" if fifo else None)
    supervise([start(**settings)], start, lambda: sum(held(sqs, queue).values()) == 0, **settings)
    innocent = [id_ for id_ in ids(8) if id_ != "m0003"]
    assert business.letters() == {"m0003": "crashed"}
    assert business.applied() == once(innocent)
    assert business.balance() == len(innocent)
    # What a first delivery came to is not known, where it may have been one of a batch.
    assert 1 <= runs(business)["m0003"] <= max_attempts + (max_attempts > 1)
    assert business.failing() == {}
    if fifo:
        assert business.order() == innocent


# --- kill points -----------------------------------------------------------------------------------------------------


@BOTH_KINDS
@pytest.mark.parametrize(
    ("moment", "run_again"),
    [
        ({"kill_at": "Received"}, []),
        # In one transaction for all, those before it are run again too; what was committed alone is not.
        ({"deadly_once": ["m0004"], "transactions": "batch"}, ids(5)),
        ({"deadly_once": ["m0004"], "transactions": "message"}, ["m0004"]),
        ({"kill_at": "Committed", "transactions": "batch"}, []),
        ({"kill_at": "Committed", "transactions": "message"}, []),
        ({"kill_at": "Settled"}, []),
    ],
    ids=[
        "before the transaction",
        "between insert and commit, all in one",
        "between insert and commit, one by one",
        "between commit and ack, all in one",
        "between commit and ack, one by one",
        "after the ack",
    ],
)
def test_killed_at_any_moment(
    business: Business, sqs: "SQSClient", queue: str, start: Start, moment: dict[str, Any], run_again: list[str]
) -> None:
    send(sqs, queue, ids(10))
    assert start(**moment).wait(60) == KILLED
    supervise([start()], start, lambda: sum(held(sqs, queue).values()) == 0)
    assert business.applied() == once(ids(10))
    assert business.balance() == 10
    assert business.letters() == {}
    assert runs(business) == once(ids(10)) + once(run_again), "what has committed is not run again"


# --- random kills ----------------------------------------------------------------------------------------------------


def campaign(
    business: Business,
    sqs: "SQSClient",
    queue: str,
    start: Start,
    *,
    messages: int,
    kills: int,
    seed: int,
    **more: Any,
) -> None:
    chance = random.Random(seed)
    settings = {"pause": 0.015, "threads": 2, "max_attempts": 10, **more}
    every = ids(messages) + chance.sample(ids(messages), messages // 10)  # the producer re-sends some
    # In portions: where this process stands still for seconds, one of them is processed without a kill, and not all.
    portions = [every[first : first + 100] for first in range(0, len(every), 100)]
    processes = [start(**settings) for _ in range(3)]
    left = kills

    def kill_one_at_work() -> None:
        nonlocal left
        at_work = Counter(business.rows("SELECT pid FROM run"))
        busy = [p for p in processes if p.poll() is None and at_work[p.pid] >= chance.randint(1, 12)]
        if left and busy:
            victim = chance.choice(busy)
            victim.kill()
            victim.wait(20)
            left -= 1

    def done() -> bool:
        kill_one_at_work()
        if sum(held(sqs, queue).values()) > 0:
            return False
        if portions:
            send(sqs, queue, portions.pop(0), body="{}")
            return False
        return True

    supervise(processes, start, done, **settings)
    assert business.letters() == {}, f"seed {seed}"
    assert business.applied() == once(ids(messages)), f"seed {seed}"
    assert business.balance() == messages
    published = Counter(business.rows("SELECT convert_from(body, 'utf8') FROM outbox_message"))
    assert published == (once(ids(messages)) if more.get("in_sql") else {}), f"seed {seed}"
    assert business.failing() == {}
    assert kills - left >= kills // 2, "enough kills to mean something"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"in_sql": True},
        {"prefetch": 60},
        {"in_sql": True, "prefetch": 60, "batch_size": 25, "gather_seconds": 0.05},
        {"coroutines": True, "threads": 8, "batch_size": 2},
    ],
    ids=["handler", "effect", "handler, ahead", "effect, ahead", "coroutines"],
)
def test_random_kills_of_workers(
    business: Business, sqs: "SQSClient", queue: str, start: Start, settings: dict[str, Any]
) -> None:
    campaign(business, sqs, queue, start, messages=500, kills=10, seed=7, **settings)


@pytest.mark.slow
@pytest.mark.timeout(900)
@BOTH_KINDS
@pytest.mark.parametrize("seed", range(5))
def test_many_random_kills_of_workers(
    business: Business, sqs: "SQSClient", queue: str, start: Start, seed: int
) -> None:
    campaign(business, sqs, queue, start, messages=1500, kills=40, seed=seed)


@BOTH_KINDS
def test_a_process_that_is_stopped_past_its_visibility_applies_nothing_twice(
    business: Business, sqs: "SQSClient", queue: str, start: Start
) -> None:
    """Others take up what it holds, also what its open transaction has recorded once the server has ended that."""
    send(sqs, queue, ids(40))
    stopped = start(pause=0.3, threads=4, batch_size=2, transaction_seconds=3)
    wait_until(lambda: runs(business), timeout=60)
    stopped.send_signal(signal.SIGSTOP)
    other = start(threads=4)
    wait_until(lambda: business.applied() == once(ids(40)), "another worker has done all of it", timeout=60)
    stopped.send_signal(signal.SIGCONT)
    supervise([stopped, other], start, lambda: sum(held(sqs, queue).values()) == 0)
    assert business.applied() == once(ids(40))
    assert business.balance() == 40
    assert business.letters() == {}


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "prefetch"), [("threads", 0), ("threads", 100), ("coroutines", 100)], indirect=["start"]
)
def test_sigterm_finishes_what_was_begun_and_hands_back_the_rest(
    business: Business, sqs: "SQSClient", queue: str, start: Start, prefetch: int
) -> None:
    send(sqs, queue, ids(10))
    process = start(pause=2, transactions="message", visibility_seconds=300, prefetch=prefetch)
    wait_until(lambda: runs(business), timeout=60)
    process.terminate()
    assert process.wait(20) == 0
    done = business.applied()
    assert runs(business) == done, "what was begun was finished"
    assert len(done) < 10
    assert held(sqs, queue) == {"waiting": 10 - len(done), "in_flight": 0, "delayed": 0}
    supervise([start()], start, lambda: sum(held(sqs, queue).values()) == 0)
    assert business.applied() == once(ids(10))


@BOTH_KINDS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(
    business: Business, sqs: "SQSClient", queue: str, start: Start, number: signal.Signals, tmp_path: Path
) -> None:
    send(sqs, queue, ["m0000"])
    log = tmp_path / "log"
    process = start(pause=60, visibility_seconds=2, log=str(log))
    wait_until(lambda: runs(business), timeout=60)
    process.send_signal(number)
    # Two that are sent before the process gets to run are one to it.
    wait_until(lambda: "finishing what was begun" in log.read_text(), "the first signal is seen")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(number)
    assert process.wait(10) == -number
    supervise([start()], start, lambda: sum(held(sqs, queue).values()) == 0)
    assert business.applied() == once(["m0000"])
    assert business.letters() == {}
    wait_until_empty(sqs, queue)
