"""The statements of ``watermarks.sql``, and the one that is made of the caller's columns."""

from txbox.postgres.sql import quote
from txbox.postgres.sql_files import SqlFile


class WatermarkStatements(SqlFile, file="watermarks.sql"):
    """The statements for the watermarks in one schema, under one prefix."""

    advance: str
    advance_next: str
    drop_placeholder: str
    read_sequence: str
    advance_many: str
    hold_many: str
    settle_many: str
    bound: str
    kept_events: str
    count_kept: str

    def advance_from(self, relation: str, type_column: str | None, id_column: str, sequence_column: str) -> str:
        """Return the statement that advances by the events of a table, and deletes from it those that are stale.

        It takes lock_timeout (or null), subscriber_id, newest_only, and aggregate_type unless a column has it; it
        returns how many events are left.

        Args:
            relation: the table, by its name alone; a temporary one comes first.
            type_column: the column of the aggregate's type; None: it is given as a value.
            id_column, sequence_column: those of its id, and of the event's sequence.
        """
        table = quote(relation)
        kind = "%(aggregate_type)s" if type_column is None else f"event.{quote(type_column)}"
        return f"""
WITH {self.bound}, txbox_event AS MATERIALIZED (
  SELECT event.ctid AS row_id, ({kind}::text) COLLATE "C" AS aggregate_type,
    (event.{quote(id_column)}::text) COLLATE "C" AS aggregate_id, event.{quote(sequence_column)}::bigint AS sequence
  FROM {table} AS event
), {self.kept_events}, txbox_dropped AS (
  DELETE FROM {table} AS event
  WHERE NOT EXISTS (SELECT FROM txbox_kept WHERE txbox_kept.row_id = event.ctid)
)
{self.count_kept}"""
