"""A server of a test's own that crashes, or that a standby takes the place of."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url

from txbox_local import LocalPostgres
from txbox_local.postgres.installation import find_installation


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


def standby_of(server: LocalPostgres) -> Callable[[], LocalPostgres]:
    """Make a standby that knows what its primary knows now; called, it is promoted and returned, to be started."""
    installation = find_installation()
    home = server.directory.parent / "second"
    shutil.copytree(server.directory, home, ignore=shutil.ignore_patterns("data", "lock", "*.log"))
    home.chmod(0o711)
    if installation.user is not None:
        os.chown(home, installation.user.uid, installation.user.gid)
    plain = make_url(server.url).set(drivername="postgresql").render_as_string(hide_password=False)

    def run(program: str, *arguments: str) -> None:
        ended = installation.run(program, *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    data = str(home / "data")
    run(
        "pg_basebackup", f"--dbname={plain}", f"--pgdata={data}", "--checkpoint=fast", "--no-sync", "--wal-method=fetch"
    )
    Path(data, "standby.signal").touch()

    def promoted() -> LocalPostgres:
        options = f"-c listen_addresses= -c unix_socket_directories={data} -c fsync=off"
        run("pg_ctl", "start", "-w", "-s", "-D", data, "-l", f"{data}/log", "-o", options)
        run("pg_ctl", "promote", "-w", "-s", "-D", data)
        run("pg_ctl", "stop", "-w", "-s", "-D", data, "-m", "fast")
        return LocalPostgres(home, durable=False)

    return promoted
