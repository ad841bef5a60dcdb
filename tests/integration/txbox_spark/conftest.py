"""What the tests of bulk loads share."""

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
    """Write a file and return its path: write(name, text)."""

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
        return str(path)

    return write
