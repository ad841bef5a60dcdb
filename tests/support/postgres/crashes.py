"""A server of a test's own that crashes."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txbox_local import LocalPostgres


@contextmanager
def crashing_server() -> Iterator[LocalPostgres]:
    """Run a server that may crash. What is committed asynchronously reaches the disk late, if at all."""
    directory = Path(tempfile.mkdtemp(prefix="txbox-crash-"))
    directory.chmod(0o755)
    settings = {"synchronous_commit": "on", "wal_writer_delay": "10s", "wal_writer_flush_after": "100MB"}
    server = LocalPostgres(directory / "postgres", durable=False, settings=settings).start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def stop_immediately(server: LocalPostgres, _backend: int) -> None:
    """As ``pg_ctl stop -m immediate`` does, and start it again."""
    port = server.port
    os.kill(server.pid, signal.SIGQUIT)
    server.stop()  # what is left: it waits for the end
    server._fixed_port = port
    server.start()


def kill_a_backend(_server: LocalPostgres, backend: int) -> None:
    """The server ends all others and recovers, under the same postmaster."""
    os.kill(backend, signal.SIGKILL)
