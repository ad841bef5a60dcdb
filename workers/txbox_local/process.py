"""The parent's side of a keeper: one server process that ends when this program does."""

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from txbox_local import process_keeper
from txbox_local.errors import missing_extra

try:
    import psutil
except ModuleNotFoundError as error:  # it is part of the extra
    raise missing_extra(error) from error

KEEPER_MARGIN_SECONDS = 5.0
"""How long a keeper may take beyond the server's own stop timeout before it is killed."""


class KeptProcess:
    """A server process under a keeper.

    Only the process that called ``start`` can stop the server. A fork of it that exits, or that leaves a ``with``
    block, changes nothing.

    Args:
        command: the program and its arguments.
        log: the file that receives its standard error, and its output unless `share_stdout`.
        stop_signal: the signal for an orderly end.
        user: the system user to run it as; the caller must be root.
        share_stdout: whether it reports on its standard output, for ``read_line``.
        remove: a directory that the keeper removes after it has sent the stop signal.
        environment: by default this program's.
        pass_fds: descriptors that the keeper holds open for as long as it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        stop_signal: signal.Signals,
        user: str | None = None,
        share_stdout: bool = False,
        remove: Path | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        options = [f"--stop-signal={stop_signal.name}"]
        options += [f"--user={user}"] if user is not None else []
        options += ["--share-stdout"] if share_stdout else []
        options += [f"--remove={remove}"] if remove is not None else []
        # Run by its path, isolated and without site-packages: it needs nothing of ours and must start at once.
        self._command = [sys.executable, "-I", "-S", process_keeper.__file__, *options, "--", *command]
        self._log = log
        self._environment = environment
        self._pass_fds = tuple(pass_fds)
        self._stop_signal = stop_signal
        self._wait_seconds = process_keeper.STOP_TIMEOUT_SECONDS + KEEPER_MARGIN_SECONDS
        self._keeper: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._owner = -1
        self._server: psutil.Process | None = None
        self.pid: int | None = None

    def start(self) -> None:
        """Start the keeper and, under it, the server. `pid` is the server's, or None if it did not start."""
        stdin, lifeline = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._keeper = subprocess.Popen(
                    self._command,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    env=None if self._environment is None else dict(self._environment),
                    pass_fds=self._pass_fds,
                    start_new_session=True,
                )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(stdin)
        self._lifeline, self._owner = lifeline, os.getpid()
        _running.add(self)
        pid = self.read_line("pid ")
        if pid is not None:
            self.pid = int(pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._server = psutil.Process(self.pid)

    def read_line(self, prefix: str) -> str | None:
        """Return the rest of the next line that starts with `prefix`, or None if the server ended without one."""
        if self._keeper is None or self._keeper.stdout is None:
            raise RuntimeError("start() comes first")
        line = bytearray()
        while byte := self._keeper.stdout.read(1):  # unbuffered and short: a line or two per server
            line += byte
            if byte == b"\n":
                text = line.decode(errors="replace")
                if text.startswith(prefix):
                    return text[len(prefix) :].strip()
                line.clear()
        return None

    @property
    def keeper_pid(self) -> int | None:
        """The keeper's process id, or None before ``start`` and after ``stop``."""
        return None if self._keeper is None else self._keeper.pid

    def exited(self, within_seconds: float = 0.0) -> bool:
        """Whether the keeper has ended, and with it the server. Waits for that up to `within_seconds` seconds."""
        if self._keeper is None:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(within_seconds)
        return self._keeper.returncode is not None

    def stop(self) -> None:
        """Stop the server and wait until it has ended. Do nothing if it is not running."""
        if self._keeper is None or self._owner != os.getpid():
            return
        _running.discard(self)
        self._close_lifeline()
        try:
            self._keeper.wait(self._wait_seconds)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()
        if self._keeper.returncode < 0:
            self._end_orphan()
        self._keeper = self._server = self.pid = None

    def _end_orphan(self) -> None:
        # A keeper that was killed has not waited for its server; outside Linux, it has not sent it a signal either.
        if self._server is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._server.is_running():  # and its id was not given to another process
                self._server.send_signal(self._stop_signal)
            try:
                self._server.wait(self._wait_seconds)
            except psutil.TimeoutExpired:
                self._server.kill()

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


_running: "weakref.WeakSet[KeptProcess]" = weakref.WeakSet()


def _forget_in_fork() -> None:
    # A fork without exec (multiprocessing's "fork") has a copy of every descriptor. If it kept the lifeline's
    # writing end, the servers would outlive their owner for as long as the fork lives.
    for process in list(_running):
        process._close_lifeline()  # noqa: SLF001 # this module's own class
    _running.clear()


os.register_at_fork(after_in_child=_forget_in_fork)


def process_exists(pid: int) -> bool:
    return psutil.pid_exists(pid)


def works_in(pid: int, program: str, directory: Path) -> bool:
    """Whether process `pid` runs `program` with `directory` as its working directory."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.name().startswith(program) and Path(process.cwd()).samefile(directory)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    except psutil.AccessDenied:
        return True  # another user's: better to ask than to disturb it


def wait_for_end(pid: int, *, within_seconds: float) -> None:
    """Wait up to `within_seconds` seconds until process `pid` has ended. It need not be a child."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(within_seconds)
