"""Where a local PostgreSQL server keeps its files, and the lock that lets only one server at a time use them.

::

    DIRECTORY/data        PostgreSQL's data directory; it exists once it is complete
    DIRECTORY/password    of the superuser `txbox`; readable by its owner only
    DIRECTORY/server.log  the server's log
    DIRECTORY/lock        locked for as long as a server runs here; holds the process id of its owner

The keeper holds the lock. So when an owner is killed, the lock stays until the server has ended.
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
"""How often the directory's files are read again."""

PREDECESSOR_TIMEOUT_SECONDS = 20.0
"""How long the server of a killed owner may take to end."""

READY_LINE = 7
"""The line of postmaster.pid that holds the server's state (LOCK_FILE_LINE_PM_STATUS, counted from 0)."""


class ServerDirectory:
    """The directory of one server: where it is, or where ``prepare`` creates it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"
        self.password = path / "password"
        self.log = path / "server.log"
        self._lock = path / "lock"
        self._pid_file = self.data / "postmaster.pid"

    def prepare(self, user: ServiceUser | None) -> None:
        """Create the directory unless it exists, and open it to the server's user, or raise ``LocalServerError``."""
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
        """Lock the directory for a new server, and remove what a killed one left behind.

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
        """Take the lock, and return its last owner. While that owner's server ends after a kill, wait."""
        deadline = time.monotonic() + PREDECESSOR_TIMEOUT_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = self._lock_owner()
                if owner is None or process_exists(owner) or time.monotonic() > deadline:
                    raise self._in_use(self._postmaster_pid() or owner) from None
                time.sleep(POLL_INTERVAL_SECONDS)  # flock can wait, but not with a deadline
            else:
                owner = self._lock_owner()
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return owner

    def _remove_stale_pid_file(self, predecessor: int | None) -> None:
        """Remove the postmaster.pid of a server that was killed.

        PostgreSQL does so itself, unless another process of the same user has been given that process id meanwhile.
        """
        pid = self._postmaster_pid()
        if pid is None:
            return
        # If keeper and owner have ended, a stop signal was sent, but nobody waited for the server's end.
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
    """Create a directory that the server's user can reach, or raise ``LocalServerError``."""
    for parent in dict.fromkeys((tempfile.gettempdir(), "/var/tmp", "/tmp")):  # noqa: S108 # mkdtemp makes it private
        if not can_enter(user, Path(parent)):
            continue
        directory = Path(tempfile.mkdtemp(prefix="txbox-postgres-", dir=parent))
        _let_through(directory, user)
        return directory
    raise LocalServerError("no temporary directory is reachable: set TMPDIR to one, or name a directory")


def _let_through(directory: Path, user: ServiceUser | None) -> None:
    # The directory stays root's, so that nobody can redirect what root writes there. The server's user passes
    # through to `data`, which is its own.
    if user is not None:
        directory.chmod(0o711)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
