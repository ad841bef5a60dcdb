"""The crew: who is started, killed, replaced, and buried."""

import signal
from collections.abc import Callable

import pytest

from txbox import TxboxError
from txbox_demo.crew import ANYWHERE, BILLING, SHOP, Crew, Role, Team
from txbox_demo.orders import Orders

MakeOrders = Callable[..., Orders]


class Server:
    """A fork server without processes."""

    def __init__(self) -> None:
        self.forked: list[Orders] = []
        self.statuses: dict[str, int] = {}
        self.signals: list[tuple[str, int]] = []
        self.deaf = False

    @property
    def running(self) -> list[Orders]:
        return [orders for orders in self.forked if orders.name not in self.statuses]

    def fork(self, orders: Orders) -> None:
        self.forked.append(orders)

    def signal(self, orders: Orders, number: int) -> None:
        self.signals.append((orders.name, number))
        if number == signal.SIGKILL or not self.deaf:
            self.statuses[orders.name] = -number

    def status(self, orders: Orders) -> int | None:
        return self.statuses.get(orders.name)

    def wait(self, processes: list[Orders], _timeout: float) -> list[Orders]:
        return [orders for orders in processes if orders.name not in self.statuses]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def make_crew(server: Server, make_orders: MakeOrders) -> Callable[..., Crew]:
    return lambda *teams: Crew(server, teams, make_orders(role="", seed=1))  # type: ignore[arg-type]


MakeCrew = Callable[..., Crew]


def test_every_role_has_its_processes_and_each_its_own_slot(server: Server, make_crew: MakeCrew) -> None:
    crew = make_crew(Team(SHOP, 2), Team(BILLING, 3))
    crew.tend()
    crew.tend()
    assert [(one.role, one.number, one.slot, one.slots) for one in server.running] == [
        ("shop", 1, 0, 2),
        ("shop", 2, 1, 2),
        ("billing", 1, 0, 3),
        ("billing", 2, 1, 3),
        ("billing", 3, 2, 3),
    ]
    assert {one.moment for one in server.running} == {""}
    assert len({one.seed for one in server.running}) == 5
    assert crew.started == 5


def test_the_killed_are_counted_by_moment_and_replaced_until_enough_have_died(
    server: Server, make_crew: MakeCrew
) -> None:
    team = Team(BILLING, 2, kills=5, messages=800)
    crew = make_crew(team)
    for _ in range(10):
        crew.tend()
        for orders in server.running:
            if orders.moment and orders.moment != ANYWHERE:
                server.statuses[orders.name] = -signal.SIGKILL
            elif orders.moment:
                orders.journal.write_bytes(b"x" * orders.life * BILLING.journal_bytes)
    assert team.kills_total == crew.kills_total == 5
    assert crew.killed == {orders.process for orders in server.forked if orders.moment}
    assert sum(bool(orders.moment) for orders in server.forked) == 5
    assert set(team.killed) == set(BILLING.moments)
    assert min(team.killed.values()) >= 1
    assert len(server.running) == 2
    assert all(40 <= orders.life <= 120 for orders in server.forked)


def test_who_is_to_be_killed_from_outside_is_killed_when_it_is_old(server: Server, make_crew: MakeCrew) -> None:
    crew = make_crew(Team(Role("shop", (ANYWHERE,), SHOP.journal_bytes), 1, kills=1, messages=100))
    crew.tend()
    (orders,) = server.running
    crew.tend()  # no journal yet
    orders.journal.write_bytes(b"x" * (orders.life * SHOP.journal_bytes - 1))
    crew.tend()
    assert server.signals == []
    orders.journal.write_bytes(b"x" * orders.life * SHOP.journal_bytes)
    crew.tend()
    assert server.signals == [("shop 1", signal.SIGKILL)]
    crew.tend()
    assert [one.name for one in server.running] == ["shop 2"]


def test_a_shop_that_is_done_is_not_replaced_and_a_killed_one_in_its_slot(server: Server, make_crew: MakeCrew) -> None:
    crew = make_crew(Team(SHOP, 2, kills=1, messages=100))
    crew.tend()
    doomed, other = server.running
    server.statuses[other.name] = 0
    server.statuses[doomed.name] = -signal.SIGKILL
    crew.tend()
    assert not crew.is_done(SHOP)
    (replaced,) = server.running
    assert (replaced.name, replaced.slot, replaced.moment) == ("shop 3", doomed.slot, "")
    server.statuses[replaced.name] = 0
    crew.tend()
    assert server.running == []
    assert crew.is_done(SHOP)


@pytest.mark.parametrize(
    ("team", "status"),
    [
        (Team(BILLING, 1), 0),  # only shops have an end
        (Team(BILLING, 1), -signal.SIGKILL),  # nobody foretold it
        (Team(BILLING, 1, kills=1, messages=100), 1),
        (Team(SHOP, 1), 1),
    ],
)
def test_who_ends_by_itself_ends_the_run(team: Team, status: int, server: Server, make_crew: MakeCrew) -> None:
    crew = make_crew(team)
    crew.tend()
    (orders,) = server.running
    orders.log.write_text("Traceback\nValueError: no\n")
    server.statuses[orders.name] = status
    with pytest.raises(TxboxError, match=rf"{orders.name} ended by itself with status {status}: ValueError: no"):
        crew.tend()


@pytest.mark.parametrize(("deaf", "signals"), [(False, [15]), (True, [15, 9])])
def test_a_stop_ends_everybody_if_need_be_by_force(
    deaf: bool, signals: list[int], server: Server, make_crew: MakeCrew
) -> None:
    server.deaf = deaf
    crew = make_crew(Team(BILLING, 1))
    crew.tend()
    crew.stop()
    assert server.signals == [("billing 1", number) for number in signals]
    assert server.running == []
    assert crew.killed == ({"billing-001"} if deaf else set())
