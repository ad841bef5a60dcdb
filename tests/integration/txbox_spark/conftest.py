"""What the tests of bulk loads share."""

import gzip
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine

from support.spark.bulk_loads import Books
from support.spark.event_files import Read, Write
from txbox_spark import read_events


@pytest.fixture
def books(engine: Engine) -> Books:
    """The business tables."""
    return Books(engine)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file."""

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return write


@pytest.fixture
def read(spark: SparkSession, write: Write) -> Read:
    """Write a file, and read its events."""
    return lambda name, content, **given: read_events(spark, [write(name, content)], **given)
