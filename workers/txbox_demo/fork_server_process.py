"""The fork server's own side, started by ``txbox_demo.fork_server``.

Requests come as lines of JSON on stdin, and the end of each fork is reported as one on stdout. When stdin ends,
whoever asked is gone, and so everything ends here. Forks hold a lifeline, the reading end of a pipe of which only this
process has the other one: if it is killed, they go too.

It has one thread, because a fork keeps only the thread that forks, and all the locks that others have held.
"""

import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress

from txbox_demo import billing, notification
from txbox_demo.orders import Orders
from txbox_demo.relay_process import run_relay
from txbox_demo.shop_process import run_shop
from txbox_demo.worker_process import run_worker

__all__ = ["main"]

RUN: Mapping[str, Callable[[Orders], None]] = {
    "shop": run_shop,
    "relay": run_relay,
    billing.SUBSCRIBER: run_worker,
    notification.SUBSCRIBER: run_worker,
}


def main() -> None:
    """Fork on request until stdin ends."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the wake-up descriptor is written to
    lifeline, kept = os.pipe()
    forks: dict[int, str] = {}
    torn = b""
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 16)
            _report_ended(forks)
        if sys.stdin.fileno() in ready:
            data = os.read(sys.stdin.fileno(), 1 << 16)
            if not data:
                break
            *lines, torn = (torn + data).split(b"\n")
            for line in lines:
                _serve(json.loads(line), forks, lifeline, (woken, waker, kept))
    for pid in forks:
        os.kill(pid, signal.SIGKILL)


def _serve(request: Mapping[str, str], forks: dict[int, str], lifeline: int, own: tuple[int, ...]) -> None:
    if "fork" in request:
        orders = Orders(**json.loads(request["fork"]))
        pid = os.fork()
        if not pid:
            _live(orders, lifeline, own)
        forks[pid] = str(orders.log)
    else:
        # One that has ended is still there until it is waited for, so its number is nobody else's.
        for pid in [pid for pid, name in forks.items() if name == request["to"]]:
            os.kill(pid, int(request["signal"]))


def _report_ended(forks: dict[int, str]) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            line = json.dumps([forks.pop(pid), os.waitstatus_to_exitcode(status)])
            os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _live(orders: Orders, lifeline: int, servers: tuple[int, ...]) -> None:
    """Be a fork: do what the orders say, and exit."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in servers:
            os.close(descriptor)
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(orders.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(ours, theirs)
        os.environ.update(orders.environment)
        threading.Thread(target=_die_with_server, args=(lifeline,), daemon=True).start()
        RUN[orders.role](orders)
        status = 0
    except BaseException:  # noqa: BLE001 - it is a process of its own: nothing may come out of here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _die_with_server(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
