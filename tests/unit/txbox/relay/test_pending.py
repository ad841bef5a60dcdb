"""What a relay knows to be waiting: lanes, where to begin in each, and who has them."""

import math

from txbox.outbox.lanes import LANES_PER_DESTINATION, destination_of
from txbox.relay.pending import FEW_LANES, LOCKED_SECONDS, MAX_LOCKED_SECONDS, Claim, PendingLanes

OTHER = LANES_PER_DESTINATION * 5
"""The first lane of another destination."""


def take(pending: PendingLanes, now: float = 0.0, parts: int = 1) -> Claim:
    claim = pending.take(now, parts=lambda _: parts)
    assert claim is not None
    return claim


def test_a_lane_is_read_from_the_first_position_that_was_told() -> None:
    pending = PendingLanes()
    pending.add({1: 20})
    pending.add({1: 10})
    pending.add({1: 30, 2: 5})
    assert take(pending).fresh == {1: 10, 2: 5}
    assert not pending


def test_a_lane_is_in_the_hands_of_one_only() -> None:
    pending = PendingLanes()
    pending.add({1: 10})
    claim = take(pending)
    pending.add({1: 40}, [1])
    assert pending
    assert pending.take(0.0) is None
    pending.release(claim)
    assert take(pending) == Claim({1: 40}, frozenset([1]))


def test_lanes_are_shared_among_those_who_wait_for_work() -> None:
    pending = PendingLanes()
    pending.add(dict.fromkeys(range(64), 1))
    assert len(take(pending, parts=2).lanes) == 32
    assert len(take(pending, parts=4).lanes) == FEW_LANES
    assert len(take(pending).lanes) == 16


def test_no_more_lanes_are_handed_out_than_a_batch_has_messages() -> None:
    pending = PendingLanes(most_lanes=10)
    pending.add(dict.fromkeys(range(64), 1))
    assert [len(take(pending).lanes) for _ in range(2)] == [10, 10]


def test_each_destination_has_its_turn() -> None:
    pending = PendingLanes()
    pending.add(dict.fromkeys([*range(40), *range(OTHER, OTHER + 40)], 1))
    turns = [take(pending, parts=4).destination for _ in range(6)]
    assert turns == [0, 5, 0, 5, 0, 5]


def test_the_lowest_rank_comes_first_and_what_has_none_waits() -> None:
    pending = PendingLanes()
    pending.add(dict.fromkeys([1, OTHER, 2 * OTHER], 1))
    ranks = {0: None, 5: 2, 10: 1}
    turns = [pending.take(0.0, rank=ranks.get) for _ in range(3)]
    assert [claim and claim.destination for claim in turns] == [10, 5, None]
    assert pending.next_change() == -math.inf
    assert pending.next_change(after=0.0) == math.inf, "it changes when a claim comes back"


def test_a_pause_keeps_back_one_destination_until_it_ends() -> None:
    pending = PendingLanes()
    pending.add({1: 1, OTHER: 1})
    first = take(pending)
    assert first.destination == 0
    pending.release(first)
    pending.add(first.fresh)
    pending.pause(first, until=10.0)
    assert pending.next_change() == -math.inf
    assert take(pending, now=5.0).destination == 5
    assert pending.take(9.9) is None
    assert pending.next_change() == 10.0
    assert take(pending, now=10.0).fresh == {1: 1}
    assert pending.next_change() == math.inf


def test_a_lane_that_another_relay_has_is_put_off_with_all_that_becomes_known_of_it() -> None:
    """Were its position kept apart meanwhile, the lane would be read from a later one, and a key lose its order."""
    pending = PendingLanes()
    pending.add({1: 10, 2: 10})
    claim = take(pending)
    pending.release(claim)
    pending.mark_locked([1], now=5.0)
    pending.add({1: 10})
    pending.add({1: 20, 2: 20})
    assert take(pending, now=5.0).fresh == {2: 20}
    assert pending.next_change() == 5.0 + LOCKED_SECONDS
    assert pending.take(5.0) is None
    assert take(pending, now=5.0 + LOCKED_SECONDS).fresh == {1: 10}


def test_a_lane_that_another_relay_has_again_and_again_is_tried_less_and_less_often() -> None:
    pending = PendingLanes()
    pauses = []
    for _ in range(8):
        pending.add({1: 10})
        pending.mark_locked([1], now=0.0)
        pauses.append(pending.next_change())
    assert pauses[:3] == [LOCKED_SECONDS, 2 * LOCKED_SECONDS, 4 * LOCKED_SECONDS]
    assert pauses[-1] == MAX_LOCKED_SECONDS
    pending.mark_unlocked([1])
    assert pending.next_change() == -math.inf


def test_thousands_of_destinations_are_taken_one_after_the_other() -> None:
    pending = PendingLanes()
    lanes = [LANES_PER_DESTINATION * number for number in range(5_000)]
    pending.add(dict.fromkeys(lanes, 1))
    taken = []
    while (claim := pending.take(0.0)) is not None:
        taken += claim.lanes
        pending.release(claim)
    assert taken == lanes


def test_lanes_with_due_keys_are_handed_out_beside_those_with_new_messages() -> None:
    pending = PendingLanes()
    pending.add({1: 10}, [1, 2])
    claim = take(pending)
    assert claim == Claim({1: 10}, frozenset([1, 2]))
    assert claim.lanes == {1, 2}
    assert not pending


def test_what_is_held_back_is_not_taken_nor_waited_for_until_it_is_let_go() -> None:
    pending = PendingLanes()
    pending.add({1: 10, OTHER: 20})
    pending.hold_back(frozenset({destination_of(1)}))
    assert (pending.destinations, take(pending).fresh) == (1, {OTHER: 20})
    assert pending.take(0.0) is None
    assert pending.next_change() == math.inf, "there is nothing to wake up for"
    pending.add({2: 5})
    assert pending.take(0.0) is None
    pending.hold_back(frozenset())
    assert take(pending).fresh == {1: 10, 2: 5}
