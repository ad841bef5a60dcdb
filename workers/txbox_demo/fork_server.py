"""The fork server: a process that has loaded everything once, and of which processes are forked in milliseconds.

The demo starts dozens of processes, and killing them is its point. Each is a process of its own all the same, with its
own connections; it is only spared a second of imports.
"""

import contextlib
import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection

from txbox import TxboxError
from txbox_demo.orders import Orders

__all__ = ["ForkServer"]

COMMAND = (sys.executable, "-m", "txbox_demo.fork_server_process")

STOP_SECONDS = 10.0
"""How long the server may take to end after its forks were killed."""


class ForkServer:
    """This program's side of it. When this program ends, however it does, so do the server and all of its forks."""

    def __init__(self) -> None:
        """Start the server; it loads while this program goes on."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C is this program's business
        )
        assert self._process.stdin is not None  # noqa: S101 - for the type checker: both are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._requests, self._reports = self._process.stdin, self._process.stdout
        self._torn = b""
        self._ended: dict[str, int] = {}

    def fork(self, orders: Orders) -> None:
        """Start a process.

        Args:
            orders: what it is to do. Its log is also its name here, so no two have the same.
        """
        self._ask({"fork": orders.as_json()})

    def signal(self, orders: Orders, number: signal.Signals) -> None:
        """Send a signal to a process; nothing happens if it has ended."""
        self._ask({"signal": int(number), "to": str(orders.log)})

    def status(self, orders: Orders) -> int | None:
        """Return how a process has ended, negative for a signal; None if it runs.

        Raises:
            TxboxError: the server has ended.
        """
        self._read(0.0)
        return self._ended.get(str(orders.log))

    def wait(self, processes: Collection[Orders], timeout: float) -> list[Orders]:
        """Wait for the end of processes.

        Args:
            processes: which.
            timeout: seconds for all of them.

        Returns:
            Those that have not ended in time.

        Raises:
            TxboxError: the server has ended.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._read(0.0)
            running = [orders for orders in processes if str(orders.log) not in self._ended]
            left = deadline - time.monotonic()
            if not running or left <= 0:
                return running
            self._read(left)

    def stop(self) -> None:
        """End the server, and with it whatever it has forked, at once."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._reports.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, request: dict[str, object]) -> None:
        try:
            self._requests.write(f"{json.dumps(request)}\n".encode())
        except BrokenPipeError as error:
            raise self._gone() from error

    def _read(self, timeout: float) -> None:
        """Take in what the server has reported; wait so long for the first of it."""
        while select.select([self._reports], [], [], timeout)[0]:
            if not (data := self._reports.read(1 << 16)):
                raise self._gone()
            *lines, self._torn = (self._torn + data).split(b"\n")
            for line in lines:
                name, status = json.loads(line)
                self._ended[name] = status
            timeout = 0.0

    def _gone(self) -> TxboxError:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        return TxboxError(f"the demo's fork server has ended: {said[-1] if said else 'it said nothing'}")
