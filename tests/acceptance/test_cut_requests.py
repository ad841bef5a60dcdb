"""Requests that are cut short at any moment, hundreds a second: no wrong row, no hang, no crash, each effect once."""

import asyncio
import json
import os
import re
import socket
import time
from collections import Counter

import pytest
from sqlalchemy import Engine

from support.processes import start_python
from support.web.cut_short import STYLES, WHOLE
from support.workers.business import Business

SECONDS = float(os.environ.get("TXBOX_CUT_SECONDS", "6"))
"""How long requests are sent in each style; ten minutes take all of them."""

CLIENTS = 24
SERVERS = 2
"""Processes of the service, each with clients of its own: one that shares its port may take them all."""


class Customers:
    """Clients that send each token until it is answered, each over a connection that it keeps."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self.statuses: Counter[int] = Counter()
        self.sold: list[str] = []
        self.wrong: list[str] = []

    async def buy_at_once(self, seconds: float) -> None:
        """Send tokens for a while, all at once."""
        async with asyncio.timeout(seconds + 90), asyncio.TaskGroup() as group:
            for port in self._ports:
                first = RawConnection(port)
                await first.post("", "")  # answered when it serves
                first.close()
            until = time.monotonic() + seconds
            for number in range(CLIENTS):
                group.create_task(self._buy(number, until))

    async def _buy(self, number: int, until: float) -> None:
        """Send tokens one after the other; a token that was begun is sent until it is answered."""
        connection = RawConnection(self._ports[number % len(self._ports)])
        for count in range(1_000_000):
            if time.monotonic() > until:
                break
            token, status, body = f"{number}-{count}", 0, b""
            while status != 201:
                whole = f"{WHOLE.decode()}: yes\r\n" if time.monotonic() > until else ""
                status, body = await connection.post(f"idempotency-key: {token}\r\n{whole}", token)
                self.statuses[status] += 1
            self.sold.append(token)
            if json.loads(body) != {"token": token}:
                self.wrong.append(f"{token} was answered with {body!r}")
        connection.close()


class RawConnection:
    """A connection that is opened when it is needed. A client of a library takes longer than the service it asks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, headers: str, body: str) -> tuple[int, bytes]:
        """Send a request; return status and body of its answer, of which a part alone is an error."""
        while True:
            reader, writer = self._streams = self._streams or await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(
                    f"POST / HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(body)}\r\n\r\n{body}".encode()
                )
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if getattr(error, "partial", b""):
                    raise
                self.close()  # uvicorn closes a connection after an error, in its own time
                continue
            length = re.search(rb"content-length: (\d+)", head)
            answer = await reader.readexactly(int(length[1]) if length else 0)
            if b"connection: close" in head:
                self.close()
            return int(head.split()[1]), answer

    def close(self) -> None:
        """Close it; the next request opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@pytest.mark.chaos
@pytest.mark.parametrize("style", STYLES)
def test_requests_that_are_cut_short_leave_nothing_wrong(engine: Engine, schema_url: str, style: str) -> None:
    business = Business(engine)
    servers, ports = [], []
    for _ in range(SERVERS):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            arguments = ("-m", "support.web.cut_short", str(listener.fileno()), schema_url, style)
            servers.append(start_python(*arguments, pass_fds=[listener.fileno()]))
            ports.append(listener.getsockname()[1])
    try:
        customers = Customers(ports)
        asyncio.run(customers.buy_at_once(SECONDS))
        assert [server.poll() for server in servers] == [None] * SERVERS, "one has crashed, or saw a wrong row"
    finally:
        for server in servers:
            server.kill()
            server.wait(20)
    cut = customers.statuses[503]
    print(f"{style}: {dict(customers.statuses)}, {cut / SECONDS:.0f} cut short a second")  # noqa: T201 - for -s
    assert customers.wrong == []
    assert customers.statuses[503] > customers.statuses[201] > 0, customers.statuses
    assert set(customers.statuses) <= {201, 409, 503}, customers.statuses
    assert business.applied() == Counter(customers.sold)
