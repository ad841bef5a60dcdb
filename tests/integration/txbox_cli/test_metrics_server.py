"""What answers probes and scrapes."""

import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from txbox_cli.commands.operate.metrics_server import (
    CONNECTIONS,
    REQUEST_SECONDS,
    WAIT_SECONDS,
    answering,
    line,
)
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


def test_clients_that_send_nothing_keep_no_probe_waiting() -> None:
    with answering("127.0.0.1", 0, {"/live": lambda: line(200, "live")}) as port, ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(CONNECTIONS)]
        silent[0].sendall(b"GET /live HTTP/1.1\r\n")  # and then nothing
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=10) as answer:
            assert answer.read() == b"live\n"
        assert time.monotonic() - began < WAIT_SECONDS
        for one in silent:
            one.settimeout(10)
        assert silent[0].recv(1) == b"", "the first that asked has made room"
        assert silent[1].recv(1) == b"", "and the others are not waited for"
        assert WAIT_SECONDS < time.monotonic() - began < 2 * REQUEST_SECONDS


def test_connections_beyond_the_bound_are_closed_while_all_others_are_answered() -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def slow() -> tuple[int, str, bytes]:
        begun.release()
        go_on.wait(30)
        return line(200, "slow")

    with answering("127.0.0.1", 0, {"/slow": slow}) as port, ThreadPoolExecutor(CONNECTIONS) as pool:
        url = f"http://127.0.0.1:{port}/slow"

        def ask() -> bytes:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return answer.read()

        answers = [pool.submit(ask) for _ in range(CONNECTIONS)]
        try:
            assert all(begun.acquire(timeout=20) for _ in range(CONNECTIONS))
            with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
                ask()
        finally:
            go_on.set()
        assert {one.result() for one in answers} == {b"slow\n"}
