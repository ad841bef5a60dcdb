"""The tables of txbox, as SQLAlchemy metadata: the one description that everything else is held against.

``tables(schema, prefix)`` gives the tables for one place in one database. The columns of
``processed_message`` are a contract: Spark jobs, reports and people's own SQL read them.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB

__all__ = ["TABLE_NAMES", "Tables", "tables"]

TABLE_NAMES = ("processed_message", "message_failure", "dead_letter")
"""Every table of txbox, without prefix."""

BYTEWISE = Text(collation="C")
"""Ids are compared byte by byte: fastest, and the same order as Python's for sorted inserts."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of txbox in one schema, under one prefix."""

    metadata: MetaData
    processed_message: Table
    message_failure: Table
    dead_letter: Table


@lru_cache(maxsize=64)
def tables(schema: str | None = None, prefix: str = "") -> Tables:
    """Describe the tables of txbox.

    Args:
        schema: the Postgres schema that holds them; None leaves it to the connection's search path.
        prefix: put before every table, index and constraint name.

    Returns:
        The tables; the same object for the same arguments.
    """
    metadata = MetaData(schema=schema)
    return Tables(
        metadata=metadata,
        processed_message=_processed_message(metadata, prefix),
        message_failure=_message_failure(metadata, prefix),
        dead_letter=_dead_letter(metadata, prefix),
    )


def _processed_message(metadata: MetaData, prefix: str) -> Table:
    """The inbox: what each subscriber has already processed. Insert-only."""
    return Table(
        f"{prefix}processed_message",
        metadata,
        Column("subscriber_id", BYTEWISE, primary_key=True),
        Column("message_id", BYTEWISE, primary_key=True),
        _now("processed_at"),
        Column("fingerprint", LargeBinary, comment="SHA-256 of the body; null where none was asked for"),
    )


def _message_failure(metadata: MetaData, prefix: str) -> Table:
    """Messages that have failed and will be tried again, with the number of attempts so far.

    Written in transactions of its own, so that rolling the handler back does not roll the count back.
    """
    return Table(
        f"{prefix}message_failure",
        metadata,
        Column("subscriber_id", BYTEWISE, primary_key=True),
        Column("message_id", BYTEWISE, primary_key=True),
        Column("attempts", Integer, nullable=False),
        Column("error", Text, nullable=False),
        _now("first_failed_at"),
        _now("last_failed_at"),
        CheckConstraint("attempts > 0", name=f"{prefix}message_failure_attempts_check"),
    )


def _dead_letter(metadata: MetaData, prefix: str) -> Table:
    """Messages parked after their last attempt, whole: everything needed to send them through again."""
    table = Table(
        f"{prefix}dead_letter",
        metadata,
        Column("dead_letter_id", BigInteger, Identity(always=True), primary_key=True),
        Column("subscriber_id", BYTEWISE, nullable=False),
        Column("message_id", BYTEWISE, nullable=False),
        Column("reason", Text, nullable=False),
        Column("error", Text, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("source", Text, nullable=False),
        Column("body", LargeBinary, nullable=False, comment="as the broker delivered it"),
        Column("body_hash", LargeBinary, nullable=False, comment="SHA-256 of body"),
        Column("headers", JSONB, nullable=False),
        Column("envelope", JSONB, nullable=False, comment="what the broker needs to send it again"),
        _now("parked_at"),
        Column("redriven_at", DateTime(timezone=True)),
        CheckConstraint(
            "reason IN ('failed', 'mismatch', 'malformed', 'crashed')",
            name=f"{prefix}dead_letter_reason_check",
        ),
    )
    # A worker may die between parking and ack; the redelivery then parks the letter again, and finds it here.
    Index(
        f"{prefix}dead_letter_parked_once",
        table.c.subscriber_id,
        table.c.message_id,
        table.c.body_hash,
        unique=True,
        postgresql_where=table.c.redriven_at.is_(None),
    )
    return table


def _now(name: str) -> Column[Any]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())
