"""Figures over HTTP."""

import http.client
import socket
import urllib.error
import urllib.request

import pytest

from txbox_cli.commands.operate.metrics_server import CONNECTIONS, answering, line
from txbox_cli.errors import CommandFailed


def test_it_answers_what_it_has_and_names_it_otherwise() -> None:
    with answering("127.0.0.1", 0, {"/live": lambda: line(200, "live")}) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live?x=1", timeout=10) as answer:
            assert answer.read() == b"live\n"
        with pytest.raises(urllib.error.HTTPError, match="404") as raised:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
        raised.value.close()
        with pytest.raises(CommandFailed, match="choose another --port"), answering("127.0.0.1", port, {}):
            pass


def test_connections_beyond_the_bound_are_closed_until_others_end() -> None:
    with answering("127.0.0.1", 0, {"/live": lambda: line(200, "live")}) as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=10)
        for one in silent:
            one.close()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=10) as answer:
            assert answer.read() == b"live\n"
