"""``txbox dashboard``: who may reach it, and how it ends."""

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from support.program import Ended, Running, forget_module

Txbox = Callable[..., Ended]


def test_it_serves_until_it_is_told_to_stop_and_asks_for_the_token(schema_url: str) -> None:
    with Running("dashboard", "--port", "0", "--allow-actions", env={"TXBOX_DATABASE_URL": schema_url}) as running:
        running.says("token: ")
        said = "".join(running.out)
        address, token = re.search(r"(http://127\.0\.0\.1:\d+)/", said), re.search(r"token: (\S+)", said)
        assert address
        assert token
        with httpx2.Client(base_url=address[1], trust_env=False) as client:
            assert client.get("/").headers["location"] == "/sign-in"
            form = {"name": "anna", "token": token[1]}
            assert client.post("/sign-in", data=form).status_code == 303
            assert "Subscribers" in client.get("/").text
            assert client.get("/", headers={"Host": "evil.example"}).status_code == 421
            running.signal(signal.SIGTERM)  # the client's connection is open
            assert running.wait() == 0
    assert "".join(running.err) == ""


def test_what_cannot_be_served_is_one_line(txbox: Txbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        txbox("dashboard", "--port", port).failed_in_one_line(1, f"cannot listen on 127.0.0.1, port {port}", "--port")
    txbox("dashboard", "--host", "no.such.host.invalid").failed_in_one_line(1, "cannot listen on no.such.host.invalid")
    forget_module(monkeypatch, "hiding")
    (tmp_path / "hiding.py").write_text("redact = 7\n")
    monkeypatch.chdir(tmp_path)
    txbox("dashboard", "--redact", "hiding:redact").failed_in_one_line(2, "hiding:redact is a int, not a function")
    monkeypatch.setenv("TXBOX_DASHBOARD_TOKEN", "short")
    txbox("dashboard", "--port", "0").failed_in_one_line(1, "TXBOX_DASHBOARD_TOKEN", "at least 16 characters")
