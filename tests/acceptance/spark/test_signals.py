"""Bulk loads whose driver is told to end: by a supervisor (SIGTERM) or at a terminal (SIGINT). They are resumable."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine

from support.program import Running, left_in
from support.spark.bulk_load_moments import (
    PURCHASES,
    REACHED_SECONDS,
    SETTINGS,
    Moment,
    connected,
    held,
    inside_a_chunk,
    while_staging,
)
from support.spark.bulk_load_process import BulkLoadProcess
from support.spark.purchases import APPLY, GATED, Books, adds_up
from support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # each needs a JVM or two of its own, and a machine may be slow


MOMENTS_OF_A_LOAD = 6

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


@pytest.mark.parametrize(("writer", "moment"), MOMENTS)
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


def command(path: str, url: str, script: Path) -> Running:
    """Start the command in a session of its own, as a terminal does."""
    script.write_text(GATED, encoding="utf-8")
    what = ("--subscriber", "billing", "--message-id", "purchase_id", "--apply", str(script), "--chunk-rows", "500")
    master = ("--master", "local[2]", "--writer", "copy")
    return Running("bulk-load", path, *what, *master, "--url", url, start_new_session=True)


def ask_to_end(running: Running, number: signal.Signals) -> None:
    """Send a signal as it comes: from a terminal to all processes of the session, from a supervisor to one."""
    if number == signal.SIGINT:
        os.killpg(running.process.pid, number)
    else:
        running.signal(number)


def said(running: Running) -> list[str]:
    """What it has said but for its progress: nothing of Spark, Java or Python is to be among it."""
    return [line for line in running.err if "tasks" not in line and "chunks" not in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_interrupted_says_how_to_go_on(
    number: signal.Signals, fresh_database: str, engine: Engine, books: Books, path: str, tmp_path: Path
) -> None:
    with command(path, fresh_database, tmp_path / "apply.sql") as running:
        with inside_a_chunk(engine, books) as reached:
            reached()
            ask_to_end(running, number)
            assert running.wait(timeout=60) == 130, running.err
        wait_until(lambda: left_in(running.process.pid) == [], "its JVM and its Python workers follow it", timeout=60)
    (run_id,) = books.rows("SELECT run_id FROM bulk_load WHERE finished_at IS NULL")
    assert running.err[-1] == f"txbox: interrupted; finish it with --resume {run_id}, or run it again\n"
    assert said(running) == running.err[-1:]


def jvm(running: Running) -> psutil.Process | None:
    """Spark's JVM, if it is there."""
    for process in psutil.Process(running.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "org.apache.spark.deploy.SparkSubmit" in process.cmdline():
                return process
    return None


def something_is_started(running: Running) -> bool:
    return bool(psutil.Process(running.process.pid).children())


def its_jvm_is_there(running: Running) -> bool:
    return jvm(running) is not None


def its_jvm_listens(running: Running) -> bool:
    """Python is about to connect, and to have Spark set itself up."""
    process = jvm(running)
    return process is not None and any(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))


def it_surveys(running: Running) -> bool:
    return any("survey" in line for line in running.err)


@pytest.mark.parametrize("moment", [something_is_started, its_jvm_is_there, its_jvm_listens, it_surveys])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_interrupted_while_spark_starts_leaves_no_jvm(
    number: signal.Signals,
    moment: Callable[[Running], bool],
    fresh_database: str,
    engine: Engine,
    path: str,
    tmp_path: Path,
) -> None:
    with command(path, fresh_database, tmp_path / "apply.sql") as running:
        wait_until(lambda: moment(running), moment.__name__, timeout=REACHED_SECONDS, every=0.01)
        ask_to_end(running, number)
        assert running.wait(timeout=60) == 130, running.err
        wait_until(lambda: left_in(running.process.pid) == [], "its JVM follows it", timeout=30)
    (line,) = said(running)
    assert line.startswith("txbox: interrupted")


def test_an_interrupt_at_any_moment_is_one_line_at_most(
    fresh_database: str, engine: Engine, books: Books, path: str, tmp_path: Path
) -> None:
    """Where it meets pyspark or py4j, these would show a traceback; so would Python, before and after all else."""
    script, rejected = tmp_path / "apply.sql", 3
    began = time.monotonic()
    with command(path, fresh_database, script) as running:
        assert running.wait(timeout=120) == rejected, running.err
    whole = time.monotonic() - began
    for part in range(MOMENTS_OF_A_LOAD):
        after = whole * (part + random.random()) / MOMENTS_OF_A_LOAD
        with command(path, fresh_database, script) as running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(after)
            if running.process.poll() is None:
                ask_to_end(running, signal.SIGINT)
            status = running.wait(timeout=60)
        # Python takes its handlers away at its very end.
        assert status in (130, rejected, -signal.SIGINT), (after, status, running.err)
        assert [line[:18] for line in said(running)] in ([], ["txbox: interrupted"]), (after, running.err)


@contextlib.contextmanager
def its_jvm_stands_still(path: str, url: str, script: Path) -> Iterator[tuple[Running, psutil.Process]]:
    """The command, while its JVM answers nothing: as one does that is at a plan without end, or has no memory left."""
    with command(path, url, script) as running:
        wait_until(lambda: it_surveys(running), "it surveys", timeout=REACHED_SECONDS)
        process = jvm(running)
        assert process is not None
        process.suspend()
        try:
            yield running, process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_whose_jvm_does_not_answer_ends_in_time(
    number: signal.Signals, fresh_database: str, engine: Engine, path: str, tmp_path: Path
) -> None:
    with its_jvm_stands_still(path, fresh_database, tmp_path / "apply.sql") as (running, process):
        asked = time.monotonic()
        ask_to_end(running, number)
        assert running.wait(timeout=60) == 130, running.err
        assert time.monotonic() - asked < 10
        wait_until(lambda: gone(process), "its JVM is gone", timeout=10)
    (line,) = said(running)
    assert line.startswith("txbox: interrupted")


def test_a_command_that_is_killed_leaves_no_jvm_whatever_that_does(
    fresh_database: str, engine: Engine, path: str, tmp_path: Path
) -> None:
    with its_jvm_stands_still(path, fresh_database, tmp_path / "apply.sql") as (running, process):
        running.signal(signal.SIGKILL)
        wait_until(lambda: gone(process), "its JVM is gone", timeout=10)


def test_a_command_whose_jvm_is_killed_says_so_and_which_run_to_resume(
    fresh_database: str, engine: Engine, books: Books, path: str, tmp_path: Path
) -> None:
    with command(path, fresh_database, tmp_path / "apply.sql") as running:
        with inside_a_chunk(engine, books) as reached:
            reached()
            process = jvm(running)
            assert process is not None
            process.kill()
            assert running.wait(timeout=60) == 1, running.err
        (run_id,) = books.rows("SELECT run_id FROM bulk_load WHERE finished_at IS NULL")
    line = running.err[-1]
    assert [one for one in running.err if "chunks, " not in one and "tasks" not in one] == [line]
    assert line.startswith("txbox: Spark has died: its JVM was killed by signal 9")
    assert f"resume run {run_id}" in line


def test_an_archive_whose_jvm_is_killed_says_so_in_one_line(
    fresh_database: str, engine: Engine, tmp_path: Path
) -> None:
    def waits() -> bool:
        with engine.connect() as connection:
            return (
                connection.exec_driver_sql("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted").scalar_one() is True
            )

    where = ("--url", fresh_database, "--master", "local[2]")
    with Running("archive", str(tmp_path / "archive"), *where, start_new_session=True) as running:
        with held(engine, "LOCK TABLE processed_message IN ACCESS EXCLUSIVE MODE"):
            wait_until(waits, "it counts ids", timeout=REACHED_SECONDS)
            process = jvm(running)
            assert process is not None
            process.kill()
        assert running.wait(timeout=60) == 1, running.err
    (line,) = said(running)
    assert line.startswith("txbox: Spark has died: its JVM was killed by signal 9")
