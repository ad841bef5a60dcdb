"""Requests that are cut short at any moment, hundreds a second: no wrong row, no hang, no crash, each effect once."""

import os
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from sqlalchemy import Engine

from support.processes import start_python
from support.waiting import wait_until
from support.web.cut_short import STYLES, WHOLE
from support.web.service import client_of
from support.workers.business import Business

SECONDS = float(os.environ.get("TXBOX_CUT_SECONDS", "6"))
"""How long requests are sent in each style; ten minutes take all of them."""

CLIENTS = 12


class Customers:
    """Clients that send each token until it is answered."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.statuses: Counter[int] = Counter()
        self.sold: list[str] = []
        self.wrong: list[str] = []

    def buy(self, number: int, until: float) -> None:
        """Send tokens one after the other; a token that was begun is sent until it is answered."""
        for count in range(1_000_000):
            if time.monotonic() > until:
                return
            token = f"{number}-{count}"
            while (response := self._send(token, is_last=time.monotonic() > until)).status_code != 201:
                pass
            with self._lock:
                self.sold.append(token)
                if response.json() != {"token": token}:
                    self.wrong.append(f"{token} was answered with {response.text}")

    def _send(self, token: str, *, is_last: bool) -> httpx2.Response:
        headers = {"idempotency-key": token, **({WHOLE.decode(): "yes"} if is_last else {})}
        response = self._client.post("/", content=token, headers=headers)
        with self._lock:
            self.statuses[response.status_code] += 1
        return response


@pytest.mark.chaos
@pytest.mark.parametrize("style", STYLES)
def test_requests_that_are_cut_short_leave_nothing_wrong(engine: Engine, schema_url: str, style: str) -> None:
    business = Business(engine)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        arguments = ("-m", "support.web.cut_short", str(listener.fileno()), schema_url, style)
        server = start_python(*arguments, pass_fds=[listener.fileno()])
        port = listener.getsockname()[1]
    try:
        with client_of(port) as client, ThreadPoolExecutor(CLIENTS) as threads:
            wait_until(lambda: client.get("/mistakes", headers={WHOLE.decode(): "yes"}).status_code == 200, "it serves")
            customers = Customers(client)
            until = time.monotonic() + SECONDS
            for ended in [threads.submit(customers.buy, number, until) for number in range(CLIENTS)]:
                ended.result(SECONDS + 60)
            assert client.get("/mistakes", headers={WHOLE.decode(): "yes"}).json() == []
        assert server.poll() is None, "it has crashed"
    finally:
        server.kill()
        server.wait(20)
    cut = customers.statuses[503]
    print(f"{style}: {dict(customers.statuses)}, {cut / SECONDS:.0f} cut short a second")  # noqa: T201 - for -s
    assert customers.wrong == []
    assert customers.statuses[503] > customers.statuses[201] > 0, customers.statuses
    assert set(customers.statuses) <= {201, 409, 503}, customers.statuses
    assert business.applied() == Counter(customers.sold)
