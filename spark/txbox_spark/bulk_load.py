"""A bulk load: millions of events through the inbox that the live workers use.

::

    survey ── ledger: begin ──┬─ copy: each task copies and merges its chunks ──────┬── report ── ledger: finish
                              └─ jdbc: tasks stage, the driver merges the chunks ───┘

A run may be killed at any moment. What has committed is in the inbox, in the business tables and in the ledger, or in
none of them. Running it again is enough, for the inbox rejects what has been applied; resuming the run saves that work,
because chunks that are done are not even read.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sqlalchemy import URL

from txbox import Inbox, InvalidConfiguration
from txbox.postgres.engines import open_engine
from txbox.postgres.transaction_guard import guard
from txbox.postgres.urls import database_url
from txbox_spark.loading.context import LoadContext
from txbox_spark.loading.loader import AUTO, load
from txbox_spark.loading.progress import ProgressReporter
from txbox_spark.loading.writer import COPY, JDBC
from txbox_spark.merging.effects import Apply
from txbox_spark.merging.merge import EFFECTS_SECONDS, STALLED_SECONDS, ChunkLimits
from txbox_spark.reading.event_rows import prepare
from txbox_spark.reading.sources import EventSource
from txbox_spark.report import BulkLoadReport, OnProgress
from txbox_spark.subscribers import warn_of_new_subscriber

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "ABANDONED_SECONDS",
    "CHUNK_ROWS",
    "EFFECTS_SECONDS",
    "STALLED_SECONDS",
    "WRITERS",
    "bulk_load",
    "check_arguments",
]

WRITERS = (AUTO, COPY, JDBC)

CHUNK_ROWS = 1_000_000
"""Rows in a chunk, about. Larger chunks are faster; the rows that they change stay locked for longer."""

ABANDONED_SECONDS = 24 * 3600.0
"""After so long without a heartbeat, a run's staging table is dropped."""


def bulk_load(
    events: "DataFrame",
    *,
    url: str | URL,
    subscriber_id: str,
    message_id: str,
    apply: Apply,
    schema: str | None = None,
    prefix: str = "",
    column_types: Mapping[str, str] | None = None,
    writer: str = "auto",
    parallelism: int | None = None,
    chunk_rows: int = CHUNK_ROWS,
    source: EventSource | None = None,
    resume: str | None = None,
    on_progress: OnProgress | None = None,
    abandoned_seconds: float = ABANDONED_SECONDS,
    stalled_seconds: float = STALLED_SECONDS,
    effects_seconds: float = EFFECTS_SECONDS,
    force: bool = False,
) -> BulkLoadReport:
    """Apply every event of a DataFrame once, whatever has been applied before or is being applied by live workers.

    The DataFrame is read twice, once for its ids alone; it must give the same rows both times.

    Args:
        events: the events, one a row.
        url: the database, ``postgresql://user:password@host/name``; executors must reach it under this name.
        subscriber_id: who processes the events: the name that the live workers' inbox has.
        message_id: the column that holds the message id, or an expression of Spark SQL that makes it; it must be what
            the live workers record.
        apply: the effect: SQL statements over the relation ``fresh_event``, which has the events' columns, and
            ``message_id`` as text; or a picklable callable that is given the transaction's SQLAlchemy connection, in
            which that relation is. It runs in the transaction of each chunk that has events that are first, and may run
            again after a deadlock, when what it did is rolled back.
        schema: the Postgres schema that holds txbox's tables; None leaves it to the search path.
        prefix: what those tables' names start with.
        column_types: Postgres types of columns, where Spark's own type does not say enough, such as
            ``{"order_id": "uuid", "payload": "jsonb"}``.
        writer: "copy" (tasks copy and merge; executors need psycopg), "jdbc" (a staging table, merged from here), or
            "auto": copy where the executors can.
        parallelism: how many chunks are merged at once; None: as many as Spark runs tasks.
        chunk_rows: rows in a chunk, about.
        source: what the events were read from, if that was files: a run is resumed only with the same ones.
        resume: a run to be finished, in database of beginning one.
        on_progress: called with the progress, from a thread of its own.
        abandoned_seconds: after so long without a sign of life, other runs' staging tables are dropped.
        stalled_seconds: how long a chunk's transaction may do nothing, between two statements of a callable, say,
            before Postgres ends it; and how long a chunk waits for a lock before it lets go of its own.
        effects_seconds: how long a chunk waits for one and the same other chunk of the subscriber to apply its events,
            before the load fails.
        force: take SQL that does not name ``fresh_event``.

    Returns:
        The report; its counts add up.

    Raises:
        InvalidConfiguration: an argument cannot work.
        BulkLoadFailed: a chunk cannot be merged; nothing of it is committed, and the run can be resumed.
        RunNotFound: there is no run to resume of that name.
        SchemaMissing: txbox's tables do not exist.
        SparkSetupError: writer jdbc, and Spark has no JDBC driver.
    """
    database = check_arguments(
        "bulk_load",
        url=url,
        subscriber_id=subscriber_id,
        apply=apply,
        writer=writer,
        parallelism=parallelism,
        chunk_rows=chunk_rows,
        stalled_seconds=stalled_seconds,
        effects_seconds=effects_seconds,
        force=force,
    )
    spark = events.sparkSession
    chunks_at_once = parallelism or max(1, spark.sparkContext.defaultParallelism)
    engine = guard(open_engine(database, pool_size=chunks_at_once + _CONNECTIONS_BESIDE_CHUNKS))
    try:
        context = LoadContext(
            spark=spark,
            engine=engine,
            url=database,
            events=prepare(events, message_id, column_types),
            subscriber_id=subscriber_id,
            apply=apply,
            schema=schema,
            prefix=prefix,
            source="a DataFrame" if source is None else source.description,
            digest=_digest(events, source, message_id),
            parallelism=chunks_at_once,
            chunk_rows=chunk_rows,
            reporter=ProgressReporter(spark, on_progress),
            limits=ChunkLimits(stalled_seconds, effects_seconds),
        )
        context.ledger.check()
        warn_of_new_subscriber(engine, schema, prefix, subscriber_id)
        context.staging.sweep(abandoned_seconds)
        return load(context, writer, resume)
    finally:
        engine.dispose()


def check_arguments(
    caller: str,
    *,
    url: str | URL,
    subscriber_id: str,
    apply: Apply,
    writer: str,
    parallelism: int | None,
    chunk_rows: int,
    stalled_seconds: float = STALLED_SECONDS,
    effects_seconds: float = EFFECTS_SECONDS,
    force: bool = False,
) -> URL:
    """Check the arguments that ``bulk_load`` and ``inbox_sink`` share; return the database's URL with its driver.

    Raises:
        InvalidConfiguration: an argument cannot work; the message names the caller.
    """

    def require(fulfilled: bool, otherwise: str) -> None:
        if not fulfilled:
            raise InvalidConfiguration(f"{caller}: {otherwise}")

    Inbox(subscriber_id)  # refuses a name that cannot be kept
    database = database_url(url)
    require(writer in WRITERS, f"writer must be one of {', '.join(WRITERS)}, not {writer!r}")
    require(parallelism is None or parallelism >= 1, f"parallelism must be at least 1, not {parallelism!r}")
    require(chunk_rows >= 1, f"chunk_rows must be at least 1, not {chunk_rows!r}")
    for name, seconds in (("stalled_seconds", stalled_seconds), ("effects_seconds", effects_seconds)):
        require(0 < seconds <= 24 * 3600, f"{name} must be more than 0 and at most a day, not {seconds!r}")
    require(callable(apply) or isinstance(apply, str), f"apply must be SQL or a callable, not {apply!r}")
    if callable(apply):
        _require_picklable(caller, apply)
    else:
        require(bool(apply.strip()), "apply must be SQL or a callable; it is empty")
        require(
            force or "fresh_event" in apply.lower(),
            "apply does not name fresh_event, so the events would be recorded without effect; if that is meant, or a "
            "function does it, say so: force=True (on the command line: --force)",
        )
    return database


def _require_picklable(caller: str, apply: Callable[..., object]) -> None:
    from pyspark.cloudpickle import dumps

    try:
        dumps(apply)  # type: ignore[no-untyped-call]
    except Exception as error:  # what pickling raises is whatever the object raises
        raise InvalidConfiguration(
            f"{caller}: apply cannot be sent to the executors, as it cannot be pickled: {error}"
        ) from error


def _digest(events: "DataFrame", source: EventSource | None, message_id: str) -> bytes:
    """Return the SHA-256 of what a resumed run must find again.

    The effect is not part of it: a run whose statements were wrong is resumed with better ones.
    """
    files = source.digest if source is not None else events.schema.json().encode()
    return hashlib.sha256(b"\0".join((files, message_id.encode()))).digest()


_log = logging.getLogger("txbox.spark")

_CONNECTIONS_BESIDE_CHUNKS = 4
"""For the ledger, the heartbeat and the progress."""
