"""Bulk loads whose driver is told to end: by a supervisor (SIGTERM) or at a terminal (SIGINT). They are resumable."""

import signal
from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from support.bulk_load_moments import PURCHASES, SETTINGS, Moment, connected, inside_a_chunk, while_staging
from support.bulk_load_process import BulkLoadProcess
from support.purchases import APPLY, GATED, Books, adds_up
from support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # each needs a JVM or two of its own, and a machine may be slow


MOMENTS = [
    pytest.param("copy", inside_a_chunk, id="copy, inside a chunk"),
    pytest.param("jdbc", while_staging, id="jdbc, while staging"),
    pytest.param("jdbc", inside_a_chunk, id="jdbc, inside a chunk"),
]


@pytest.mark.parametrize(("writer", "moment"), MOMENTS)
def test_interrupted(
    writer: str,
    moment: Moment,
    fresh_database: str,
    engine: Engine,
    books: Books,
    path: str,
    driver: Callable[[], BulkLoadProcess],
) -> None:
    """Ctrl-C is a KeyboardInterrupt: the call ends, no job of Spark is left, and the session can be used again."""
    process = driver()
    settings = {**SETTINGS, "writer": writer, "url": fresh_database}
    with moment(engine, books) as reached:
        process.begin(path, apply=GATED, **settings)
        reached()
        process.signal(signal.SIGINT)
        if writer == "copy":  # its chunks are tasks, which are cancelled; the others are threads, which end their chunk
            assert process.answer()["interrupted"]
    if writer != "copy":
        assert process.answer()["interrupted"]
    wait_until(lambda: process.active_jobs() == [], "Spark has ended its jobs")
    wait_until(lambda: connected(engine) == 0, "what was begun has ended")
    (run_id,) = books.rows("SELECT run_id FROM bulk_load WHERE finished_at IS NULL")
    assert sum(books.applied().values()) == len(books.recorded()) < len(PURCHASES.ids)

    resumed = process.load(path, apply=APPLY, resume=run_id, **settings)
    assert resumed.attempts == 2
    adds_up(resumed, PURCHASES)
    books.assert_exact(PURCHASES)
    books.assert_finished(run_id)


@pytest.mark.parametrize(
    ("writer", "moment"),
    [
        pytest.param("copy", inside_a_chunk, id="copy, inside a chunk"),
        pytest.param("jdbc", while_staging, id="jdbc, while staging", marks=pytest.mark.slow),
        pytest.param("jdbc", inside_a_chunk, id="jdbc, inside a chunk", marks=pytest.mark.slow),
    ],
)
def test_terminated(
    writer: str,
    moment: Moment,
    fresh_database: str,
    engine: Engine,
    books: Books,
    path: str,
    driver: Callable[[], BulkLoadProcess],
) -> None:
    process = driver()
    settings = {**SETTINGS, "writer": writer, "url": fresh_database}
    with moment(engine, books) as reached:
        process.begin(path, apply=GATED, **settings)
        reached()
        process.signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
        wait_until(lambda: not process.alive(), "its JVM and its Python workers follow it", timeout=60)
    wait_until(lambda: connected(engine) == 0, "what was begun has ended")
    (run_id,) = books.rows("SELECT run_id FROM bulk_load WHERE finished_at IS NULL")

    resumed = driver().load(path, apply=APPLY, resume=run_id, **settings)
    adds_up(resumed, PURCHASES)
    books.assert_exact(PURCHASES)
    books.assert_finished(run_id)
