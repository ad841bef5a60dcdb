"""The scheduler: every sender that waits for a claim gets one, and none waits for ever."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from support.waiting import wait_until
from txbox.errors import BrokerError
from txbox.relay import OutboxMessage
from txbox.relay.pending import Claim
from txbox.relay.scheduler import Scheduler
from txbox.relay.sender import ClaimResult
from txbox.relay.settlement import BatchSettlement, Row

THREADS = 4
SEVEN = Claim({7: 1})


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(1_000)


def all_wait(scheduler: Scheduler, pool: ThreadPoolExecutor) -> list[Future[Claim | None]]:
    futures = [pool.submit(scheduler.take) for _ in range(THREADS)]
    wait_until(lambda: scheduler._waiting_senders == THREADS, "all of them wait")
    return futures


def test_those_who_wait_share_what_comes(scheduler: Scheduler) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        futures = all_wait(scheduler, pool)
        scheduler._share.answered(SEVEN.destination, 0.0)
        scheduler.add(dict.fromkeys(range(64), 1), ())
        claims = [future.result(10) for future in futures]
    lanes = [lane for claim in claims if claim is not None for lane in claim.lanes]
    assert sorted(lanes) == list(range(64))
    assert [len(claim.lanes) for claim in claims if claim is not None] == [16] * THREADS


def test_what_is_given_back_is_there_for_another(scheduler: Scheduler) -> None:
    scheduler.add({7: 1}, ())
    claim = scheduler.take()
    assert claim is not None
    with ThreadPoolExecutor(THREADS) as pool:
        futures = all_wait(scheduler, pool)
        scheduler.finish(claim, ClaimResult(fresh={7: 5}))
        wait_until(lambda: any(future.done() for future in futures), "one of them has it")
        scheduler.close()
        taken = [future.result(10) for future in futures]
    assert [claim.lanes for claim in taken if claim is not None] == [frozenset({7})]


def test_a_lost_connection_takes_the_memory_with_it_until_everything_was_looked_at(scheduler: Scheduler) -> None:
    """A crash of the server may have undone what the memory rests on: m1 waits again, and it says "next: m2"."""
    scheduler.add({7: 1, 8: 1}, [9], server="first run", everything=True)
    lost = scheduler.take()
    assert lost is not None
    assert lost.server == "first run"
    scheduler.add({7: 5}, ())
    late = scheduler.generation
    scheduler.fail(lost)
    assert scheduler.needs_everything
    scheduler.add({7: 5}, (), generation=scheduler.generation)
    assert not scheduler._pending, "a poll for what is new says too little"
    scheduler.add({7: 5}, (), server="first run", everything=True, generation=late)
    assert scheduler.needs_everything, "and a poll that began before it was lost may say what is not true any more"
    scheduler.add({7: 1}, (), server="second run", everything=True, generation=scheduler.generation)
    scheduler._pending.pause(lost, 0.0)
    claim = scheduler.take()
    assert claim is not None
    assert (dict(claim.fresh), claim.due, claim.server) == ({7: 1}, frozenset(), "second run")


def test_what_an_older_claim_left_is_not_taken_back(scheduler: Scheduler) -> None:
    scheduler.add({7: 1}, (), everything=True)
    claim = scheduler.take()
    assert claim is not None
    scheduler.forget()
    scheduler.add({7: 1}, (), everything=True, generation=scheduler.generation)
    scheduler.finish(claim, ClaimResult(fresh={7: 9}, due={7}))
    again = scheduler.take()
    assert again is not None
    assert (dict(again.fresh), again.due) == ({7: 1}, frozenset())


def test_the_end_is_seen_by_all_who_wait(scheduler: Scheduler) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        futures = all_wait(scheduler, pool)
        scheduler.close()
        assert [future.result(10) for future in futures] == [None] * THREADS
    assert scheduler.take() is None


def test_a_destination_that_is_away_is_tried_later_and_later_until_something_was_sent(scheduler: Scheduler) -> None:
    row = Row(7, 1, False, OutboxMessage("m-1", "own:somewhere", b""))
    pauses = []
    for outage in (BrokerError("away"), BrokerError("away"), BrokerError("away"), None, BrokerError("away again")):
        scheduler._pending.pause(SEVEN, 0.0)  # as if the last pause had passed
        scheduler.add({7: 1}, ())
        claim = scheduler.take()
        assert claim is not None
        settlement = BatchSettlement() if outage else BatchSettlement(sent=[row])
        change = scheduler.finish(claim, ClaimResult(settlement, outage=outage))
        assert change.restored == (outage is None)
        pauses.append(change.pause_seconds)
    first, second, third, none, again = pauses
    assert 0.25 <= first <= 0.5 <= second <= 1.0 <= third <= 2.0
    assert none == 0.0
    assert 0.25 <= again <= 0.5


def test_who_reads_a_destination_first_finds_whose_it_is() -> None:
    scheduler = Scheduler(1_000, concurrency=10, all_async=None)
    for found in (True, False):
        scheduler.add({7: 1}, ())
        [claim] = scheduler.take_async(1_000, seconds=0.0)
        scheduler.finish(claim, ClaimResult(fresh={7: 1}, is_async=found))
    assert scheduler.take_async(1_000, seconds=0.0) == [], "it is not the async sender's"
    taken = scheduler.take()
    assert taken is not None
    scheduler.finish(taken, ClaimResult(fresh={7: 1}, is_async=True))
    scheduler.add(dict.fromkeys(range(64 * 5, 64 * 5 + 64), 1), ())
    other = scheduler.take()
    assert other is not None
    assert other.destination == 5
    [awaited] = scheduler.take_async(1_000, seconds=0.0)
    assert (awaited.lanes, awaited.answered) == ({7}, False)


def test_an_async_sender_takes_all_destinations_at_once_within_its_lanes() -> None:
    scheduler = Scheduler(1_000, concurrency=10, all_async=True)
    scheduler.add({64 * destination + lane: 1 for destination in range(6) for lane in range(64)}, ())
    claims = scheduler.take_async(24, seconds=0.0)
    assert [claim.destination for claim in claims] == [0, 1, 2, 3, 4], "five new ones, one claim each"
    assert sum(len(claim.lanes) for claim in claims) <= 24
    began = time.monotonic()
    assert scheduler.take_async(0, seconds=0.05) == []
    assert time.monotonic() - began >= 0.05, "without room it waits"
    scheduler.close()
    assert scheduler.take_async(24, seconds=60.0) == [], "a stop ends the wait"
