"""How a run, and each of its chunks, is resumed.

1. ``resume_run`` reads the run from the ledger and checks that the events are the same: the same source, the same
   ids. Then the bounds of the chunks that the ledger has are still right.
2. A chunk that has a row in ``bulk_load_chunk`` is merged: the row commits with the chunk's effects. The writers leave
   it out (``LoadContext.merged_chunks``), and do not even read it.
3. A chunk without a row is merged from its beginning, for nothing of it is committed. ``chunk_merger.begin_chunk``
   claims it: of two attempts at one chunk, one merges it, and the other finds it done.

The same holds for the next attempt of the same call (``loader``) and for a task that Spark runs twice.
"""

from txbox import InvalidConfiguration
from txbox_spark.loading.context import LoadContext
from txbox_spark.loading.ledger import Run
from txbox_spark.options import JDBC
from txbox_spark.runtime.session import require_jdbc_driver
from txbox_spark.survey import content_digest, count_rejected_rows


def resume_run(context: LoadContext, run: Run) -> Run:
    """Check that a run's events are the same, and begin another attempt unless the run is finished.

    Raises:
        InvalidConfiguration: the subscriber, the source or the ids are not the same; or, with writer jdbc, the number
            of rows that cannot be loaded.
        SparkSetupError: the events are the same, and Spark lacks the JDBC driver that the run's writer needs.
    """
    if run.subscriber_id != context.options.subscriber_id:
        raise InvalidConfiguration(
            f"run {run.run_id} is of subscriber {run.subscriber_id}, not {context.options.subscriber_id}"
        )
    if run.digest != context.digest:
        raise InvalidConfiguration(
            f"run {run.run_id} has begun to load {run.source}, and this is not the same (other files, changed files, "
            "or another message id); begin a new run: what has been applied is not applied again"
        )
    # Of a finished run too, and whatever the name of the source: other events would be reported as loaded.
    with context.stage("survey", run):
        rows, content = content_digest(context.events)
    if content != run.content:
        raise InvalidConfiguration(
            f"run {run.run_id} has begun to load {run.rows:,} rows of {run.source}, and these {rows:,} have other "
            "message ids; resume it with the same events, or begin a new run: what has been applied is not applied "
            "again"
        )
    if run.writer == JDBC:
        require_jdbc_driver(context.spark)
        if not run.finished:
            _refuse_other_rejects(context, run)
    return run if run.finished else context.ledger.begin_attempt(run.run_id)


def _refuse_other_rejects(context: LoadContext, run: Run) -> None:
    """Refuse other fields or types: chunks of a staging table have no rejected rows, so the run's count must hold."""
    with context.stage("survey", run):
        rejected = count_rejected_rows(context.events)
    if rejected != (run.rejected or 0):
        raise InvalidConfiguration(
            f"run {run.run_id} has begun without {run.rejected or 0:,} rows that cannot be loaded, and now "
            f"{rejected:,} cannot; resume it with the same fields and types, or begin a new run: what has been applied "
            "is not applied again"
        )
