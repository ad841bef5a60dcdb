"""The program behind `LocalAws`: moto's server on 127.0.0.1, made fast enough for a demo and for tests.

It binds the port of its argument, or one that the operating system chooses, writes ``port NUMBER`` to standard output,
and serves until a signal ends it. It differs from moto's own server:

* It keeps connections alive. werkzeug closes each one and then waits 10 ms for more from it.
* It finds the service behind a request once per service and region. moto lists its directory and tries two hundred
  patterns for each request.
* Requests to SQS, DynamoDB and Step Functions run one after another, as moto's state is not thread-safe. A long poll
  lets the others run while it waits (see `txbox_local.aws.moto_sqs`). SNS and EventBridge may call other servers:
  they do not hold that lock, and what they send to a queue takes it there.
* A topic does not keep what it has delivered, and an event arrives whole (see `txbox_local.aws.moto_sns_eventbridge`).
"""

import io
import logging
import os
import sys
from collections.abc import Callable, Iterable
from threading import Lock
from types import TracebackType
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from txbox_local.aws.moto_sns_eventbridge import patch_sns_eventbridge
from txbox_local.aws.moto_sqs import LOCK, patch_sqs

SERIALIZED_SERVICES = frozenset({"sqs", "dynamodb", "dynamodb_v20111205", "dynamodbstreams", "stepfunctions"})
"""Services whose requests change shared state and never call another server."""

WRITE_BUFFER_BYTES = 64 * 1024
BODILESS_STATUS_CODES = frozenset({204, 304})

_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


def _application(service: Any) -> Any:
    """Return moto's application for a service, patched before its first use."""
    patch_sns_eventbridge(service)
    return create_backend_app(service)


class MotoDispatcher(DomainDispatcherApplication):
    """Finds the service that a request is for, and runs the request there."""

    def __init__(self) -> None:
        super().__init__(_application)
        self._backends: dict[str | None, Any] = {}
        self._backends_lock = Lock()

    def get_backend_for_host(self, host: str | None) -> Any:
        """Return moto's name for the service behind `host`. It is remembered, as the search takes long."""
        with self._backends_lock:
            if host not in self._backends:
                self._backends[host] = super().get_backend_for_host(host)
            return self._backends[host]

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        application = self.get_application(environ)
        if application.service not in SERIALIZED_SERVICES:  # type: ignore[attr-defined] # moto sets it
            return application(environ, start_response)
        with LOCK:
            return application(environ, start_response)


class KeepAliveHandler(MotoRequestHandler):
    """Serves one connection: any number of requests, each answered in one write and none logged."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = WRITE_BUFFER_BYTES

    def run_wsgi(self) -> None:
        environ = self.make_environ()
        # Read the whole body first: whatever a service leaves unread would be taken for the next request.
        if environ.pop("wsgi.input_terminated", False):
            environ.pop("HTTP_TRANSFER_ENCODING", None)
            body = environ["wsgi.input"].read()
        else:
            body = self.rfile.read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))

        status = "500 Internal Server Error"
        headers: list[tuple[str, str]] = []

        def start_response(
            new_status: str, new_headers: list[tuple[str, str]], _error: _ExceptionInfo | None = None
        ) -> Callable[[bytes], None]:
            nonlocal status, headers
            status, headers = new_status, new_headers
            return lambda _data: None

        try:
            result = self.server.app(environ, start_response)
            try:
                payload = b"".join(result)
            finally:
                close = getattr(result, "close", None)
                if close is not None:
                    close()
        except Exception:  # whatever moto raises, only this request has failed
            logging.getLogger(__name__).exception("%s %s", self.command, self.path)
            status, headers, payload = "500 Internal Server Error", [], b""
        self._answer(status, headers, payload)

    def _answer(self, status: str, headers: list[tuple[str, str]], payload: bytes) -> None:
        code, _, reason = status.partition(" ")
        self.send_response(int(code), reason)
        for name, value in headers:
            self.send_header(name, value)
        bodiless = self.command == "HEAD" or int(code) in BODILESS_STATUS_CODES
        if not bodiless and all(name.lower() != "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if not bodiless:
            self.wfile.write(payload)
        self.wfile.flush()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: a log line costs more than some requests."""


def main() -> None:
    """Serve until a signal ends this process."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    patch_sqs()
    port = int(sys.argv[1]) if sys.argv[1:] else 0
    server = make_server("127.0.0.1", port, MotoDispatcher(), threaded=True, request_handler=KeepAliveHandler)
    os.write(sys.stdout.fileno(), f"port {server.port}\n".encode())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # from here on, nobody reads the pipe
    server.serve_forever()


if __name__ == "__main__":
    main()
