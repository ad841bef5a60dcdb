"""A small process that ends a server with the program that started it, however that program ends.

::

    parent ──pipe──▶ keeper ──▶ server
                     │ standard input ends (the parent stopped it, exited or was killed)  ─┐
                     │ SIGTERM, SIGINT or SIGHUP                                          ─┼▶ stop signal,
                     │ the server exits by itself: so does the keeper                      │  then SIGKILL
                     └─ the keeper itself is killed: on Linux the kernel sends the server its stop signal

The keeper runs in a session of its own, so that Ctrl-C in a terminal reaches only the parent, which decides. It
writes ``pid NUMBER`` to standard output once the server's process exists. It imports only the standard library
and is run as a file, so that it starts in a few hundredths of a second.

Usage: process_keeper.py [--stop-signal SIGINT] [--stop-timeout SECONDS] [--user NAME] [--share-stdout]
                 [--remove DIRECTORY] -- PROGRAM ARGUMENT...
"""

import argparse
import contextlib
import ctypes
import os
import pwd
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STOP_TIMEOUT_SECONDS = 10.0
STOP_REQUESTS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True)
class KeeperOptions:
    """What to run and how to end it."""

    command: Sequence[str]
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS
    user: str | None = None
    share_stdout: bool = False
    remove: str | None = None


def parse(arguments: Sequence[str]) -> KeeperOptions:
    parser = argparse.ArgumentParser(prog="process_keeper", description="Run a program until standard input ends.")
    parser.add_argument("--stop-signal", default="SIGTERM", choices=[one.name for one in signal.Signals])
    parser.add_argument("--stop-timeout", type=float, default=STOP_TIMEOUT_SECONDS, help="seconds until SIGKILL")
    parser.add_argument("--user", help="the system user to run the program as")
    parser.add_argument("--share-stdout", action="store_true", help="let the program write to standard output")
    parser.add_argument("--remove", help="a directory to remove once the program was sent its stop signal")
    parser.add_argument("command", nargs="+", help="the program and its arguments, after --")
    parsed = parser.parse_args(arguments)
    return KeeperOptions(
        command=parsed.command,
        stop_signal=signal.Signals[parsed.stop_signal],
        stop_timeout_seconds=parsed.stop_timeout,
        user=parsed.user,
        share_stdout=parsed.share_stdout,
        remove=parsed.remove,
    )


def _die_with_keeper(stop_signal: signal.Signals) -> Callable[[], None] | None:
    """Return what the child runs before the program: a request for `stop_signal` when the keeper dies (Linux only)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    keeper = os.getpid()

    def request() -> None:
        # This runs after the change of user, which would have cleared the request.
        prctl(PR_SET_PDEATHSIG, int(stop_signal), 0, 0, 0)
        if os.getppid() != keeper:  # the keeper died before the request was made
            os._exit(1)

    return request


def _start(options: KeeperOptions) -> subprocess.Popen[bytes]:
    account = pwd.getpwnam(options.user) if options.user is not None else None
    return subprocess.Popen(
        options.command,
        stdin=subprocess.DEVNULL,
        stdout=None if options.share_stdout else sys.stderr.fileno(),
        cwd="/",
        user=account.pw_uid if account else None,
        group=account.pw_gid if account else None,
        extra_groups=[] if account else None,
        preexec_fn=_die_with_keeper(options.stop_signal),  # safe: this process has one thread
    )


def keep(options: KeeperOptions) -> int:
    """Run the program until it exits or must stop. Return its exit status, negative for a signal."""
    wakeup_read, wakeup_write = socket.socketpair()
    with wakeup_read, wakeup_write, selectors.DefaultSelector() as selector:
        for end in (wakeup_read, wakeup_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
        for one in (signal.SIGCHLD, *STOP_REQUESTS):
            signal.signal(one, lambda *_: None)  # noticed through the socket pair
        server = _start(options)
        with contextlib.suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), f"pid {server.pid}\n".encode())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # now only the server holds this end of the pipe
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(wakeup_read, selectors.EVENT_READ)

        deadline: float | None = None
        while server.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                server.kill()
                server.wait()
                break
            stop = False
            for key, _ in selector.select(left):
                if key.fileobj is wakeup_read:
                    stop = stop or bool(STOP_REQUESTS.intersection(wakeup_read.recv(4096)))
                elif not os.read(key.fd, 4096):
                    selector.unregister(key.fileobj)
                    stop = True
            if stop and deadline is None:
                server.send_signal(options.stop_signal)
                deadline = time.monotonic() + options.stop_timeout_seconds
    if options.remove is not None and deadline is not None:
        shutil.rmtree(options.remove, ignore_errors=True)
    return server.returncode


def main() -> int:
    status = keep(parse(sys.argv[1:]))
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
