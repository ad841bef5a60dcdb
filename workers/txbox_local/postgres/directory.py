"""Where a PostgreSQL server of our own keeps its files, and the lock that lets one server at a time have them.

::

    DIRECTORY/data        PostgreSQL's data directory; it exists once it is complete
    DIRECTORY/password    of the superuser `txbox`; readable by its owner only
    DIRECTORY/server.log  the server's log
    DIRECTORY/lock        locked for as long as a server runs here; holds the process id of its owner

The keeper holds the lock, so it outlives an owner that was killed until the server has ended.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from txbox_local.errors import LocalServerError
from txbox_local.postgres.installation import ServiceUser, can_enter
from txbox_local.process import process_exists, wait_for_end, works_in

POLL_INTERVAL_SECONDS = 0.02
"""How often the directory's files are read again, in seconds."""

PREDECESSOR_TIMEOUT_SECONDS = 20.0
"""How long the server of an owner that was killed may take to end, in seconds."""

READY_LINE = 7
"""The line of postmaster.pid that says how far the server is (LOCK_FILE_LINE_PM_STATUS, counted from 0)."""


class ServerDirectory:
    """The directory of one server: where it is, or where ``prepare`` makes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"
        self.password = path / "password"
        self.log = path / "server.log"
        self._lock = path / "lock"
        self._pid_file = self.data / "postmaster.pid"

    def prepare(self, user: ServiceUser | None) -> None:
        """Make the directory, unless it is there, and open it to the server's user, or raise ``LocalServerError``."""
        try:
            if not self.path.exists():
                self.path.mkdir(mode=0o700, parents=True)
                _let_through(self.path, user)
        except OSError as error:
            raise LocalServerError(f"cannot create {self.path} ({error.strerror}): name another directory") from error
        if not can_enter(user, self.path):
            raise LocalServerError(
                f"cannot enter {self.path}: name another directory"
                if user is None
                else f"PostgreSQL refuses to run as root, and user {user.name!r}, who runs it instead, cannot enter"
                f" {self.path}: name a directory that every user can reach, such as /var/lib/txbox,"
                " or run as an ordinary user"
            )

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Lock the directory for a server to come, and clear away what is left of one that was killed.

        The lock lasts until every copy of the yielded descriptor is closed: this one, at the end of the block, and
        the keeper's.

        Raises:
            LocalServerError: a server runs here, or the directory cannot be written to.
        """
        try:
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LocalServerError(f"cannot write to {self.path} ({error.strerror}): name another directory") from error
        try:
            self._remove_stale_pid_file(self._take(lock))
            yield lock
        finally:
            os.close(lock)

    def is_ready(self, pid: int | None) -> bool:
        """Whether the server with this process id accepts connections."""
        lines = self._pid_lines()
        return len(lines) > READY_LINE and _number(lines[0]) == pid and lines[READY_LINE].strip() == "ready"

    def _take(self, lock: int) -> int | None:
        """Take the lock, waiting while a server whose owner was killed ends; return that owner."""
        deadline = time.monotonic() + PREDECESSOR_TIMEOUT_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = self._lock_owner()
                if owner is None or process_exists(owner) or time.monotonic() > deadline:
                    raise self._in_use(self._postmaster_pid() or owner) from None
                time.sleep(POLL_INTERVAL_SECONDS)  # a lock can be waited for, but not with a deadline
            else:
                owner = self._lock_owner()
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return owner

    def _remove_stale_pid_file(self, predecessor: int | None) -> None:
        """Remove the postmaster.pid of a server that was killed.

        PostgreSQL does so itself, unless its process id was given to another process of the same user meanwhile.
        """
        pid = self._postmaster_pid()
        if pid is None:
            return
        # Without a keeper and an owner, a signal to stop was sent, but its end was not waited for.
        orphan = predecessor is not None and (predecessor == os.getpid() or not process_exists(predecessor))
        deadline = time.monotonic() + (PREDECESSOR_TIMEOUT_SECONDS if orphan else 0)
        while works_in(pid, "postgres", self.data):
            if time.monotonic() > deadline:
                raise self._in_use(pid)
            wait_for_end(
                pid, within_seconds=POLL_INTERVAL_SECONDS
            )  # briefly: it may stay a zombie, which no longer works here
        self._pid_file.unlink(missing_ok=True)

    def _lock_owner(self) -> int | None:
        return _number(self._lock.read_text(encoding="ascii"))

    def _postmaster_pid(self) -> int | None:
        lines = self._pid_lines()
        return _number(lines[0]) if lines else None

    def _pid_lines(self) -> list[str]:
        with suppress(FileNotFoundError):
            return self._pid_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return []

    def _in_use(self, pid: int | None) -> LocalServerError:
        return LocalServerError(
            f"{self.path} is in use by the server with process id {pid}: stop that one, or name another directory",
            pid=pid,
        )


def temporary_directory(user: ServiceUser | None) -> Path:
    """Make a new directory that the server's user can reach, or raise ``LocalServerError``."""
    for parent in dict.fromkeys((tempfile.gettempdir(), "/var/tmp", "/tmp")):  # noqa: S108 # mkdtemp makes it private
        if not can_enter(user, Path(parent)):
            continue
        directory = Path(tempfile.mkdtemp(prefix="txbox-postgres-", dir=parent))
        _let_through(directory, user)
        return directory
    raise LocalServerError("no temporary directory is reachable: set TMPDIR to one, or name a directory")


def _let_through(directory: Path, user: ServiceUser | None) -> None:
    # The directory stays root's, so that nothing root writes there can be redirected; the server's user passes
    # through to `data`, which is its own.
    if user is not None:
        directory.chmod(0o711)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
