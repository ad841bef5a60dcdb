"""A server of Redis' protocol, Valkey's, in a process of its own."""

import subprocess
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine

from support.celery_shop.server import running_valkey, valkey_server
from support.workers.business import Business


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory: pytest.TempPathFactory, note_server: Callable[[str], None]) -> Iterator[str]:
    with running_valkey(tmp_path_factory.mktemp("redis")) as socket:
        version = subprocess.run([valkey_server(), "--version"], capture_output=True, text=True, check=True).stdout
        note_server(f"Valkey used: {version.split()[2].removeprefix('v=')}")
        yield socket


@pytest.fixture
def business(engine: Engine) -> Business:
    return Business(engine)
