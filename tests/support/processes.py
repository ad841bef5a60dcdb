"""Programs of the tests, in processes of their own."""

import os
import subprocess
import sys
from typing import Any


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
