"""What `txbox relay` can be told to run, without a server."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.program import Ended, own_module
from txbox.relay import Relay

Txbox = Callable[..., Ended]

MODULE = """
from sqlalchemy import create_engine
from txbox.relay import Relay

class Publisher:
    def send(self, messages):
        return []

def handle(session, message):
    raise SystemExit(9)

publisher = Publisher()
numbers = {"own": 1}
unnamed = {1: publisher}
nothing = {}
_relay = Relay(create_engine("postgresql+psycopg://"), {"own": publisher})
of_class = {"own": publisher, "kafka": Publisher}

def make():
    return {"own": publisher}

def give_up():
    raise ValueError("no")
"""
REFUSED = "postgresql://u:hunter2@127.0.0.1:1/x"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(monkeypatch, tmp_path, "shop", MODULE)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "give --url or set TXBOX_DATABASE_URL"),
        (["--senders", "0"], "greater than or equal to 1"),
        (["--concurrency", "0"], "greater than or equal to 1"),
        (["--batch-size", "0"], "greater than or equal to 1"),
        (["--max-attempts", "-1"], "greater than or equal to 0"),
        (["--keep-sent", "7"], "--keep-sent must be a span of time, such as 90s, 30m, 12h, 7d or 2w, not '7'"),
        (["--stop-seconds", "soon"], "should be a valid number"),
        (["shop"], "'shop' is not of the form MODULE:NAME, such as shop:publishers"),
        (["shop:none"], "module shop has no none"),
        (["shop:publisher"], 'write `publishers = {"scheme": publisher}` there, and run `txbox relay shop:publishers`'),
        (["shop:numbers"], "each publisher with a method send; that of 'own' is an int without one"),
        (["shop:unnamed"], "each publisher with a method send; 1 is no text"),
        (["shop:nothing"], "each publisher with a method send; it is empty"),
        (["shop:of_class"], "send; that of 'kafka' is the class Publisher, not an object made of it"),
        (["shop.py:make"], "'shop.py:make' is not of the form MODULE:NAME; give shop:make"),
        (["./sub/shop.py:make()"], "is not of the form MODULE:NAME; give sub.shop:make"),
        (["shop:make()"], "is not of the form MODULE:NAME; give shop:make"),
        (["shop:handle"], "shop:handle is the function handle(session, message), neither a relay nor publishers by"),
        (["shop:Publisher"], "shop:Publisher() returned a Publisher, neither a relay nor publishers by scheme; write"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("shop")
def test_asked_wrongly(arguments: list[str], fragment: str, txbox: Txbox) -> None:
    txbox("relay", *arguments).failed_in_one_line(2, fragment)


@pytest.mark.usefixtures("shop")
def test_what_a_function_returns_is_run(txbox: Txbox) -> None:
    ended = txbox("relay", "shop:make", "--url", REFUSED)
    ended.failed_in_one_line(1, "Connection refused", "start the server")
    assert ended.out == "", "what does not work does not say that it does"
    txbox("relay", "shop:give_up", "--url", REFUSED).failed_in_one_line(1, "shop:give_up() failed: ValueError: no")


@pytest.mark.usefixtures("shop")
def test_without_boto3_only_publishers_of_ones_own_are_there(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("txbox_aws")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "boto3", None)
    txbox("relay", "--url", REFUSED).failed_in_one_line(1, "boto3 is missing; install it: pip install '.[aws]'")
    monkeypatch.setattr(Relay, "_start", lambda relay: relay._wake.put(None))
    ended = txbox("relay", "shop:make", "--url", REFUSED)
    assert ended.out.startswith("sending from x on 127.0.0.1 to own; ")


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("target", ["shop:make", "shop:_relay"])
def test_the_end_of_the_terminal_is_a_request_to_stop(
    target: str, txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Relay, "_start", lambda _: signal.raise_signal(signal.SIGHUP))
    ended = txbox("relay", target, "--url", REFUSED) if target == "shop:make" else txbox("relay", target)
    assert (ended.status, ended.out.splitlines()[-1]) == (0, "stopped: 0 sent, 0 refused")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
