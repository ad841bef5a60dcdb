"""Answers GET requests of monitoring in the background, with short texts made on demand."""

import socket
import socketserver
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Lock, Thread
from typing import Any

from txbox_cli.errors import CommandFailed

REQUEST_SECONDS = 2.0
"""How long a client may be silent while it sends its request or reads the answer."""

CONNECTIONS = 16
"""Connections at a time, each with a thread. One more takes the place of the one that has been sending its request for
longest: clients that send nothing keep no probe waiting.
"""

WAIT_SECONDS = 1.0
"""How long a new connection waits for a place; then it is closed."""

Answer = Callable[[], tuple[int, str, bytes]]
"""Returns an answer's status, content type and body."""


def line(status: int, text: str) -> tuple[int, str, bytes]:
    """Return an answer of one line of plain text."""
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


class _Asking:
    """Connections whose request has not been read, the oldest first."""

    def __init__(self) -> None:
        self._connections: dict[socket.socket, None] = {}
        self._lock = Lock()

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections[connection] = None

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)

    def end_oldest(self) -> None:
        """Shut down the oldest connection, so that its thread reads the end of it."""
        with self._lock, suppress(OSError):
            if self._connections:
                next(iter(self._connections)).shutdown(socket.SHUT_RDWR)


@contextmanager
def answering(host: str, port: int, answers: Mapping[str, Answer], *, option: str = "--port") -> Iterator[int]:
    """Answer while entered. Yield the port, a free one if 0 was given. ``option`` names the port in errors.

    Raises:
        CommandFailed: the port is in use, or the host is not this machine's.
    """

    free = BoundedSemaphore(CONNECTIONS)
    asking = _Asking()

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            asking.remove(self.request)
            answer = answers.get(self.path.partition("?")[0])
            status, kind, body = answer() if answer else line(404, f"there are {', '.join(answers)}")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: a probe asks every few seconds."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True
        request_queue_size = 128  # the default is 5: a sixth connection at the same moment waits for a second

        def server_bind(self) -> None:
            # HTTPServer also looks up the host's name, which may take seconds where names cannot be resolved.
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = host, self.server_address[1]

        def process_request(self, request: Any, client_address: Any) -> None:
            if not free.acquire(blocking=False):
                asking.end_oldest()
                if not free.acquire(timeout=WAIT_SECONDS):
                    self.shutdown_request(request)
                    return
            asking.add(request)
            try:
                super().process_request(request, client_address)
            except BaseException:
                asking.remove(request)
                free.release()
                raise

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                asking.remove(request)
                free.release()

        def handle_error(self, *_: object) -> None:
            """Ignore a client that has gone."""

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise CommandFailed(f"cannot listen on {host}:{port}: {error.strerror}; choose another {option}") from error
    thread = Thread(target=server.serve_forever, name="txbox-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
