"""A pooler in transaction mode, as PgBouncer is one: a server connection is a client's for one transaction.

It speaks just enough of Postgres's protocol: a client sends its start-up message and is let in; from then on every
batch of messages up to a Sync or a query goes to whichever server connection has been free for longest, so that two
transactions of one client meet two servers. A server is given back when it says that no transaction is open.

https://www.postgresql.org/docs/current/protocol-message-formats.html
"""

import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import psycopg
from sqlalchemy import make_url

_READY = b"Z"
_IDLE = b"I"
_TERMINATE = b"X"
_FLUSH = b"H"  # asyncpg sends one behind a Parse and a Describe
_DESCRIBED = b"TnE"  # what ends the answer to these
_COPY_IN = b"G"  # the server waits for rows
_COPIED = b"cf"
_SSL_REQUEST = 80877103
_GSS_REQUEST = 80877104
_CANCEL_REQUEST = 80877102

_REPORTED = ("server_version", "server_encoding", "client_encoding", "DateStyle", "IntervalStyle", "TimeZone")
_REPORTED += ("integer_datetimes", "standard_conforming_strings")


class TransactionPooler:
    """Listens on 127.0.0.1 and lends its server connections out, one transaction at a time.

    Attributes:
        port: where it listens.
        transactions: how many it has lent a connection for.
    """

    def __init__(self, server: str, *, size: int, version: str | None = None) -> None:
        # libpq makes the connections, passwords and all; what it has made is used by its socket alone.
        self._servers = [psycopg.connect(server, sslmode="disable", gssencmode="disable") for _ in range(size)]
        self._sockets = [socket.socket(fileno=os.dup(one.fileno())) for one in self._servers]
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for one in self._sockets:
            one.setblocking(True)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._free.put(one)
        self._greeting = _message(b"R", struct.pack("!i", 0))
        for name in _REPORTED:
            value = self._servers[0].info.parameter_status(name) or ""
            if name == "server_version" and version is not None:
                value = version
            self._greeting += _message(b"S", name.encode() + b"\0" + value.encode() + b"\0")
        self._greeting += _message(b"K", struct.pack("!ii", 1, 1)) + _message(_READY, _IDLE)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.transactions = 0
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close every connection."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in [*self._clients, *self._sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for server in self._servers:
            server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with closing(client), suppress(OSError, ConnectionError):
            while True:
                (length,) = struct.unpack("!i", _exactly(client, 4))
                (code,) = struct.unpack("!i", _exactly(client, length - 4)[:4])
                if code in (_SSL_REQUEST, _GSS_REQUEST):
                    client.sendall(b"N")
                elif code == _CANCEL_REQUEST:
                    return
                else:
                    break
            client.sendall(self._greeting)
            while True:
                first = _read(client)
                if first[0] == _TERMINATE:
                    return
                self._transaction(client, first)

    def _transaction(self, client: socket.socket, first: tuple[bytes, bytes]) -> None:
        server = self._free.get()
        self.transactions += 1
        kind, message = first
        asks = b"QS"
        try:
            while True:
                server.sendall(_message(kind, message))
                if kind == _FLUSH:
                    self._answer(server, client, until=_DESCRIBED)
                elif kind in asks:
                    ended, state = self._answer(server, client, until=_READY + _COPY_IN)
                    if state == _IDLE:
                        break
                    # The end of rows is a question where the COPY was a query; otherwise a Sync comes behind it.
                    asks = _COPIED if ended == _COPY_IN and kind == b"Q" else b"QS"
                kind, message = _read(client)
        except (OSError, ConnectionError):  # the client is gone, in its transaction
            server.sendall(_message(b"S", b"") + _message(b"Q", b"ROLLBACK\0"))
            while _read(server) != (b"C", b"ROLLBACK\0"):
                pass
            while _read(server)[0] != _READY:
                pass
            self._free.put(server)
            raise
        self._free.put(server)

    def _answer(self, server: socket.socket, client: socket.socket, until: bytes) -> tuple[bytes, bytes]:
        while True:
            kind, message = _read(server)
            client.sendall(_message(kind, message))
            if kind in until:
                return kind, message


def _message(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("!i", len(content) + 4) + content


def _exactly(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = connection.recv(count - len(got))
        if not more:
            raise ConnectionError("closed")
        got += more
    return got


def _read(connection: socket.socket) -> tuple[bytes, bytes]:
    head = _exactly(connection, 5)
    (length,) = struct.unpack("!i", head[1:])
    return head[:1], _exactly(connection, length - 4)


@contextmanager
def transaction_pooler(
    url: str, *, size: int = 8, version: str | None = None
) -> Iterator[tuple[TransactionPooler, str]]:
    """Put a pooler before a server; yield it, and the URL that leads through it.

    ``version`` is what it tells clients of the server's version; None: the server's own.
    """
    parsed = make_url(url)
    plain = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
    pooler = TransactionPooler(plain, size=size, version=version)
    try:
        through = parsed.set(host="127.0.0.1", port=pooler.port, query={"sslmode": "disable"})
        yield pooler, through.render_as_string(hide_password=False)
    finally:
        pooler.close()
