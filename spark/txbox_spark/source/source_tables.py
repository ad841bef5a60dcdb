"""The tables that format txbox reads: their columns in Spark, and their statements."""

from dataclasses import dataclass

from txbox.postgres.sql_files import SqlFile
from txbox_spark.runtime.lazy_imports import pyarrow


class SourceStatements(SqlFile, file="source_tables.sql"):
    """The statements of source_tables.sql, for the tables of one schema, under one prefix."""

    prepare_read: str
    size: str
    inbox_bounds: str
    read_inbox: str
    outbox_sent_bounds: str
    read_outbox_sent: str
    letters_bounds: str
    read_letters: str
    read_loads: str


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table that can be read."""

    name: str  # in Postgres, without prefix
    columns: str  # in Spark's words
    rows: int  # how many a task holds at a time: fewer where there are bodies
    has_subscriber: bool = True
    in_parts: bool = True  # several tasks may read it

    @property
    def names(self) -> list[str]:
        """The names of its columns."""
        return [column.split()[0] for column in self.columns.split(", ")]

    def arrow_schema(self) -> "pyarrow.Schema":
        """Return its columns for Arrow."""
        kinds = {
            "string": pyarrow.string(),
            "bigint": pyarrow.int64(),
            "int": pyarrow.int32(),
            "binary": pyarrow.binary(),
            "timestamp": pyarrow.timestamp("us", "UTC"),
        }
        return pyarrow.schema([(name, kinds[kind]) for name, kind in map(str.split, self.columns.split(", "))])


SOURCE_TABLES = {
    "inbox": SourceTable(
        "processed_message",
        "subscriber_id string, message_id string, processed_at timestamp, fingerprint binary, dead_letter_id bigint",
        10_000,
    ),
    "outbox_sent": SourceTable(
        "outbox_sent",
        "message_id string, position bigint, destination string, key string, headers string, body binary, "
        "published_at timestamp, sent_at timestamp",
        500,
        has_subscriber=False,
    ),
    "letters": SourceTable(
        "dead_letter",
        "dead_letter_id bigint, subscriber_id string, message_id string, reason string, error string, attempts int, "
        "source string, headers string, body binary, parked_at timestamp, redriven_at timestamp, redriven_by string, "
        "discarded_at timestamp, discarded_by string, note string",
        500,
    ),
    "loads": SourceTable(
        "bulk_load",
        "run_id string, subscriber_id string, source string, writer string, attempts int, chunks int, merged bigint, "
        "read bigint, rejected bigint, duplicate_in_source bigint, already_processed bigint, parked bigint, "
        "expired bigint, applied bigint, error string, started_at timestamp, heartbeat_at timestamp, "
        "finished_at timestamp",
        1_000,
        in_parts=False,
    ),
}
"""By what ``option("table", …)`` says."""
