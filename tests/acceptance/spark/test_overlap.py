"""Bulk loads and live workers, and bulk loads and each other, over the same messages: each is applied once.

Whoever was first has applied it; the report and the workers' outcomes add up to the ids that there are.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.spark.bulk_load_moments import PURCHASES
from support.spark.bulk_loads import COPY_FIRST
from support.spark.purchases import APPLY, GATE, GATED, Books, Purchases, adds_up, messages, settle
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make
from txbox import Outcome
from txbox.instrumentation import Event, Settled
from txbox.postgres.sqlstates import is_retryable
from txbox_spark import BulkLoadFailed, BulkLoadReport, bulk_load, read_events
from txbox_workers.memory_source import MemorySource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]  # the first needs a JVM, and a machine may be slow

BEYOND = Purchases.make(200, first=2_500)
"""What is not in the file."""
REACHED_SECONDS = 90

Load = Callable[..., BulkLoadReport]


@pytest.fixture
def events(spark: "SparkSession", path: str) -> "DataFrame":
    return read_events(spark, [path])


@pytest.fixture
def load(events: "DataFrame", fresh_database: str) -> Load:
    """Load the file; the loader's connections have the default isolation level that is named."""

    def load(*, isolation: str = "serializable", **settings: Any) -> BulkLoadReport:
        options = f"-cdefault_transaction_isolation={isolation}"
        settings = {"subscriber_id": "billing", "apply": APPLY, "chunk_rows": 500, "parallelism": 2, **settings}
        return bulk_load(
            events,
            url=make_url(fresh_database).update_query_dict({"options": options}),
            message_id="purchase_id",
            **settings,
        )

    return load


# --- live workers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def live(fresh_database: str) -> Iterator[Callable[..., Any]]:
    """Make a worker, and its source, for messages; its connections have the isolation level that is named."""
    engines: list[Engine] = []

    def live(source: MemorySource, isolation: str = "READ COMMITTED", handler: Any = settle, **options: Any) -> Any:
        engines.append(create_engine(fresh_database, isolation_level=isolation))
        return make(source, engines[-1], handler, max_attempts=None, **options)

    yield live
    for engine in engines:
        engine.dispose()


def collect(settled: list[Settled], event: Event) -> None:
    if isinstance(event, Settled):
        settled.append(event)


@pytest.mark.parametrize(
    ("writer", "isolation"),
    [
        pytest.param("copy", "READ COMMITTED"),
        pytest.param("copy", "REPEATABLE READ", marks=pytest.mark.slow),
        pytest.param("copy", "SERIALIZABLE", marks=pytest.mark.slow),
        pytest.param("jdbc", "READ COMMITTED", marks=pytest.mark.slow),
        pytest.param("jdbc", "REPEATABLE READ", marks=pytest.mark.slow),
        pytest.param("jdbc", "SERIALIZABLE"),
    ],
)
def test_at_the_same_time(writer: str, isolation: str, books: Books, load: Load, live: Callable[..., Any]) -> None:
    """The workers begin once the run has, so both are at it until one of them has no more."""
    ids = sorted(PURCHASES.ids)
    random.Random(4).shuffle(ids)
    ids = ids[:1_500]
    source = MemorySource([*messages(PURCHASES, ids), *messages(BEYOND, sorted(BEYOND.ids))])
    early = MemorySource(messages(PURCHASES, ids[:50]))
    with at_work(first := live(early, isolation)):
        assert early.wait_until_empty(60), "the workers have had some before"
    settled: list[Settled] = []
    worker = live(source, isolation, threads=3, hooks=[lambda event: collect(settled, event)])
    apply = f"{APPLY}; SELECT pg_sleep(0.1)"
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, writer=writer, apply=apply)
        wait_until(
            lambda: loading.done() or books.rows("SELECT 1 FROM bulk_load"), "it merges", timeout=REACHED_SECONDS
        )
        with at_work(worker):
            report = loading.result(120)
            assert source.wait_until_empty(120)
    by_workers = first.counts[Outcome.PROCESSED] + worker.counts[Outcome.PROCESSED] - len(BEYOND.ids)
    assert report.applied + by_workers == len(PURCHASES.ids)
    assert by_workers >= 50
    assert report.applied >= len(PURCHASES.ids) - len(ids)
    adds_up(report, PURCHASES, already=by_workers)
    acked = Counter(event.outcome for event in settled if event.acked)
    assert set(acked) <= {Outcome.PROCESSED, Outcome.DUPLICATE}
    assert acked.total() == len(ids) + len(BEYOND.ids)
    # A chunk may hold an account for longer than a worker repeats a transaction; then the delivery comes again.
    failed = [event.error for event in settled if event.outcome is Outcome.FAILED]
    assert all(error is not None and is_retryable(error) for error in failed), failed
    books.assert_exact(PURCHASES, BEYOND)


@pytest.mark.slow
@pytest.mark.parametrize("writer", COPY_FIRST)
def test_a_worker_hands_back_what_a_chunk_has_recorded_and_not_committed(
    writer: str, engine: Engine, books: Books, load: Load, live: Callable[..., Any]
) -> None:
    source = MemorySource(messages(PURCHASES, sorted(PURCHASES.ids)[::5]))
    worker = live(source)
    with ThreadPoolExecutor(1) as pool:
        with engine.connect() as connection, connection.begin():
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({GATE})")
            loading = pool.submit(load, writer=writer, apply=GATED)
            wait_until(
                lambda: loading.done() or books.waiting("advisory", GATE), "a chunk waits", timeout=REACHED_SECONDS
            )
            worker.start()
            wait_until(lambda: worker.counts.get(Outcome.IN_FLIGHT), "the worker meets the chunk", timeout=60)
        report = loading.result(120)
        assert source.wait_until_empty(60)
        assert worker.stop(20)
    processed = worker.counts.get(Outcome.PROCESSED, 0)
    assert worker.counts[Outcome.DUPLICATE] + processed == 500
    adds_up(report, PURCHASES, already=processed)
    books.assert_exact(PURCHASES)


# --- other loads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "writers",
    [
        pytest.param(("copy", "jdbc")),
        pytest.param(("copy", "copy"), marks=pytest.mark.slow),
        pytest.param(("jdbc", "jdbc"), marks=pytest.mark.slow),
    ],
)
def test_two_loads_of_one_file_at_once(writers: tuple[str, str], books: Books, load: Load) -> None:
    """Their chunks begin and end at different ids, so each meets two of the other's."""
    with ThreadPoolExecutor(2) as pool:
        loading = [
            pool.submit(load, writer=writer, chunk_rows=rows) for writer, rows in zip(writers, (500, 700), strict=True)
        ]
        one, other = (future.result(150) for future in loading)
    assert one.run_id != other.run_id
    assert one.applied + other.applied == len(PURCHASES.ids)
    adds_up(one, PURCHASES, already=other.applied)
    adds_up(other, PURCHASES, already=one.applied)
    books.assert_exact(PURCHASES)


@pytest.mark.slow
@pytest.mark.parametrize("writer", COPY_FIRST)
def test_one_run_is_resumed_twice_at_once(writer: str, books: Books, load: Load) -> None:
    """Both come to the same end, and the ledger has each chunk once."""
    with pytest.raises(BulkLoadFailed) as caught:
        load(writer=writer, apply="SELECT 1 / 0 FROM fresh_event")
    run_id = caught.value.run_id
    with ThreadPoolExecutor(2) as pool:
        apply = f"{APPLY}; SELECT pg_sleep(0.1)"
        loading = [pool.submit(load, writer=writer, resume=run_id, apply=apply) for _ in range(2)]
        for future in loading:
            adds_up(future.result(150), PURCHASES)
    books.assert_exact(PURCHASES)
    books.assert_finished(run_id)
