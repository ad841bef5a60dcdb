"""Programs of the tests, in processes of their own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def killed_at_the_end() -> Iterator[list["subprocess.Popen[Any]"]]:
    """Give a list for the processes that a test starts, and see that none of them outlives the test."""
    processes: list[subprocess.Popen[Any]] = []
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(20)


def start_python(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> "subprocess.Popen[Any]":
    """Start Python; it finds all modules that this process finds.

    Args:
        arguments: Python's own, such as ``-m support.txbox.lease_process``.
        env: variables; None: those of this process.
        options: for Popen.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    variables = {**(os.environ if env is None else env), "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, *arguments], env=variables, **options)
