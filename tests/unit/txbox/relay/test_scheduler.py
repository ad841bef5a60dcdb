"""The board: whoever waits for a claim gets one, and nobody waits for ever."""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from support.waiting import wait_until
from txbox.errors import BrokerError
from txbox.relay import OutboxMessage
from txbox.relay.pending import Claim
from txbox.relay.scheduler import Board
from txbox.relay.sender import Done
from txbox.relay.settlement import Row, Settlement

THREADS = 4
SEVEN = Claim({7: 1})


@pytest.fixture
def board() -> Board:
    return Board(1_000)


def all_wait(board: Board, pool: ThreadPoolExecutor) -> list[Future[Claim | None]]:
    futures = [pool.submit(board.take) for _ in range(THREADS)]
    wait_until(lambda: board._takers == THREADS, "all of them wait")
    return futures


def test_those_who_wait_share_what_comes(board: Board) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        futures = all_wait(board, pool)
        board._shares.answered(SEVEN.destination, 0.0)
        board.put(dict.fromkeys(range(64), 1), ())
        claims = [future.result(10) for future in futures]
    lanes = [lane for claim in claims if claim is not None for lane in claim.lanes]
    assert sorted(lanes) == list(range(64))
    assert [len(claim.lanes) for claim in claims if claim is not None] == [16] * THREADS


def test_what_is_given_back_is_there_for_another(board: Board) -> None:
    board.put({7: 1}, ())
    claim = board.take()
    assert claim is not None
    with ThreadPoolExecutor(THREADS) as pool:
        futures = all_wait(board, pool)
        board.finish(claim, Done(fresh={7: 5}))
        wait_until(lambda: any(future.done() for future in futures), "one of them has it")
        board.close()
        taken = [future.result(10) for future in futures]
    assert [claim.lanes for claim in taken if claim is not None] == [frozenset({7})]


def test_a_lost_connection_takes_the_memory_with_it_until_everything_was_looked_at(board: Board) -> None:
    """A crash of the server may have undone what the memory rests on: m1 waits again, and it says "next: m2"."""
    board.put({7: 1, 8: 1}, [9], server="first run", anew=True)
    lost = board.take()
    assert lost is not None
    assert lost.server == "first run"
    board.put({7: 5}, ())
    late = board.memory
    board.postpone(lost)
    assert board.blind
    board.put({7: 5}, (), memory=board.memory)
    assert not board._pending, "a look for what is new says too little"
    board.put({7: 5}, (), server="first run", anew=True, memory=late)
    assert board.blind, "and a look that began before it was lost may say what is not true any more"
    board.put({7: 1}, (), server="second run", anew=True, memory=board.memory)
    board._pending.pause(lost, 0.0)
    claim = board.take()
    assert claim is not None
    assert (dict(claim.fresh), claim.due, claim.server) == ({7: 1}, frozenset(), "second run")


def test_what_an_older_claim_left_is_not_taken_back(board: Board) -> None:
    board.put({7: 1}, (), anew=True)
    claim = board.take()
    assert claim is not None
    board.forget()
    board.put({7: 1}, (), anew=True, memory=board.memory)
    board.finish(claim, Done(fresh={7: 9}, due={7}))
    again = board.take()
    assert again is not None
    assert (dict(again.fresh), again.due) == ({7: 1}, frozenset())


def test_the_end_is_seen_by_all_who_wait(board: Board) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        futures = all_wait(board, pool)
        board.close()
        assert [future.result(10) for future in futures] == [None] * THREADS
    assert board.take() is None


def test_a_destination_that_is_away_is_tried_later_and_later_until_something_was_sent(board: Board) -> None:
    row = Row(7, 1, False, OutboxMessage("m-1", "own:somewhere", b""))
    pauses = []
    for outage in (BrokerError("away"), BrokerError("away"), BrokerError("away"), None, BrokerError("away again")):
        board._pending.pause(SEVEN, 0.0)  # as if the last pause had passed
        board.put({7: 1}, ())
        claim = board.take()
        assert claim is not None
        settlement = Settlement() if outage else Settlement(sent=[row])
        restored, pause = board.finish(claim, Done(settlement, outage=outage))
        assert restored == (outage is None)
        pauses.append(pause)
    first, second, third, none, again = pauses
    assert 0.25 <= first <= 0.5 <= second <= 1.0 <= third <= 2.0
    assert none == 0.0
    assert 0.25 <= again <= 0.5
