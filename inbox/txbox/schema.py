"""The tables of txbox, as SQLAlchemy metadata: migrations and statements follow it.

``tables(schema, prefix)`` gives the tables for one place in one database. The columns of ``processed_message`` are a
contract: Spark jobs, reports and people's own SQL read them.

A bulk load of writer jdbc also has staging tables. They come and go with it, beside these tables, and are not part of
the metadata; ``is_staging()`` recognises their names.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    and_,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

__all__ = ["TABLE_NAMES", "Tables", "is_staging", "tables"]

TABLE_NAMES = (
    "processed_message",
    "message_failure",
    "dead_letter",
    "bulk_load",
    "bulk_load_chunk",
    "outbox_message",
    "outbox_sent",
    "outbox_relay",
    "message_lease",
    "aggregate_watermark",
    "handler_conflict",
)
"""Every table of txbox, without prefix."""

BYTEWISE = Text(collation="C")
"""Ids are compared byte by byte: fastest, and the same order as Python's for sorted inserts."""

# The run, the attempt, and for a partition the chunk.
_STAGING_NAME: Final = re.compile(r"bulk_load_staging_[0-9a-f]{12}_[0-9]+(?:_[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of txbox in one schema, under one prefix."""

    metadata: MetaData
    processed_message: Table
    message_failure: Table
    dead_letter: Table
    bulk_load: Table
    bulk_load_chunk: Table
    outbox_message: Table
    outbox_sent: Table
    outbox_relay: Table
    message_lease: Table
    aggregate_watermark: Table
    handler_conflict: Table


@lru_cache(maxsize=64)
def tables(schema: str | None = None, prefix: str = "") -> Tables:
    """Describe the tables of txbox; the same object for the same arguments.

    Args:
        schema: the Postgres schema that holds them; None leaves it to the connection's search path.
        prefix: put before every table, index and constraint name.
    """
    metadata = MetaData(schema=schema)
    return Tables(
        metadata=metadata,
        processed_message=_processed_message(metadata, prefix),
        message_failure=_message_failure(metadata, prefix),
        dead_letter=_dead_letter(metadata, prefix),
        bulk_load=_bulk_load(metadata, prefix),
        bulk_load_chunk=_bulk_load_chunk(metadata, prefix),
        outbox_message=_outbox_message(metadata, prefix),
        outbox_sent=_outbox_sent(metadata, prefix),
        outbox_relay=_outbox_relay(metadata, prefix),
        message_lease=_message_lease(metadata, prefix),
        aggregate_watermark=_aggregate_watermark(metadata, prefix),
        handler_conflict=_handler_conflict(metadata, prefix),
    )


def is_staging(name: str, prefix: str = "") -> bool:
    """Return whether a table's name, without schema, is that of a bulk load's staging table or of its partition."""
    return name.startswith(prefix) and _STAGING_NAME.fullmatch(name, len(prefix)) is not None


def _processed_message(metadata: MetaData, prefix: str) -> Table:
    """The inbox: what each subscriber has already processed, or has parked. Insert-only while all goes well."""
    return Table(
        f"{prefix}processed_message",
        metadata,
        Column("subscriber_id", BYTEWISE, primary_key=True),
        Column("message_id", BYTEWISE, primary_key=True),
        _now("processed_at"),
        Column("fingerprint", LargeBinary, comment="SHA-256 of the body; null where none was asked for"),
        Column("dead_letter_id", BigInteger, comment="the letter that it is parked as; null: it is processed"),
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
        _list("history", "the last attempts that counted, newest first: when, at which delivery, and why"),
        CheckConstraint("attempts > 0", name=f"{prefix}message_failure_attempts_check"),
    )


def _handler_conflict(metadata: MetaData, prefix: str) -> Table:
    """How often handlers' transactions were rolled back because of others, and where they met.

    Written once a minute at most by each worker that has had such conflicts, and never while there are none.
    """
    return Table(
        f"{prefix}handler_conflict",
        metadata,
        Column("subscriber_id", BYTEWISE, primary_key=True),
        Column("sqlstate", Text, primary_key=True),
        Column("place", Text, primary_key=True, comment="the relation, as the server named it; empty if it did not"),
        Column("conflicts", BigInteger, nullable=False),
        _now("first_at"),
        _now("last_at"),
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
        _list("history", "the last attempts that counted, oldest first: when, at which delivery, and why"),
        Column("lease_attempts", Integer, comment="of the message in its ledger when it was parked"),
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


def _bulk_load(metadata: MetaData, prefix: str) -> Table:
    """One bulk load: what it loads and how far it is."""
    return Table(
        f"{prefix}bulk_load",
        metadata,
        Column("run_id", BYTEWISE, primary_key=True),
        Column("subscriber_id", BYTEWISE, nullable=False),
        Column("source", Text, nullable=False, comment="what is loaded, in words"),
        Column("digest", LargeBinary, nullable=False, comment="SHA-256 of what a resumed run must find again"),
        Column("writer", Text, nullable=False),
        Column("chunks", Integer, nullable=False),
        Column("bounds", JSONB, nullable=False, comment="the first message id of each chunk but the first"),
        Column(
            "attempts",
            Integer,
            nullable=False,
            server_default=text("1"),
            comment="how often it was begun; names the staging table",
        ),
        Column("staging_table", Text, comment="the complete staging table, of writer jdbc"),
        Column("rows_read", BigInteger),
        Column("rows_rejected", BigInteger),
        Column("rejected_sample", JSONB),
        Column("error", Text, comment="why the last attempt ended"),
        _now("started_at"),
        _now("heartbeat_at"),
        Column("finished_at", DateTime(timezone=True)),
        Column("content", LargeBinary, comment="digest of the message ids that a resumed run must find again"),
        CheckConstraint("writer IN ('copy', 'jdbc')", name=f"{prefix}bulk_load_writer_check"),
        CheckConstraint("chunks > 0", name=f"{prefix}bulk_load_chunks_check"),
    )


def _bulk_load_chunk(metadata: MetaData, prefix: str) -> Table:
    """The chunks that are done: a row is there if, and only if, the chunk's transaction has committed.

    No foreign key leads to bulk_load: alembic would propose it anew to hosts whose metadata names the default schema.
    """
    return Table(
        f"{prefix}bulk_load_chunk",
        metadata,
        Column("run_id", BYTEWISE, primary_key=True),
        Column("chunk", Integer, primary_key=True, autoincrement=False),
        _count("rows_read"),
        _count("rows_rejected"),
        _count("already_processed"),
        _count("parked", "of those already processed: events that wait as dead letters, and are not processed"),
        _count("applied"),
        Column("rejected_sample", JSONB),
        _now("merged_at"),
    )


def _outbox_message(metadata: MetaData, prefix: str) -> Table:
    """The outbox: what this service still has to send. Published by insert, gone by delete once it was sent.

    Most rows are inserted, read once and deleted; the columns from ``due_at`` on are for the others.
    """
    table = Table(
        f"{prefix}outbox_message",
        metadata,
        Column("lane", BigInteger, primary_key=True, autoincrement=False, comment="made from destination and key"),
        Column("position", BigInteger, Identity(always=True), primary_key=True),
        Column(
            "transaction_id",
            BigInteger,
            nullable=False,
            server_default=text("((pg_current_xact_id())::text)::bigint"),
            comment="whose insert it is; with its epoch, so it never comes again",
        ),
        Column("message_id", BYTEWISE, nullable=False),
        Column("destination", Text, nullable=False),
        Column("key", Text, comment="messages of one key keep their order"),
        Column("headers", JSONB, nullable=False),
        Column("body", LargeBinary, nullable=False),
        _now("published_at"),
        Column("due_at", DateTime(timezone=True), comment="not before; null: at once"),
        Column("attempts", Integer, nullable=False, server_default=text("0")),
        Column("held", Boolean, nullable=False, server_default=text("false"), comment="its key has a failed message"),
        Column("error", Text, comment="of the last attempt"),
        # They are parts of indexes: here, or of the dead letter that a message may become.
        CheckConstraint(
            "octet_length(message_id) <= 1000 AND octet_length(destination) <= 1024 AND octet_length(key) <= 1024",
            name=f"{prefix}outbox_message_names_check",
        ),
    )
    at_once = table.c.due_at.is_(None)
    # What is new since a relay's last look: by who wrote it, not by its position, for transactions commit out of order.
    Index(f"{prefix}outbox_message_by_transaction", table.c.transaction_id, postgresql_where=at_once)
    # The rest is empty while all goes well: messages that are delayed or to be sent again, and keys that are held.
    Index(f"{prefix}outbox_message_due", table.c.due_at, postgresql_where=and_(~at_once, ~table.c.held))
    # The failed message of a held key has a time; those behind it have infinity, and there may be a million of them.
    failed = and_(table.c.held, table.c.due_at < text("'infinity'::timestamptz"))
    Index(f"{prefix}outbox_message_heads", table.c.lane, table.c.due_at, postgresql_where=failed)
    Index(f"{prefix}outbox_message_held", table.c.lane, table.c.key, table.c.position, postgresql_where=table.c.held)
    return table


def _outbox_sent(metadata: MetaData, prefix: str) -> Table:
    """What was sent, where a relay is asked to keep it: for audits, and to send it again."""
    table = Table(
        f"{prefix}outbox_sent",
        metadata,
        Column("message_id", BYTEWISE, primary_key=True),
        Column("position", BigInteger, primary_key=True, autoincrement=False),
        Column("destination", Text, nullable=False),
        Column("key", Text),
        Column("headers", JSONB, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("published_at", DateTime(timezone=True), nullable=False),
        _now("sent_at"),
    )
    Index(f"{prefix}outbox_sent_at", table.c.sent_at)
    return table


def _outbox_relay(metadata: MetaData, prefix: str) -> Table:
    """The relays that are at work, by their own reports. Only the report of the status reads it."""
    return Table(
        f"{prefix}outbox_relay",
        metadata,
        Column("relay_id", BYTEWISE, primary_key=True),
        Column("host", Text, nullable=False),
        Column("pid", Integer, nullable=False, comment="of the process, on its host"),
        _count("sent"),
        _count("failed"),
        Column("sent_per_second", Float, nullable=False, server_default=text("0")),
        _now("started_at"),
        _now("seen_at"),
        Column(
            "outages",
            JSONB,
            nullable=False,
            server_default=text("'{}'::jsonb"),
            comment="destinations that it cannot send to, and why",
        ),
        Column("backend_pid", Integer, comment="the server process of its session; null behind a pooler"),
    )


def _message_lease(metadata: MetaData, prefix: str) -> Table:
    """The leases of messages whose effects no transaction covers: who works on them, and which are completed."""
    return Table(
        f"{prefix}message_lease",
        metadata,
        Column("subscriber_id", BYTEWISE, primary_key=True),
        Column("message_id", BYTEWISE, primary_key=True),
        Column("fence", BigInteger, nullable=False, comment="grows with every acquisition"),
        Column("attempts", Integer, nullable=False, comment="acquisitions"),
        _number("failures", "attempts that were released: known to have failed"),
        _number("unknown_before", "attempts that are out of the count, and whose end nobody knows"),
        Column("owner", Text, nullable=False, comment="of the last attempt: its host and process; for people"),
        Column("fingerprint", LargeBinary, comment="SHA-256 of the payload; null where none was asked for"),
        Column("acquired_at", DateTime(timezone=True), nullable=False),
        Column("expires_at", DateTime(timezone=True), comment="of the lease; null: nobody has it"),
        Column("lease_seconds", Float, comment="how long the lease was asked for, or renewed"),
        Column("completed_at", DateTime(timezone=True)),
        Column("result", LargeBinary, comment="what the handler returned, as it was encoded"),
        CheckConstraint("failures >= 0 AND failures <= attempts", name=f"{prefix}message_lease_attempts_check"),
        CheckConstraint("expires_at IS NULL OR completed_at IS NULL", name=f"{prefix}message_lease_state_check"),
    )


def _aggregate_watermark(metadata: MetaData, prefix: str) -> Table:
    """The watermarks: the highest sequence that each subscriber has seen of each aggregate."""
    return Table(
        f"{prefix}aggregate_watermark",
        metadata,
        Column("subscriber_id", BYTEWISE, primary_key=True),
        Column("aggregate_type", BYTEWISE, primary_key=True),
        Column("aggregate_id", BYTEWISE, primary_key=True),
        Column("sequence", BigInteger, nullable=False),
        Column("sequence_before", BigInteger, comment="before the last advance; null: there was none"),
        _now("advanced_at"),
    )


def _list(name: str, comment: str) -> Column[Any]:
    return Column(name, JSONB, nullable=False, server_default=text("'[]'::jsonb"), comment=comment)


def _number(name: str, comment: str) -> Column[Any]:
    return Column(name, Integer, nullable=False, server_default=text("0"), comment=comment)


def _count(name: str, comment: str | None = None) -> Column[Any]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"), comment=comment)


def _now(name: str) -> Column[Any]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())
