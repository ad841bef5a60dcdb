"""A Redis, Debian's, and workers of Celery: processes of their own, since a pool of them is killed."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from support.processes import start_python
from support.waiting import wait_until
from support.workers.business import Business

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory: pytest.TempPathFactory, note_server: Callable[[str], None]) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server: `make test-containers` installs Debian's")
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "redis.sock"
    settings = ["--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([program, *settings], stdout=subprocess.DEVNULL)
    try:
        wait_until(socket.exists, "Redis answers", timeout=20)
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        note_server(f"Redis used: {version.split()[2].removeprefix('v=')}")
        yield str(socket)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def shop(redis_socket: str, schema_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The application, with empty queues, on the test's own schema."""
    variables = {
        "SHOP_REDIS_URL": f"redis+socket://{redis_socket}",
        "SHOP_RESULTS_URL": f"redis+socket://{redis_socket}",
        "SHOP_DATABASE_URL": schema_url,
        "SHOP_NOTES": str(tmp_path),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    module = import_module("support.celery_shop.app")
    with module.app.connection_for_write() as connection:
        connection.default_channel.client.flushall()
    yield module
    module.ENGINE.dispose()


@pytest.fixture
def business(engine: Engine) -> Business:
    return Business(engine)


@pytest.fixture
def start(shop: Any, business: Business, tmp_path: Path) -> Iterator[Start]:
    """Start a worker with a pool of two processes, in a group of its own, which may be killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> "subprocess.Popen[bytes]":
        options = ["--pool=prefork", "--concurrency=2", "--without-gossip", "--without-mingle", "--loglevel=INFO"]
        with (tmp_path / "worker.log").open("ab") as log:
            worker = start_python(
                *("-m", "celery", "-A", "support.celery_shop.app", "worker", *options),
                stdout=log,
                stderr=log,
                env=dict(os.environ),
                start_new_session=True,
            )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        if worker.poll() is None:
            os.killpg(worker.pid, 9)
            worker.wait()
