"""Format txbox: ``df.write.format("txbox")``, ``df.writeStream.format("txbox")`` and ``spark.read.format("txbox")``.

::

    driver                                   executors                            driver
    options, schema ── writer: run id ──────▶ task: rows ── pieces ── Postgres ──▶ commit: the run is finished
                                              (again, after a failure)             abort: the run has failed

It is a Python data source (``pyspark.sql.datasource``), which Spark runs in separate Python processes.
"""

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from txbox import InvalidConfiguration
from txbox_spark.source.source_options import FORMAT, explained, read_options, write_options
from txbox_spark.source.source_reader import SOURCE_TABLES, TableReader
from txbox_spark.source.source_writer import InboxStreamWriter, InboxWriter

NOT_READ, NOT_WRITTEN = "nothing can be read", "nothing can be written"


class TxboxSource(DataSource):
    """Writes events through the inbox, and reads txbox's tables."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of the table to read, as Spark DDL."""
        with explained(NOT_READ):
            return SOURCE_TABLES[read_options(self.options, tuple(SOURCE_TABLES)).table].columns

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a table."""
        with explained(NOT_READ):
            return TableReader(read_options(self.options, tuple(SOURCE_TABLES)), schema)

    def writer(self, schema: StructType, overwrite: bool) -> InboxWriter:
        """Return the writer of a DataFrame."""
        _refuse_overwrite(overwrite, "mode('append')")
        with explained(NOT_WRITTEN):
            writer = InboxWriter(write_options(self.options), schema)
            writer.warn_of_new_subscriber()
            return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> InboxStreamWriter:  # noqa: N802 - Spark's name
        """Return the writer of a stream's batch."""
        _refuse_overwrite(overwrite, "outputMode('append')")
        with explained(NOT_WRITTEN):
            return InboxStreamWriter(write_options(self.options), schema)


def _refuse_overwrite(overwrite: bool, mode: str) -> None:
    if overwrite:
        raise InvalidConfiguration(
            f"format {FORMAT}: what was applied cannot be overwritten; write with {mode}: what the inbox has is not "
            "applied again"
        )
