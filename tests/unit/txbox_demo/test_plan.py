"""What a plan makes of the number of kills."""

import pytest

from txbox_demo.plan import Plan
from txbox_demo.standing import Standing


@pytest.mark.parametrize("kills", range(40))
def test_all_kills_are_given_to_somebody(kills: int) -> None:
    teams = Plan(purchases=1000, workers=2, kills=kills, seed=1).teams()
    assert sum(team.kills for team in teams) == kills
    assert min(team.kills for team in teams) >= 0


def test_with_the_default_every_role_dies_at_each_of_its_moments() -> None:
    for team in Plan(purchases=3000, workers=2, kills=24, seed=1).teams():
        assert team.kills >= len(team.role.moments), team.role.name


def test_deaths_are_planned_within_the_work() -> None:
    for team in Plan(purchases=3000, workers=2, kills=24, seed=1).teams():
        assert team.kills * team.messages_per_life * 1.5 < team.messages


COMPLETE = Standing(placed=10, billed=10, notified=10)


@pytest.mark.parametrize(
    ("standing", "complete"),
    [
        (COMPLETE, True),
        (Standing(placed=9, billed=10, notified=10), False),
        (Standing(placed=10, billed=9, notified=10), False),
        (Standing(placed=10, billed=10, notified=9), False),
        (Standing(10, 10, 10, outbox=1), False),
        (Standing(10, 10, 10, purchases_queue=1), False),
        (Standing(10, 10, 10, notifications_queue=1), False),
        (Standing(placed=11, billed=11, notified=11), True),  # too many is for the reckoning to tell
    ],
)
def test_a_run_is_complete_when_everything_is_through_and_nothing_waits(standing: Standing, complete: bool) -> None:
    assert standing.is_complete(10) is complete
