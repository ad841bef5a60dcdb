"""A server of Redis' protocol, Valkey's, in a process of its own."""

import subprocess
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine

from support.celery_shop.server import valkey_server
from support.waiting import wait_until
from support.workers.business import Business


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory: pytest.TempPathFactory, note_server: Callable[[str], None]) -> Iterator[str]:
    program = valkey_server()
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "redis.sock"
    settings = ["--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([program, *settings], stdout=subprocess.DEVNULL)
    try:
        wait_until(socket.exists, "Valkey answers", timeout=20)
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        note_server(f"Valkey used: {version.split()[2].removeprefix('v=')}")
        yield str(socket)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def business(engine: Engine) -> Business:
    return Business(engine)
