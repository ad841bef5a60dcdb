"""Temporary files of the tests in memory, where the machine has enough of it. A plugin of pytest.

The kernel had a fifth of the processor time of a run, most of it for files of databases that no test keeps.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

MEMORY_DISK = Path("/dev/shm")
ENOUGH_BYTES = 8 * 1024**3


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Have this process, and the programs that it starts, put temporary files there, unless TMPDIR names a place."""
    if "TMPDIR" not in os.environ and MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free >= ENOUGH_BYTES:
        os.environ["TMPDIR"] = str(MEMORY_DISK)
        tempfile.tempdir = None
