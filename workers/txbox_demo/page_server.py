"""The dashboard of a run: live pages that show the schema of each stage, served on this machine alone."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from txbox.postgres.urls import database_engine, database_url
from txbox_dashboard import dashboard
from txbox_demo.sandbox import Sandbox

STOP_SECONDS = 2.0
"""How long responses in progress may take at the end."""


@contextmanager
def serving(app: ASGIApp, listener: socket.socket) -> Iterator[str]:
    """Serve an application on a bound socket, and yield the URL of its first page. Connections made earlier wait."""
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


ALLOWED_HOSTS = ("127.0.0.1", "localhost")
CONNECTIONS = 4
"""The most pages read at the same time."""


class DashboardPages:
    """Serves a dashboard for each sandbox, from a thread of this process. It only reads: it has no part in the run."""

    def __init__(self, listener: socket.socket, on_url: Callable[[str], None]) -> None:
        """Take a bound socket. ``on_url`` is called with the URL of each sandbox's first page."""
        self._listener, self._on_url, self._app, self._url = listener, on_url, Starlette(), ""

    def show(self, sandbox: Sandbox, cleanup: ExitStack, path: str = "") -> None:
        """Show a sandbox under a path. The first call starts the server, and ``cleanup`` stops it."""
        engine = database_engine(database_url(sandbox.url), pool_size=CONNECTIONS, max_overflow=0)
        cleanup.callback(engine.dispose)
        # Before the existing routes: the root's would take every path.
        self._app.router.routes.insert(0, Mount(path, dashboard(engine, allowed_hosts=ALLOWED_HOSTS)))
        self._url = self._url or cleanup.enter_context(serving(self._app, self._listener))
        self._on_url(f"{self._url}{path.lstrip('/')}{'/' if path else ''}")

    def close(self) -> None:
        """Stop listening, in case nothing was ever shown."""
        self._listener.close()
