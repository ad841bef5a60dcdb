"""Serves pages from a thread of this process, on this machine alone."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

STOP_SECONDS = 2.0
"""How long answers under way may take at the end."""


@contextmanager
def serving(app: ASGIApp, listener: socket.socket) -> Iterator[str]:
    """Serve an application on a bound socket, and give the URL of its first page. What comes earlier waits."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=round(STOP_SECONDS)
    )
    server = uvicorn.Server(config)
    listener.listen()
    thread = threading.Thread(target=server.run, args=([listener],), name="page-server", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(STOP_SECONDS + 5)
        listener.close()
