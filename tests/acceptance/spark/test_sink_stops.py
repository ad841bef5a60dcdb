"""A query that is stopped in a batch: nothing is lost or doubled, and a service that logs says nothing of it.

In a process of its own: what is printed comes from Python's logging, from py4j, and from a JVM whose stderr is the
process's own. One process serves all of them.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from support.spark.bulk_load_moments import PURCHASES, REACHED_SECONDS, Moment, inside_a_chunk, while_staging
from support.spark.purchases import APPLY, GATED, Books
from support.spark.stream_process import StreamProcess
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIGNS = ("Traceback", "Exception", "\n\tat ", "\n  File ")
"""What is in a traceback of Python's or Java's."""


@contextmanager
def in_the_inbox(engine: Engine, books: Books) -> Iterator[Callable[[], object]]:
    """A chunk waits for an id that a live worker is recording."""
    with engine.connect() as worker:
        worker.exec_driver_sql(
            "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', 'p000000')"
        )
        yield lambda: wait_until(lambda: books.waiting("transactionid"), "a chunk waits", timeout=REACHED_SECONDS)
        worker.rollback()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamProcess]:
    process = StreamProcess(tmp_path_factory.mktemp("service") / "stderr")
    yield process
    assert process.end() == 0
    assert not [sign for sign in SIGNS if sign in process.said()], process.said()


@pytest.mark.parametrize(
    ("writer", "moment"),
    [
        pytest.param("copy", None, id="copy, survey"),
        pytest.param("copy", in_the_inbox, id="copy, merge"),
        pytest.param("copy", inside_a_chunk, id="copy, effect"),
        pytest.param("jdbc", None, id="jdbc, survey"),
        pytest.param("jdbc", while_staging, id="jdbc, staging"),
        pytest.param("jdbc", in_the_inbox, id="jdbc, merge"),
        pytest.param("jdbc", inside_a_chunk, id="jdbc, effect"),
    ],
)
def test_stopped(
    writer: str,
    moment: Moment | None,
    service: StreamProcess,
    fresh_database: str,
    engine: Engine,
    books: Books,
    path: str,
    tmp_path: Path,
) -> None:
    place = {"url": fresh_database, "subscriber_id": "billing", "writer": writer}
    files = {"landing": path, "checkpoint": str(tmp_path / "checkpoint")}
    before = len(service.said())
    with contextlib.nullcontext() if moment is None else moment(engine, books) as reached:
        assert service.do("start", **place, **files, apply=GATED, sleeping=moment is None) is None
        if reached is None:
            assert service.do("wait for a task") is None
        else:
            reached()
        service.begin("stop")
        if writer == "copy" or moment in (None, while_staging):  # chunks of jdbc that have begun are waited for
            assert service.answer() is None, "to be stopped is no failure"
    if writer == "jdbc" and moment not in (None, while_staging):
        assert service.answer() is None
    said = service.said()[before:]
    assert not [sign for sign in SIGNS if sign in said], said

    if moment is while_staging:
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP EVENT TRIGGER gate_staging")
    assert service.do("start", **place, **files, apply=APPLY) is None
    assert service.do("finish") is None
    books.assert_exact(PURCHASES)
    assert books.rows("SELECT run_id FROM bulk_load") == [], "the batch that was stopped is forgotten"
