"""``txbox dashboard``: who may reach it, and how it ends."""

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from support.program import Ended, Running, own_module

Txbox = Callable[..., Ended]
DUAL_STACK = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="one socket for both families needs IPv6")


def test_it_serves_until_it_is_told_to_stop_and_asks_for_the_token(schema_url: str) -> None:
    with Running("dashboard", "--port", "0", "--allow-actions", env={"TXBOX_DATABASE_URL": schema_url}) as running:
        running.says("token: ")
        said = "".join(running.out)
        address, token = re.search(r"(http://127\.0\.0\.1:\d+)/", said), re.search(r"token: (\S+)", said)
        assert address
        assert token
        with httpx2.Client(base_url=address[1], trust_env=False) as client:
            assert client.get("/").headers["location"] == "/sign-in?next=%2F"
            form = {"name": "anna", "token": token[1]}
            assert client.post("/sign-in", data=form).status_code == 303
            assert "Subscribers" in client.get("/").text
            assert client.get("/", headers={"Host": "evil.example"}).status_code == 421
            running.signal(signal.SIGTERM)  # the client's connection is open
            assert running.wait() == 0
    assert "".join(running.err) == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--trusted-proxy", "127.0.0.0/8"), True),
        (("--trusted-proxy", "192.0.2.1"), False),
        # A socket for both families tells an address of IPv4 in the form of IPv6.
        pytest.param(("--host", "::"), True, marks=DUAL_STACK),
        pytest.param(("--host", "::", "--trusted-proxy", "127.0.0.0/8"), True, marks=DUAL_STACK),
    ],
)
def test_a_cookie_is_secure_behind_a_tls_proxy_that_is_named(
    schema_url: str, options: tuple[str, ...], *, named: bool
) -> None:
    environment = {"TXBOX_DATABASE_URL": schema_url, "TXBOX_DASHBOARD_TOKEN": "correct horse battery staple"}
    with Running("dashboard", "--port", "0", *options, env=environment) as running:
        running.says("Ctrl-C stops")
        port = re.search(r"http://(?:127\.0\.0\.1|\[::\]):(\d+)", "".join(running.out))
        assert port
        forwarded = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.9"}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port[1]}", trust_env=False, headers=forwarded) as client:
            assert client.post("/sign-in", data={"name": "a", "token": "wrong"}).status_code == 403
            form = {"name": "anna", "token": environment["TXBOX_DASHBOARD_TOKEN"]}
            cookie = client.post("/sign-in", data=form).headers["set-cookie"].lower()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    assert ("; secure" in cookie) is named
    said = "".join(running.err)
    assert f"it came from {'203.0.113.9' if named else '127.0.0.1'}" in said
    assert ("--trusted-proxy 127.0.0.1" in said) is not named


def test_what_cannot_be_served_is_one_line(txbox: Txbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        txbox("dashboard", "--port", port).failed_in_one_line(1, f"cannot listen on 127.0.0.1, port {port}", "--port")
    txbox("dashboard", "--host", "no.such.host.invalid").failed_in_one_line(1, "cannot listen on no.such.host.invalid")
    own_module(monkeypatch, tmp_path, "hiding", "redact = 7\n")
    txbox("dashboard", "--redact", "hiding:redact").failed_in_one_line(2, "hiding:redact is a int, not a function")
    for proxy in ("proxy.example", "*", "10.0.0.1/8"):
        txbox("dashboard", "--trusted-proxy", proxy).failed_in_one_line(2, "--trusted-proxy", proxy)
    monkeypatch.setenv("TXBOX_DASHBOARD_TOKEN", "short")
    txbox("dashboard", "--port", "0").failed_in_one_line(1, "TXBOX_DASHBOARD_TOKEN", "at least 16 characters")
