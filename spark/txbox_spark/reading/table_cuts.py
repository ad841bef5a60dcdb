"""How a table of Postgres is cut into parts that several tasks of Spark read."""

from psycopg.sql import Literal

PARTITION_BYTES = 32 << 20
"""How much of a table one task reads by default; about 300,000 rows of the inbox."""

MAX_PARTITIONS = 256

SAMPLED_BYTES = 8 << 20
"""How much of a table is sampled to cut it evenly; about 80,000 rows of the inbox."""


def parts_of(table_bytes: int) -> int:
    """Return into how many parts a table of such a size is cut."""
    return min(max(-(-table_bytes // PARTITION_BYTES), 1), MAX_PARTITIONS)


def sampled_percent(table_bytes: int) -> float:
    """Return how much of a table of such a size is sampled, of 100."""
    return min(100.0, 100.0 * SAMPLED_BYTES / max(table_bytes, 1))


def literal(value: object) -> str:
    """Return a value as Postgres's SQL has it: Spark's JDBC takes SQL as text and binds nothing."""
    return Literal(value).as_string(None).strip()
