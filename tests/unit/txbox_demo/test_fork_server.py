"""The fork server: processes that start, are told apart, and never outlive who asked for them."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from support.waiting import wait_until
from txbox import TxboxError
from txbox_demo import fork_server
from txbox_demo.fork_server import ForkServer
from txbox_demo.orders import Orders

MakeOrders = Callable[..., Orders]

STAND_INS = """
import os, sys, time
from txbox_demo import fork_server_process as server

def sleep(orders):
    print("asleep", orders.number, os.environ["WHERE"], flush=True)
    time.sleep(600)

def fail(orders):
    raise ValueError(f"cannot do {orders.life}")

server.RUN = {"sleep": sleep, "fail": fail, "end": lambda orders: None}
server.main()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "COMMAND", (sys.executable, "-c", STAND_INS))
        server = ForkServer()
    yield server
    server.stop()


def is_asleep(orders: Orders) -> None:
    wait_until(lambda: orders.log.exists() and "asleep" in orders.log.read_text(), f"{orders.name} runs")


def children(server: ForkServer) -> list[psutil.Process]:
    return psutil.Process(server._process.pid).children()


def test_each_fork_ends_in_its_own_way(server: ForkServer, make_orders: MakeOrders) -> None:
    sleeping = make_orders(role="sleep", environment={"WHERE": "here"})
    ending, failing = make_orders(role="end"), make_orders(role="fail", life=7)
    for orders in (sleeping, ending, failing):
        server.fork(orders)
    assert server.wait([ending, failing], 20) == []
    assert (server.status(ending), server.status(failing), server.status(sleeping)) == (0, 1, None)
    assert failing.log.read_text().splitlines()[-1] == "ValueError: cannot do 7"
    is_asleep(sleeping)
    assert sleeping.log.read_text() == "asleep 1 here\n"
    server.signal(sleeping, signal.SIGKILL)
    assert server.wait([sleeping], 20) == []
    assert server.status(sleeping) == -signal.SIGKILL
    server.signal(sleeping, signal.SIGTERM)  # nothing happens: it has ended
    assert children(server) == []


def test_who_has_not_ended_in_time_is_named(server: ForkServer, make_orders: MakeOrders) -> None:
    first, second = (make_orders(role="sleep", number=number, environment={"WHERE": ""}) for number in (1, 2))
    for orders in (first, second):
        server.fork(orders)
    server.signal(second, signal.SIGTERM)
    assert server.wait([second], 20) == []
    assert server.wait([first, second], 0.0) == [first]
    server.signal(first, signal.SIGKILL)
    assert server.wait([first], 20) == []


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_forks_do_not_outlive_their_server(
    killed: bool, make_orders: MakeOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "COMMAND", (sys.executable, "-c", STAND_INS))
    server, orders = ForkServer(), make_orders(role="sleep", environment={"WHERE": ""})
    server.fork(orders)
    is_asleep(orders)
    forks = children(server)
    assert len(forks) == 1
    if killed:
        os.kill(server._process.pid, signal.SIGKILL)
        with pytest.raises(TxboxError, match="the demo's fork server has ended"):
            server.wait([orders], 20)
    server.stop()
    assert psutil.wait_procs(forks, timeout=20)[1] == []


def test_a_server_that_cannot_start_says_why(make_orders: MakeOrders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "COMMAND", (sys.executable, "-c", "raise OSError('no room')"))
    server = ForkServer()
    with pytest.raises(TxboxError, match="has ended: OSError: no room"):
        server.wait([make_orders()], 20)
    server.stop()
