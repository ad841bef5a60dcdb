"""Who may have another sender: those that hang never have them all, and never more than the limit."""

import random

import pytest

from txbox.bounded_memory import Recent
from txbox.relay.fair_share import SLOW_SECONDS, AsyncShare, ClaimInProgress, DestinationHealth, FairShare

SENDERS, MOST = 4, 16


@pytest.fixture
def share() -> FairShare:
    """Destination 1 is quick, 2 slow, 3 unreachable; others are new."""
    share = FairShare(SENDERS, MOST)
    share.answered(1, 0.01)
    share.answered(2, SLOW_SECONDS * 2)
    share.mark_unreachable(3)
    return share


def test_one_that_answers_may_have_all_of_the_usual_ones_while_it_is_alone(share: FairShare) -> None:
    share.count([ClaimInProgress(1, DestinationHealth.QUICK)] * 3)
    assert share.rank(1, alone=True) == 0
    assert share.rank(1, alone=False) is None, "two, beside others"
    share.count([ClaimInProgress(1, DestinationHealth.QUICK)] * 4)
    assert share.rank(1, alone=True) is None


def test_those_in_doubt_have_one_each_and_come_last(share: FairShare) -> None:
    share.count([])
    ranks = [share.rank(destination, alone=False) for destination in (1, 2, 9, 3)]
    assert ranks == [0, 1, 2, 3]
    share.count([ClaimInProgress(9, DestinationHealth.NEW), ClaimInProgress(3, DestinationHealth.UNREACHABLE)])
    assert share.rank(9, alone=False) is None
    assert share.rank(3, alone=False) is None
    assert share.rank(10, alone=False) == DestinationHealth.NEW


def test_one_whose_call_hangs_has_no_more_and_its_sender_is_not_missed(share: FairShare) -> None:
    share.count([ClaimInProgress(1, DestinationHealth.QUICK, hangs=True)] * 2)
    assert share.rank(1, alone=False) is None
    assert share.free_senders(1) == SENDERS
    assert share.wanted_senders == SENDERS + 2


def test_a_slow_one_leaves_room_for_those_that_are_away_and_they_for_it(share: FairShare) -> None:
    share.count([ClaimInProgress(number, DestinationHealth.UNREACHABLE) for number in range(10, 19)])
    assert share.rank(3, alone=False) is None
    assert share.rank(2, alone=False) == DestinationHealth.SLOW
    share.count([ClaimInProgress(number, DestinationHealth.SLOW) for number in range(10, 19)])
    assert share.rank(2, alone=False) is None
    assert share.rank(3, alone=False) == DestinationHealth.UNREACHABLE


@pytest.mark.parametrize(("senders", "most"), [(1, 1), (1, 8), (2, 2), (4, 4), (4, 5), (4, 16), (4, 32)])
def test_whatever_happens_there_is_room_for_one_that_answers_and_an_end_to_the_others(senders: int, most: int) -> None:
    """Destinations hang, answer slowly, are unreachable; destination 0 always answers."""
    chance = random.Random(senders * 100 + most)
    share = FairShare(senders, most)
    share.answered(0, 0.0)
    under_way: list[ClaimInProgress] = []
    for _ in range(2_000):
        share.count(under_way)
        destination = chance.randrange(1, 50)
        if len(under_way) < most and share.rank(destination, alone=False) is not None:
            health = share.health(destination)
            under_way.append(ClaimInProgress(destination, health, hangs=health is not DestinationHealth.QUICK))
        elif under_way and chance.random() < 0.2:
            ended = under_way.pop(chance.randrange(len(under_way)))
            chance.choice([share.mark_unreachable, lambda number: share.answered(number, SLOW_SECONDS * 2)])(
                ended.destination
            )
        share.count(under_way)
        assert len(under_way) <= max(most - senders, senders // 2, 1)
        assert senders == most == 1 or share.rank(0, alone=False) == 0
        assert share.wanted_senders <= most


def test_what_was_told_longest_ago_is_forgotten() -> None:
    recent: Recent[int, int] = Recent(3)
    for number in (1, 2, 3, 1, 4):
        recent[number] = number
    assert list(recent) == [3, 1, 4]


# --- calls that are awaited ------------------------------------------------------------------------------------------


def test_new_destinations_share_half_of_all_calls_and_those_that_answer_have_the_rest() -> None:
    share = AsyncShare(8)
    for destination in range(10, 20):
        share.answered(destination, 0.1)
    share.count([ClaimInProgress(number, DestinationHealth.NEW) for number in range(4)])
    assert share.rank(4) is None, "half of them are taken"
    share.count(ClaimInProgress(number, DestinationHealth.NEW) for number in range(3))
    assert (share.rank(2), share.rank(3)) == (None, DestinationHealth.NEW), "one each"
    for destination in range(10, 15):
        assert share.rank(destination) is DestinationHealth.QUICK
        share.add(ClaimInProgress(destination, DestinationHealth.QUICK))
    assert (share.free, share.rank(15)) == (0, None)


def test_slow_ones_leave_a_quarter_and_may_have_several_calls_while_most_are_free() -> None:
    share = AsyncShare(8)
    for destination in range(10):
        share.answered(destination, 5.0 if destination < 9 else 0.1)
    share.count([ClaimInProgress(0, DestinationHealth.SLOW, hangs=True)] * 3)
    assert share.rank(0) is DestinationHealth.SLOW
    share.add(ClaimInProgress(0, DestinationHealth.SLOW))
    assert share.rank(0) is None, "half of them are not free any more"
    for destination in (1, 2):
        assert share.rank(destination) is not None
        share.add(ClaimInProgress(destination, DestinationHealth.SLOW))
    assert (share.rank(3), share.rank(9)) == (None, DestinationHealth.QUICK)
    share.count([ClaimInProgress(number, DestinationHealth.QUICK, hangs=True) for number in range(10, 16)])
    assert (share.rank(3), share.rank(9)) == (None, DestinationHealth.QUICK), "quick ones that hang are slow ones"
    share.count([ClaimInProgress(number, DestinationHealth.QUICK, hangs=True) for number in range(10, 18)])
    assert share.rank(9) is None, "but they keep what they have, even if that is all"


def test_a_quick_one_that_hangs_has_no_second_call() -> None:
    share = AsyncShare(8)
    share.answered(1, 0.1)
    share.count([ClaimInProgress(1, DestinationHealth.QUICK)])
    assert share.rank(1) is DestinationHealth.SLOW
    share.count([ClaimInProgress(1, DestinationHealth.QUICK, hangs=True)])
    assert share.rank(1) is None
