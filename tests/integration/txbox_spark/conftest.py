"""What the tests of bulk loads share."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine

from support.spark.bulk_loads import Books


@pytest.fixture
def books(engine: Engine) -> Books:
    """The business tables."""
    return Books(engine)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a file, compressed if its name says so, and return its path: write(name, text or bytes)."""

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return write
