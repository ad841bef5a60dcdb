"""Sandboxes that are killed or frozen in the middle of an invocation: nothing is lost, and nothing is done twice."""

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine

from support.aws.lambda_events import NOTHING, Context, EventSourceMapping, again, failing, of
from support.aws.lambda_process import Sandbox, function_in
from support.aws.queues import held, send
from support.waiting import wait_until
from support.workers.business import Business, once
from txbox import Inbox, InFlight
from txbox.leases.lease import elapsed

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

Start = Callable[..., Sandbox]


@pytest.fixture
def start(schema_url: str) -> Iterator[Start]:
    sandboxes: list[Sandbox] = []

    def start(**settings: Any) -> Sandbox:
        sandboxes.append(Sandbox(schema_url, **settings))
        return sandboxes[-1]

    yield start
    for sandbox in sandboxes:
        sandbox.close()


@pytest.fixture
def answer(schema_url: str) -> Callable[..., Any]:
    """Answer an event by a function in this process: answer(event, seconds, **settings)."""

    def answer(event: dict[str, Any], seconds: float, **settings: Any) -> Any:
        with function_in(schema_url, **settings) as function:
            return function(event, Context(seconds))

    return answer


def runs(business: Business) -> Counter[str]:
    return Counter(business.rows("SELECT message_id FROM run"))


def test_an_invocation_that_is_killed_comes_again(business: Business, start: Start, answer: Callable[..., Any]) -> None:
    asked = of("abcd")
    victim = start(deadly_once=["c"])
    assert victim.invoke(asked, 30) is None
    assert victim.process.wait(20) == -signal.SIGKILL
    assert business.applied() == Counter()
    assert answer(again(asked, failing("abcd")), 30) == NOTHING
    assert business.applied() == once("abcd")
    assert business.balance() == 4


def test_a_lease_of_a_killed_invocation_is_over_when_the_invocation_would_be(
    business: Business, start: Start, schema_url: str
) -> None:
    asked = of("a")
    context_seconds = 3.0
    victim = start(ledger=True, deadly_once=["a"], lease_seconds=600)
    assert victim.invoke(of(["warm"]), 30) == NOTHING, "it is there before the time counts"
    begun = elapsed()
    assert victim.invoke(asked, context_seconds) is None
    asked = again(asked, failing("a"))
    with function_in(schema_url, ledger=True, lease_seconds=600) as successor:
        wait_until(lambda: successor(asked, Context(30)) == NOTHING, "the lease is over", timeout=20, every=0.1)
    assert elapsed() - begun >= context_seconds - 1, "in flight until then"
    assert runs(business)["a"] == 2


def test_a_frozen_sandbox_gives_up_its_locks_when_its_time_is_over(
    engine: Engine, business: Business, start: Start, answer: Callable[..., Any]
) -> None:
    """Lambda does not thaw a process whose invocation has timed out: nothing closes its connection."""
    asked, seconds = of("abc"), 3.0
    victim = start(frozen_once=["b"])
    assert victim.invoke(of(["warm"]), 30) == NOTHING
    begun = elapsed()
    victim.send(asked, seconds)
    wait_until(lambda: runs(business)["b"], "the handler of b is stopped")

    def free() -> bool:
        with engine.connect() as connection:
            try:
                return Inbox("billing", wait_seconds=0.01).record(connection, "b")
            except InFlight:
                return False
            finally:
                connection.rollback()

    wait_until(free, "the lock on b is given up", timeout=20)
    assert elapsed() - begun >= seconds - 1.0, "and not before"
    assert answer(again(asked, failing("abc")), 30) == NOTHING
    assert business.applied() == once(["a", "b", "c", "warm"])

    # Should it ever wake up, it finds that its transaction is gone.
    os.kill(victim.process.pid, signal.SIGCONT)
    assert len(victim.answer()["batchItemFailures"]) == 3, "nothing of its own was committed"
    assert business.applied() == once(["a", "b", "c", "warm"])


def campaign(
    business: Business, sqs: "SQSClient", queue: str, start: Start, *, messages: int, kills: int, seed: int, fifo: bool
) -> None:
    """Three sandboxes at a time, killed at random while they are at work, until the queue is empty."""
    chance = random.Random(seed)
    ids = [f"m{number:04}" for number in range(messages)]
    if fifo:
        for number in range(5):
            send(sqs, queue, ids[number::5], group=f"g-{number}")
    else:
        send(sqs, queue, ids)
        send(sqs, queue, chance.sample(ids, messages // 10))  # the producer re-sends some
    mapping = EventSourceMapping(sqs, queue)
    left = threading.Semaphore(kills)
    killed = []

    def invoker(number: int) -> None:
        luck = random.Random(f"{seed} {number}")
        sandbox = start(pause=0.01, max_attempts=10)

        def invoke(event: dict[str, Any]) -> dict[str, Any] | None:
            # Until one was killed, each is to be, and early: not by luck alone is there a kill.
            timer = threading.Timer(luck.uniform(0.005, 0.15 if killed else 0.05), sandbox.process.kill)
            deadly = (not killed or luck.random() < 0.5) and left.acquire(blocking=False)
            sandbox.send(event, 20)
            if deadly:
                timer.start()
            answer = sandbox.answer()
            timer.cancel()
            if answer is None:
                killed.append(number)
            elif deadly:
                left.release()
            return answer

        while sum(held(sqs, queue).values()):
            mapping.poll(invoke)
            if sandbox.process.poll() is not None:
                sandbox.close()
                sandbox = start(pause=0.01, max_attempts=10)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(invoker, number) for number in range(3)]:
            done.result(150)
    assert business.letters() == {}, f"seed {seed}"
    assert business.applied() == once(ids), f"seed {seed}"
    assert business.balance() == messages
    assert len(killed) >= kills // 3, "enough kills to mean something"
    if fifo:
        order = business.order()
        for number in range(5):
            assert [it for it in order if it in set(ids[number::5])] == ids[number::5], f"seed {seed}"


@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
@pytest.mark.chaos
def test_random_kills_of_a_function(
    business: Business, sqs: "SQSClient", make_queue: Callable[..., str], start: Start, fifo: bool
) -> None:
    queue = make_queue(fifo=fifo, VisibilityTimeout="1")
    campaign(business, sqs, queue, start, messages=80, kills=5, seed=11, fifo=fifo)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_many_random_kills_of_a_function(
    business: Business, sqs: "SQSClient", make_queue: Callable[..., str], start: Start, seed: int
) -> None:
    queue = make_queue(VisibilityTimeout="1")
    campaign(business, sqs, queue, start, messages=600, kills=30, seed=seed, fifo=False)
