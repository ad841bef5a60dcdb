"""Bulk loads that lose the database: in a chunk, at its COMMIT, all connections at once. They go on by themselves."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine, make_url

from support.postgres.tcp_proxy import TcpProxy
from support.spark.bulk_load_moments import PURCHASES, gate
from support.spark.bulk_loads import WRITERS
from support.spark.purchases import GATE, GATED, Books, adds_up
from support.waiting import wait_until
from txbox.backoff import Backoff
from txbox_spark import BulkLoadFailed, BulkLoadReport, bulk_load, read_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first needs a JVM, and a machine may be slow

REACHED_SECONDS = 90


@pytest.fixture
def proxy(database_url: str) -> Iterator[TcpProxy]:
    place = make_url(database_url)
    with TcpProxy(place.host or "127.0.0.1", place.port or 5432) as proxy:
        yield proxy


@pytest.fixture
def load(spark: "SparkSession", fresh_database: str, path: str, proxy: TcpProxy) -> Callable[..., BulkLoadReport]:
    """Load the purchases through the proxy; from the third chunk on they wait at the gate."""
    events = read_events(spark, [path])
    url = make_url(fresh_database).set(host="127.0.0.1", port=proxy.port)
    url = url.update_query_dict({"txbox_watchdog_seconds": "2"})

    def load(writer: str, resume: str | None = None) -> BulkLoadReport:
        return bulk_load(
            events,
            url=url,
            subscriber_id="billing",
            message_id="purchase_id",
            apply=GATED,
            writer=writer,
            resume=resume,
            chunk_rows=250,
            parallelism=2,
        )

    return load


@contextmanager
def a_chunk_waits(
    pool: Executor, load: Callable[..., BulkLoadReport], writer: str, engine: Engine, books: Books
) -> Iterator["Future[BulkLoadReport]"]:
    """Load in a thread; a chunk waits at the gate until the block ends."""
    with gate(engine):
        loading = pool.submit(load, writer)
        wait_until(lambda: loading.done() or books.waiting("advisory", GATE), "a chunk waits", timeout=REACHED_SECONDS)
        yield loading


def cut_all(engine: Engine, proxy: TcpProxy) -> None:
    assert proxy.cut() >= 2, "the chunk's connection and those of the ledger"


def terminate_the_chunk(engine: Engine, proxy: TcpProxy) -> None:
    with engine.connect() as connection:
        terminated = connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
            "AND objid = %s AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            (GATE,),
        )
        assert terminated.rowcount >= 1


def lose_the_answer_to_its_commit(engine: Engine, proxy: TcpProxy) -> None:
    proxy.lose_next(reaches_server=True)


def lose_its_commit(engine: Engine, proxy: TcpProxy) -> None:
    proxy.lose_next(reaches_server=False)


def hear_nothing_of_its_commit(engine: Engine, proxy: TcpProxy) -> None:
    proxy.lose_next(reaches_server=True, quietly=True)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "lose",
    [cut_all, terminate_the_chunk, lose_the_answer_to_its_commit, lose_its_commit, hear_nothing_of_its_commit],
)
def test_a_load_that_loses_its_connection_goes_on_and_is_exact(
    writer: str,
    lose: Callable[[Engine, TcpProxy], None],
    engine: Engine,
    books: Books,
    proxy: TcpProxy,
    load: Callable[..., BulkLoadReport],
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with a_chunk_waits(pool, load, writer, engine, books) as loading:
            assert not loading.done(), loading.result()
            done = books.chunks_done()
            lose(engine, proxy)
        report = loading.result(timeout=120)
    assert 2 == done < report.chunks
    assert proxy.lost == (lose not in (cut_all, terminate_the_chunk))
    assert report.attempts == 2, "it has tried again"
    adds_up(report, PURCHASES)
    books.assert_exact(PURCHASES)
    books.assert_finished(report.run_id)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_load_whose_database_stays_away_says_so_and_can_be_resumed(
    writer: str,
    engine: Engine,
    books: Books,
    proxy: TcpProxy,
    load: Callable[..., BulkLoadReport],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("txbox_spark.runtime.retries.OUTAGE_BACKOFF", Backoff(first_seconds=0.001))
    with ThreadPoolExecutor(1) as pool:
        with a_chunk_waits(pool, load, writer, engine, books) as loading:
            proxy.refuse()
            proxy.cut()
        with pytest.raises(BulkLoadFailed, match="the database cannot be reached") as caught:
            loading.result(timeout=120)
    (run_id,) = books.rows("SELECT run_id FROM bulk_load")
    assert caught.value.run_id == run_id

    proxy.accept()
    report = load(writer, resume=run_id)
    adds_up(report, PURCHASES)
    books.assert_exact(PURCHASES)
    books.assert_finished(run_id)
