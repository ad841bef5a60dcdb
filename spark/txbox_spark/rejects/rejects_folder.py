"""A folder that gets every rejected row of a load as lines of JSON; until the load ends, a table keeps them.

So what is in the folder is what has committed. The rows of a run are in ``run=RUN`` below it, and are written again if
the end of the run is repeated.
"""

from sqlalchemy import Engine

from txbox.postgres.transactions import short_transaction
from txbox_spark.rejects.rejects_table import RejectsTable
from txbox_spark.runtime.lazy_imports import SparkSession

WRITTEN_ROWS = 50_000
"""How many rows are held at a time."""

_COLUMNS = "message_id string, cause string, column string, value string, file string, event string"


def write_rejects(spark: SparkSession, engine: Engine, table: RejectsTable, run_id: str, folder: str) -> int:
    """Write the rows that a table keeps of a run, and return how many there are."""
    target = f"{folder.rstrip('/')}/run={run_id}"
    written = 0
    with (
        short_transaction(engine) as connection,
        connection.connection.driver_connection.cursor(name="txbox_rejects") as cursor,  # type: ignore[union-attr]
    ):
        cursor.execute(table.rows_of_run, {"run_id": run_id})
        while rows := cursor.fetchmany(WRITTEN_ROWS):
            mode = "append" if written else "overwrite"
            spark.createDataFrame(rows, _COLUMNS).coalesce(1).write.mode(mode).json(target)
            written += len(rows)
    return written
