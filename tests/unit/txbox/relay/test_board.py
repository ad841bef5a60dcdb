"""The board: whoever waits for a claim gets one, and nobody waits for ever."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from support.waiting import wait_until
from txbox.backoff import Backoff
from txbox.errors import BrokerError
from txbox.relay import OutboxMessage
from txbox.relay import board as board_module
from txbox.relay.board import Board
from txbox.relay.pending import Claim
from txbox.relay.sending import Done
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
        board.put(dict.fromkeys(range(64), 1), ())
        claims = [future.result(10) for future in futures]
    lanes = [lane for claim in claims if claim is not None for lane in claim.lanes]
    assert sorted(lanes) == list(range(64))
    assert [len(claim.lanes) for claim in claims if claim is not None] == [16] * THREADS


@pytest.mark.parametrize("give_back", [Board.finish, Board.postpone], ids=["finished", "postponed"])
def test_what_is_given_back_is_there_for_another(
    board: Board, give_back: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "OUTAGE_BACKOFF", Backoff(first_seconds=0.01))
    board.put({7: 1}, ())
    claim = board.take()
    assert claim is not None
    with ThreadPoolExecutor(THREADS) as pool:
        futures = all_wait(board, pool)
        if give_back is Board.finish:
            board.finish(claim, Done(fresh={7: 5}))
        else:
            board.postpone(claim)
        wait_until(lambda: any(future.done() for future in futures), "one of them has it")
        board.close()
        taken = [future.result(10) for future in futures]
    assert [claim.lanes for claim in taken if claim is not None] == [frozenset({7})]


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
