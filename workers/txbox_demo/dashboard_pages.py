"""The dashboard of a run: its pages show the schema of each stage, live."""

import socket
from collections.abc import Callable
from contextlib import ExitStack

from starlette.applications import Starlette
from starlette.routing import Mount

from txbox.postgres.urls import database_engine, database_url
from txbox_dashboard import dashboard
from txbox_demo.page_server import serving
from txbox_demo.sandbox import Sandbox

ALLOWED_HOSTS = ("127.0.0.1", "localhost")
CONNECTIONS = 4
"""Pages that are read at the same time, at most."""


class DashboardPages:
    """Serves a dashboard for each sandbox, from a thread of this process. It reads, and takes no part in the run."""

    def __init__(self, listener: socket.socket, on_url: Callable[[str], None]) -> None:
        """Take a bound socket, and what is told the URL of each sandbox's first page."""
        self._listener, self._on_url, self._app, self._url = listener, on_url, Starlette(), ""

    def show(self, sandbox: Sandbox, cleanup: ExitStack, path: str = "") -> None:
        """Show a sandbox under a path; the first call starts the server, which ``cleanup`` stops."""
        engine = database_engine(database_url(sandbox.url), pool_size=CONNECTIONS, max_overflow=0)
        cleanup.callback(engine.dispose)
        # Before those that are there: the root's would take every path.
        self._app.router.routes.insert(0, Mount(path, dashboard(engine, allowed_hosts=ALLOWED_HOSTS)))
        self._url = self._url or cleanup.enter_context(serving(self._app, self._listener))
        self._on_url(f"{self._url}{path.lstrip('/')}{'/' if path else ''}")

    def close(self) -> None:
        """Listen no more, if nothing was ever shown."""
        self._listener.close()
