"""The tables of txbox as SQLAlchemy metadata. Migrations and statements follow it.

``tables(schema, prefix)`` returns the tables of one place in one database. The columns of ``processed_message`` are a
contract: Spark jobs, reports and people's own SQL read them.

A bulk load of writer jdbc creates staging tables beside these and drops them again. They are not part of the
metadata; ``is_staging()`` recognises their names.

A rotating inbox (``txbox db rotate-inbox``) is the same table in partitions, its generations. They are not part of
the metadata either; ``is_generation()`` recognises their names. The view ``processed_earlier`` has the ids of all
generations except the current one, so both forms of the inbox use the same statements.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
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
    column,
    event,
    func,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import ExecutableDDLElement, SchemaItem
from sqlalchemy.sql.compiler import DDLCompiler
from sqlalchemy.types import TypeEngine

__all__ = [
    "TABLE_NAMES",
    "VIEW_NAME",
    "CreateEarlier",
    "DropEarlier",
    "Tables",
    "is_generation",
    "is_staging",
    "tables",
]

VIEW_NAME: Final = "processed_earlier"
"""The only view of txbox, without the prefix."""

PREFIX_BYTES: Final = 33
"""The longest prefix: names in Postgres have at most 63 bytes, and our longest name has 30."""

BYTEWISE = Text(collation="C")
"""Ids are compared byte by byte: this is fastest, and it is Python's order, in which inserts are sorted."""

# The run, the attempt and, for a partition, the chunk.
_STAGING_NAME: Final = re.compile(r"bulk_load_staging_[0-9a-f]{12}_[0-9]+(?:_[0-9]+)?")

_GENERATION_NAME: Final = re.compile(r"processed_message_g[0-9]+")


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
    inbox_horizon: Table
    inbox_generation: Table
    maintenance: Table
    dead_letter_operation: Table
    dead_letter_selection: Table
    worker_report: Table
    paused: Table
    reported_activity: Table
    operator_action: Table
    archive: Table
    kept_response: Table
    inbox_lane: Table
    subscription: Table
    processed_earlier: Table


@lru_cache(maxsize=64)
def tables(schema: str | None = None, prefix: str = "") -> Tables:
    """Return the tables of txbox; the same object for the same arguments.

    Args:
        schema: the Postgres schema that holds them; None leaves it to the connection's search path.
        prefix: put before every table, index and constraint name.
    """
    metadata = MetaData(schema=schema)
    made = {name: _made(f"{prefix}{name}", metadata, prefix, items()) for name, items in _DECLARED.items()}
    return Tables(metadata, processed_earlier=_processed_earlier(made["processed_message"], prefix), **made)


def _made(name: str, metadata: MetaData, prefix: str, items: list[SchemaItem]) -> Table:
    for item in items:
        if isinstance(item, CheckConstraint | Index):
            item.name = f"{prefix}{item.name}"
    return Table(name, metadata, *items)


def prefix_problem(prefix: str) -> str | None:
    """Return what is wrong with a prefix that is too long; None if nothing is."""
    if (count := len(prefix.encode())) <= PREFIX_BYTES:
        return None
    return f"the prefix {prefix!r} has {count} bytes, and {PREFIX_BYTES} are the most: a name in Postgres has 63"


def is_staging(name: str, prefix: str = "") -> bool:
    """Return whether a table's name, without schema, is that of a bulk load's staging table or of its partition."""
    return name.startswith(prefix) and _STAGING_NAME.fullmatch(name, len(prefix)) is not None


def is_generation(name: str, prefix: str = "") -> bool:
    """Return whether a table's name, without schema, is that of a generation of a rotating inbox."""
    return name.startswith(prefix) and _GENERATION_NAME.fullmatch(name, len(prefix)) is not None


class CreateEarlier(ExecutableDDLElement):
    """Create the view ``processed_earlier`` of an inbox that is one table. It is empty, and the planner knows it."""

    def __init__(self, view: Table, inbox: Table) -> None:
        self.view, self.inbox = view, inbox


class DropEarlier(ExecutableDDLElement):
    """Drop the view ``processed_earlier``."""

    def __init__(self, view: Table) -> None:
        self.view = view


@compiles(CreateEarlier)
def _create_earlier(create: CreateEarlier, compiler: DDLCompiler, **_: Any) -> str:
    named = compiler.preparer.format_table
    names = named(create.view), named(create.inbox)
    return "CREATE VIEW {} AS SELECT subscriber_id, message_id FROM {} WHERE false".format(*names)  # noqa: S608 - quoted


@compiles(DropEarlier)
def _drop_earlier(drop: DropEarlier, compiler: DDLCompiler, **_: Any) -> str:
    return f"DROP VIEW IF EXISTS {compiler.preparer.format_table(drop.view)}"


def _processed_earlier(inbox: Table, prefix: str) -> Table:
    """Return the view of the older generations' ids. It comes and goes with the inbox, outside the metadata."""
    view = Table(
        f"{prefix}{VIEW_NAME}",
        MetaData(schema=inbox.schema),
        Column("subscriber_id", BYTEWISE),
        Column("message_id", BYTEWISE),
    )
    event.listen(inbox, "after_create", CreateEarlier(view, inbox))
    event.listen(inbox, "before_drop", DropEarlier(view))
    return view


_Declaration = Callable[[], list[SchemaItem]]

_DECLARED: Final[dict[str, _Declaration]] = {}


def _table(declaration: _Declaration) -> _Declaration:
    """Register a function whose columns, constraints and indexes ``tables()`` makes into a table."""
    _DECLARED[declaration.__name__.removeprefix("_")] = declaration
    return declaration


@_table
def _processed_message() -> list[SchemaItem]:
    """The inbox: what each subscriber has processed or parked. Insert-only while all goes well."""
    return [
        _id("subscriber_id"),
        _id("message_id"),
        _now("processed_at"),
        Column("fingerprint", LargeBinary, comment="SHA-256 of the body; null where none was asked for"),
        Column("dead_letter_id", BigInteger, comment="the letter that it is parked as; null: it is processed"),
    ]


@_table
def _message_failure() -> list[SchemaItem]:
    """Messages that failed and will be tried again, with the number of attempts so far.

    Written in separate transactions, so that rolling back the handler does not roll back the count.
    """
    return [
        _id("subscriber_id"),
        _id("message_id"),
        Column("attempts", Integer, nullable=False),
        Column("error", Text, nullable=False),
        _now("first_failed_at"),
        _now("last_failed_at"),
        _json("history", "the last attempts that counted, newest first: when, at which delivery, and why", "[]"),
        CheckConstraint("attempts > 0", name="message_failure_attempts_check"),
    ]


@_table
def _dead_letter() -> list[SchemaItem]:
    """Messages parked after their last attempt, with everything needed to send them through again."""
    not_discarded = column("discarded_at", DateTime).is_(None)
    waiting = and_(column("redriven_at", DateTime).is_(None), not_discarded)
    has_place = column("order_position", BigInteger).is_not(None)
    line = ("subscriber_id", "order_key", "order_position")
    return [
        Column("dead_letter_id", BigInteger, Identity(always=True), primary_key=True),
        Column("subscriber_id", BYTEWISE, nullable=False),
        Column("message_id", BYTEWISE, nullable=False),
        Column("reason", Text, nullable=False),
        Column("error", Text, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("source", Text, nullable=False),
        Column("body", LargeBinary, nullable=False, comment="as the broker delivered it"),
        Column("body_hash", LargeBinary, nullable=False, comment="SHA-256 of body"),
        Column("headers", _jsonb(), nullable=False),
        Column("envelope", _jsonb(), nullable=False, comment="what the broker needs to send it again"),
        _now("parked_at"),
        _time("redriven_at"),
        _json("history", "the last attempts that counted, oldest first: when, at which delivery, and why", "[]"),
        Column("lease_attempts", Integer, comment="of the message in its ledger when it was parked"),
        Column("order_key", BYTEWISE, comment="the FIFO group, or the key, whose order the letter keeps"),
        Column("order_position", BigInteger, comment="its place among the letters of its key; null: it holds nothing"),
        Column("redriven_by", Text, comment="who sent it through again; for people"),
        _time("discarded_at", "when a person gave it up"),
        Column("discarded_by", Text, comment="who did; for people"),
        Column("note", Text, comment="why"),
        CheckConstraint(
            "reason IN ('failed', 'mismatch', 'malformed', 'crashed', 'expired', 'behind')",
            name="dead_letter_reason_check",
        ),
        # A worker may die between parking and ack; the next delivery parks the letter again, and finds it here.
        _index("dead_letter_parked_once", "subscriber_id", "message_id", "body_hash", where=waiting, unique=True),
        _index("dead_letter_by_message", "subscriber_id", "message_id"),
        _index("dead_letter_in_order", *line, where=and_(has_place, not_discarded)),
        # Which letters wait: a redrive asks this for each letter, while those before it are on their way.
        _index("dead_letter_in_line", *line, where=and_(has_place, waiting)),
    ]


@_table
def _bulk_load() -> list[SchemaItem]:
    """Bulk loads: what each loads, and how far it is."""
    return [
        _id("run_id"),
        Column("subscriber_id", BYTEWISE, nullable=False),
        Column("source", Text, nullable=False, comment="what is loaded, in words"),
        Column("digest", LargeBinary, nullable=False, comment="SHA-256 of what a resumed run must find again"),
        Column("writer", Text, nullable=False),
        Column("chunks", Integer, nullable=False),
        Column("bounds", _jsonb(), nullable=False, comment="the first message id of each chunk but the first"),
        _number("attempts", "how often it was begun; names the staging table", default=1),
        Column("staging_table", Text, comment="the complete staging table, of writer jdbc"),
        Column("rows_read", BigInteger),
        Column("rows_rejected", BigInteger),
        Column("rejected_sample", _jsonb()),
        Column("error", Text, comment="why the last attempt ended"),
        _now("started_at"),
        _now("heartbeat_at"),
        _time("finished_at"),
        Column("content", LargeBinary, comment="digest of the message ids that a resumed run must find again"),
        CheckConstraint("writer IN ('copy', 'jdbc')", name="bulk_load_writer_check"),
        CheckConstraint("chunks > 0", name="bulk_load_chunks_check"),
    ]


@_table
def _bulk_load_chunk() -> list[SchemaItem]:
    """The chunks that are done: a row exists if, and only if, the chunk's transaction has committed.

    There is no foreign key to bulk_load: alembic would propose it again to hosts whose metadata names the default
    schema.
    """
    return [
        _id("run_id"),
        Column("chunk", Integer, primary_key=True, autoincrement=False),
        _count("rows_read"),
        _count("rows_rejected"),
        _count("already_processed"),
        _count("parked", "of those already processed: events that wait as dead letters, and are not processed"),
        _count("applied"),
        Column("rejected_sample", _jsonb()),
        _now("merged_at"),
        _count("expired", "events behind the horizon: not applied, and not parked"),
    ]


@_table
def _outbox_message() -> list[SchemaItem]:
    """The outbox: what this service still has to send. Publishing inserts a row; sending deletes it.

    Most rows are inserted, read once and deleted; the columns from ``due_at`` on are for the others.
    """
    due_at, held = column("due_at", DateTime), column("held", Boolean)
    at_once = due_at.is_(None)
    # The failed message of a held key has a time; those behind it have infinity, and there may be a million of them.
    failed = and_(held, due_at < text("'infinity'::timestamptz"))
    return [
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
        Column("headers", _jsonb(), nullable=False),
        Column("body", LargeBinary, nullable=False),
        _now("published_at"),
        _time("due_at", "not before; null: at once"),
        _number("attempts"),
        Column("held", Boolean, nullable=False, server_default=text("false"), comment="its key has a failed message"),
        Column("error", Text, comment="of the last attempt"),
        # They are parts of indexes: here, or of the dead letter that a message may become.
        CheckConstraint(
            "octet_length(message_id) <= 1000 AND octet_length(destination) <= 1024 AND octet_length(key) <= 1024",
            name="outbox_message_names_check",
        ),
        # What is new since a relay's last look: by transaction, not by position, as transactions commit out of order.
        _index("outbox_message_by_transaction", "transaction_id", where=at_once),
        # These are empty while all goes well: messages that are delayed or sent again, and keys that are held.
        _index("outbox_message_due", "due_at", where=and_(~at_once, ~held)),
        _index("outbox_message_heads", "lane", "due_at", where=failed),
        _index("outbox_message_held", "lane", "key", "position", where=held),
    ]


@_table
def _outbox_sent() -> list[SchemaItem]:
    """What was sent, if a relay keeps it: for audits, and to send it again."""
    return [
        _id("message_id"),
        Column("position", BigInteger, primary_key=True, autoincrement=False),
        Column("destination", Text, nullable=False),
        Column("key", Text),
        Column("headers", _jsonb(), nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("published_at", DateTime(timezone=True), nullable=False),
        _now("sent_at"),
        _index("outbox_sent_at", "sent_at"),
    ]


@_table
def _outbox_relay() -> list[SchemaItem]:
    """The relays at work, by their own reports. Only the status report reads it."""
    return [
        _id("relay_id"),
        Column("host", Text, nullable=False),
        Column("pid", Integer, nullable=False, comment="of the process, on its host"),
        _count("sent"),
        _count("failed"),
        Column("sent_per_second", Float, nullable=False, server_default=text("0")),
        _now("started_at"),
        _now("seen_at"),
        _json("outages", "destinations that it cannot send to, and why"),
        Column("backend_pid", Integer, comment="the server process of its session; null behind a pooler"),
        Column("version", Text, comment="of txbox"),
        Column("state", Text, comment="working, paused or drained"),
        _json("destinations", "where it has sent to, the last ones, and how many messages"),
    ]


@_table
def _message_lease() -> list[SchemaItem]:
    """The leases of messages whose effects no transaction covers: who works on them, and which are completed."""
    return [
        _id("subscriber_id"),
        _id("message_id"),
        Column("fence", BigInteger, nullable=False, comment="grows with every acquisition"),
        Column("attempts", Integer, nullable=False, comment="acquisitions"),
        _number("failures", "attempts that were released: known to have failed"),
        _number("unknown_before", "attempts that are out of the count, and whose end nobody knows"),
        Column("owner", Text, nullable=False, comment="of the last attempt: its host and process; for people"),
        Column("fingerprint", LargeBinary, comment="SHA-256 of the payload; null where none was asked for"),
        Column("acquired_at", DateTime(timezone=True), nullable=False),
        _time("expires_at", "of the lease; null: nobody has it"),
        Column("lease_seconds", Float, comment="how long the lease was asked for, or renewed"),
        _time("completed_at"),
        Column("result", LargeBinary, comment="what the handler returned, as it was encoded"),
        CheckConstraint("failures >= 0 AND failures <= attempts", name="message_lease_attempts_check"),
        CheckConstraint("expires_at IS NULL OR completed_at IS NULL", name="message_lease_state_check"),
    ]


@_table
def _aggregate_watermark() -> list[SchemaItem]:
    """The watermarks: the highest sequence that each subscriber has applied of each aggregate."""
    return [
        _id("subscriber_id"),
        _id("aggregate_type"),
        _id("aggregate_id"),
        Column("sequence", BigInteger, nullable=False),
        Column("sequence_before", BigInteger, comment="before the last advance; null: there was none"),
        _now("advanced_at"),
    ]


@_table
def _handler_conflict() -> list[SchemaItem]:
    """How often handlers' transactions were rolled back because of others, and on which relation they conflicted.

    A worker with such conflicts writes at most once a minute; without conflicts nothing is written.
    """
    return [
        _id("subscriber_id"),
        Column("sqlstate", Text, primary_key=True),
        Column("relation", Text, primary_key=True, comment="the relation, as the server named it; empty if it did not"),
        Column("conflicts", BigInteger, nullable=False),
        _now("first_at"),
        _now("last_at"),
    ]


@_table
def _inbox_horizon() -> list[SchemaItem]:
    """The horizon of each subscriber that forgets. It only moves forward, and it moves before anything is deleted."""
    comment = "messages that were sent before it are not run any more"
    return [
        _id("subscriber_id"),
        Column("horizon", DateTime(timezone=True), nullable=False, comment=comment),
        _now("moved_at"),
    ]


@_table
def _inbox_generation() -> list[SchemaItem]:
    """The generations of a rotating inbox; empty where the inbox is one table."""
    return [
        Column("generation", Integer, primary_key=True, autoincrement=False),
        _now("opened_at"),
        _time("closed_at", "nothing was recorded in it since; null: it takes what is recorded"),
    ]


@_table
def _maintenance() -> list[SchemaItem]:
    """What maintainers have done, one row for each task, and which maintainer may work on it."""
    return [
        _id("task"),
        Column("owner", Text, comment="the maintainer that works on it, or did so last; for people"),
        _time("expires_at", "until when no other maintainer may work"),
        _time("started_at"),
        _time("finished_at"),
        _count("removed", "rows, in all"),
        _json("detail"),
    ]


@_table
def _dead_letter_operation() -> list[SchemaItem]:
    """Redrives and discards of many letters: who asked for what."""
    return [
        Column("operation_id", BigInteger, Identity(always=True), primary_key=True),
        Column("kind", Text, nullable=False),
        Column("filter", _jsonb(), nullable=False, comment="by which the letters were selected"),
        _json("options"),
        Column("note", Text),
        Column("requested_by", Text, nullable=False),
        _now("requested_at"),
        _time("finished_at"),
        CheckConstraint("kind IN ('redrive', 'discard')", name="dead_letter_operation_check"),
    ]


@_table
def _dead_letter_selection() -> list[SchemaItem]:
    """The letters that an operation selected, and the outcome of each."""
    return [
        Column("operation_id", BigInteger, primary_key=True, autoincrement=False),
        Column("dead_letter_id", BigInteger, primary_key=True, autoincrement=False),
        Column("outcome", Text, comment="null: not done yet"),
        Column("error", Text),
        _time("done_at"),
    ]


@_table
def _worker_report() -> list[SchemaItem]:
    """The workers at work, by their own reports."""
    return [
        _id("worker_id"),
        Column("subscriber_id", BYTEWISE, nullable=False),
        Column("source", Text, nullable=False),
        Column("source_retention_seconds", Float, comment="how long the source keeps a message"),
        Column("host", Text, nullable=False),
        Column("pid", Integer, nullable=False, comment="of the process, on its host"),
        Column("version", Text, nullable=False, comment="of txbox"),
        Column("state", Text, nullable=False, comment="working, paused or drained"),
        _json("outcomes", "messages by outcome"),
        _json("per_second", "messages by outcome, between its last two reports"),
        _count("deadlocks"),
        _count("retries"),
        _now("started_at"),
        _now("seen_at"),
        _time("last_batch_at"),
        _time("oldest_sent_at", "when the oldest message of its last batch was sent"),
    ]


@_table
def _paused() -> list[SchemaItem]:
    """The subscribers and destinations that are paused."""
    return [
        _id("kind"),
        _id("name"),
        Column("paused_by", Text, nullable=False),
        Column("note", Text),
        _now("paused_at"),
        CheckConstraint("kind IN ('subscriber', 'destination')", name="paused_kind_check"),
    ]


@_table
def _reported_activity() -> list[SchemaItem]:
    """What workers and relays did in each minute, for people: sums of their reports."""
    return [
        _id("kind"),
        Column("name", BYTEWISE, primary_key=True, comment="of the subscriber or destination; of an outbox, empty"),
        Column("minute", DateTime(timezone=True), primary_key=True),
        Column("figure", BYTEWISE, primary_key=True, comment="what is counted, such as an outcome"),
        _count("count"),
        CheckConstraint("kind IN ('subscriber', 'destination', 'outbox')", name="reported_activity_kind_check"),
    ]


@_table
def _operator_action() -> list[SchemaItem]:
    """What people have done from the dashboard: who, when, to what."""
    return [
        Column("action_id", BigInteger, Identity(always=True), primary_key=True),
        _now("acted_at"),
        Column("actor", Text, nullable=False),
        Column("action", Text, nullable=False),
        Column("target", Text, nullable=False),
        _json("detail"),
    ]


@_table
def _archive() -> list[SchemaItem]:
    """The archives that this database is moved to, and how far each is. What an archive lacks is not forgotten."""
    return [
        _id("location"),
        Column("archive_id", Text, nullable=False, comment="is in the folder, too: another one is not taken for it"),
        _time("archived_upto", "what was sent or processed before it is there; null: nothing is"),
        Column("pending", _jsonb(), comment="days that are written, and are being put in place"),
        _now("begun_at"),
        _time("archived_at", "when it got on last"),
    ]


@_table
def _kept_response() -> list[SchemaItem]:
    """The responses to HTTP requests, for repeats. Each is written in the transaction that recorded its request."""
    kept_at = _now("kept_at")
    kept_at.comment = "its row in the inbox has the same time"
    return [
        _id("subscriber_id"),
        _id("message_id"),
        kept_at,
        Column("fingerprint", LargeBinary, nullable=False, comment="SHA-256 of the request"),
        Column("status", Integer, nullable=False),
        Column("headers", _jsonb(), nullable=False, comment="names and values, in order"),
        Column("body", LargeBinary, nullable=False),
    ]


@_table
def _inbox_lane() -> list[SchemaItem]:
    """How far the lanes of ``inbox:`` destinations were begun.

    What is left there after a crash may have caused it.
    """
    return [
        Column("lane", BigInteger, primary_key=True, autoincrement=False),
        Column("begun_to", BigInteger, nullable=False, comment="the highest position that a worker may have begun"),
    ]


@_table
def _subscription() -> list[SchemaItem]:
    """Who gets the messages of a topic: each subscriber gets its own row of ``outbox_message``."""
    return [
        _id("topic"),
        _id("subscriber_id"),
        Column("first_lane", BigInteger, nullable=False, comment="of the subscriber's destination"),
        _now("added_at"),
    ]


def _id(name: str) -> Column[Any]:
    return Column(name, BYTEWISE, primary_key=True)


def _jsonb() -> TypeEngine[Any]:
    from sqlalchemy.dialects.postgresql import JSONB  # imported late: it loads the dialects of all drivers

    return JSONB()


def _json(name: str, comment: str | None = None, default: str = "{}") -> Column[Any]:
    return Column(name, _jsonb(), nullable=False, server_default=text(f"'{default}'::jsonb"), comment=comment)


def _number(name: str, comment: str | None = None, default: int = 0) -> Column[Any]:
    return Column(name, Integer, nullable=False, server_default=text(str(default)), comment=comment)


def _count(name: str, comment: str | None = None) -> Column[Any]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"), comment=comment)


def _time(name: str, comment: str | None = None) -> Column[Any]:
    return Column(name, DateTime(timezone=True), comment=comment)


def _now(name: str) -> Column[Any]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


def _index(name: str, *columns: str, where: ColumnElement[bool] | None = None, unique: bool = False) -> Index:
    return Index(name, *columns, unique=unique, postgresql_where=where)


TABLE_NAMES: Final = tuple(_DECLARED)
"""Every table of txbox, without the prefix."""
