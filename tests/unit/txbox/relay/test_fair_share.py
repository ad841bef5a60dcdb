"""Who may have another sender: those that hang never have them all, and never more than the limit."""

import random

import pytest

from txbox.bounded_memory import Recent
from txbox.relay.fair_share import SLOW_SECONDS, Shares, Standing, Work

SENDERS, MOST = 4, 16


@pytest.fixture
def shares() -> Shares:
    """Destination 1 is quick, 2 slow, 3 away; others are new."""
    shares = Shares(SENDERS, MOST)
    shares.answered(1, 0.01)
    shares.answered(2, SLOW_SECONDS * 2)
    shares.away(3)
    return shares


def test_one_that_answers_may_have_all_of_the_usual_ones_while_it_is_alone(shares: Shares) -> None:
    shares.count([Work(1, Standing.QUICK)] * 3)
    assert shares.rank(1, alone=True) == 0
    assert shares.rank(1, alone=False) is None, "two, beside others"
    shares.count([Work(1, Standing.QUICK)] * 4)
    assert shares.rank(1, alone=True) is None


def test_those_in_doubt_have_one_each_and_come_last(shares: Shares) -> None:
    shares.count([])
    ranks = [shares.rank(destination, alone=False) for destination in (1, 2, 9, 3)]
    assert ranks == [0, 1, 2, 3]
    shares.count([Work(9, Standing.NEW), Work(3, Standing.AWAY)])
    assert shares.rank(9, alone=False) is None
    assert shares.rank(3, alone=False) is None
    assert shares.rank(10, alone=False) == Standing.NEW


def test_one_whose_call_hangs_has_no_more_and_its_sender_is_not_missed(shares: Shares) -> None:
    shares.count([Work(1, Standing.QUICK, hangs=True)] * 2)
    assert shares.rank(1, alone=False) is None
    assert shares.free(1) == SENDERS
    assert shares.wanted == SENDERS + 2


def test_a_slow_one_leaves_room_for_those_that_are_away_and_they_for_it(shares: Shares) -> None:
    shares.count([Work(number, Standing.AWAY) for number in range(10, 19)])
    assert shares.rank(3, alone=False) is None
    assert shares.rank(2, alone=False) == Standing.SLOW
    shares.count([Work(number, Standing.SLOW) for number in range(10, 19)])
    assert shares.rank(2, alone=False) is None
    assert shares.rank(3, alone=False) == Standing.AWAY


@pytest.mark.parametrize(("senders", "most"), [(1, 1), (1, 8), (2, 2), (4, 4), (4, 5), (4, 16), (4, 32)])
def test_whatever_happens_there_is_room_for_one_that_answers_and_an_end_to_the_others(senders: int, most: int) -> None:
    """Destinations hang, answer slowly, are away; destination 0 always answers."""
    chance = random.Random(senders * 100 + most)
    shares = Shares(senders, most)
    shares.answered(0, 0.0)
    under_way: list[Work] = []
    for _ in range(2_000):
        shares.count(under_way)
        destination = chance.randrange(1, 50)
        if len(under_way) < most and shares.rank(destination, alone=False) is not None:
            standing = shares.standing(destination)
            under_way.append(Work(destination, standing, hangs=standing is not Standing.QUICK))
        elif under_way and chance.random() < 0.2:
            ended = under_way.pop(chance.randrange(len(under_way)))
            chance.choice([shares.away, lambda number: shares.answered(number, SLOW_SECONDS * 2)])(ended.destination)
        shares.count(under_way)
        assert len(under_way) <= max(most - senders, senders // 2, 1)
        assert senders == most == 1 or shares.rank(0, alone=False) == 0
        assert shares.wanted <= most


def test_what_was_told_longest_ago_is_forgotten() -> None:
    recent: Recent[int, int] = Recent(3)
    for number in (1, 2, 3, 1, 4):
        recent[number] = number
    assert list(recent) == [3, 1, 4]
