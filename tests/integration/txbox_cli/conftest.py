from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from support.program import Ended
from txbox_cli import spark as cli_spark
from txbox_cli.app import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def txbox(
    schema_url: str, aws: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ended]:
    """Run the program in this process, on the test's own tables and the local SQS."""
    monkeypatch.setenv("TXBOX_DATABASE_URL", schema_url)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def txbox(*arguments: str) -> Ended:
        capsys.readouterr()
        status = run(list(arguments))
        return Ended(status, *capsys.readouterr())

    return txbox


@pytest.fixture
def same_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of all tests, in place of one that each command starts and stops."""

    @contextmanager
    def session(*_: object, **__: object) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(cli_spark, "session", session)
