"""A TCP proxy on 127.0.0.1 that loses what it is told to lose, for tests of outages and for ``txbox_testing``.

It does not understand what passes through. It looks for bytes, such as those of a COMMIT.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Self

COMMIT = b"COMMIT\0"
"""A COMMIT as psycopg sends it, in a simple query."""

CHUNK_BYTES = 65536
LONGEST_MARKER_BYTES = 40


class TcpProxy:
    """Passes connections on to a server until told otherwise.

    ::

        with TcpProxy("127.0.0.1", 5432) as proxy:
            connect(port=proxy.port)
            proxy.cut()
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._threads: list[threading.Thread] = []
        self._refusing = False
        self._swallowing = False
        self._lets_in = threading.Event()
        self._lets_in.set()
        self._marker: bytes | None = None
        self._marked_passes = self._quietly = False
        self._closed = False
        self.lost = self.refused = 0

    # --- controls ----------------------------------------------------------------------------------------------------

    def cut(self) -> int:
        """Cut every open connection; return how many there were."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.close()
        return len(pairs)

    def refuse(self) -> None:
        """From now on, close new connections at once."""
        self._refusing = True

    def hold(self) -> None:
        """From now on, make new connections wait."""
        self._lets_in.clear()

    def accept(self) -> None:
        """Pass connections and answers on again."""
        self._refusing = False
        self._swallowing = False
        self._lets_in.set()

    def swallow_replies(self) -> None:
        """From now on, pass requests on and lose the answers."""
        self._swallowing = True

    def hush(self) -> int:
        """From now on, receive what the open connections send, and pass nothing on; return how many there are.

        Neither end notices: packets are acknowledged. New connections are served.
        """
        with self._lock:
            for pair in self._pairs:
                pair.hushed = True
            return len(self._pairs)

    def lose_next(self, marker: bytes = COMMIT, *, reaches_server: bool, quietly: bool = False) -> None:
        """Lose the next request with ``marker``, or only its answer if it ``reaches_server``, and cut that connection.

        With ``quietly``, leave the connection open, but pass no further answer on.
        """
        with self._lock:
            self._marker, self._marked_passes, self._quietly = marker, reaches_server, quietly

    # --- inside ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._start(self._accept_all)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._lets_in.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="tcp-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._lets_in.wait()
            if self._refusing:
                client.close()
                self.refused += 1
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair(client, server)
            with self._lock:
                self._pairs.add(pair)
            self._start(partial(self._pump, pair, self._requests))
            self._start(partial(self._pump, pair, self._answers))

    def _pump(self, pair: "_Pair", pump: "Callable[[_Pair], None]") -> None:
        try:
            pump(pair)
        except OSError:
            pass
        finally:
            pair.close()
            with self._lock:
                self._pairs.discard(pair)

    def _requests(self, pair: "_Pair") -> None:
        before = b""
        while data := pair.client.recv(CHUNK_BYTES):
            if self._is_lost(before, data):
                if self._quietly:
                    pair.muted = True
                elif not self._marked_passes:
                    return
                else:
                    pair.loses_answer = True
            before = data[-LONGEST_MARKER_BYTES:]
            if not pair.hushed:
                pair.server.sendall(data)

    def _answers(self, pair: "_Pair") -> None:
        while data := pair.server.recv(CHUNK_BYTES):
            if pair.loses_answer:
                # The server has answered, so it has done what it was asked to do.
                return
            if not (self._swallowing or pair.hushed or pair.muted):
                pair.client.sendall(data)

    def _is_lost(self, before: bytes, data: bytes) -> bool:
        with self._lock:
            # A marker that ended in the bytes before was of an earlier request.
            if self._marker is None or self._marker not in before[1 - len(self._marker) :] + data:
                return False
            self._marker = None
            self.lost += 1
            return True


class _Pair:
    """The two ends of one connection."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.loses_answer = False
        self.hushed = self.muted = False

    def close(self) -> None:
        for end in (self.client, self.server):
            # close() alone does not wake a thread that waits in recv.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
