"""The exemption from garbage collection, in a Python of its own."""

import subprocess
import sys

SCRIPT = """
import gc
from txbox_spark.runtime.python_workers import freeze_modules
gc.unfreeze()
freeze_modules()
frozen = gc.get_freeze_count()
later = [[] for _ in range(1000)]
freeze_modules()
assert frozen > 1000 and gc.get_freeze_count() <= frozen, (frozen, gc.get_freeze_count())
"""


def test_modules_are_frozen_once() -> None:
    """What later tasks make stays collectable."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
