"""Step 10, the baseline: creates every table at once, as steps 1 to 10 before the first release did."""

from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy import BigInteger, CheckConstraint, Column, Float, Identity, Integer, LargeBinary, Text
from sqlalchemy.dialects.postgresql import JSONB

revision = "10"
down_revision = None

BYTEWISE = Text(collation="C")
MOMENT = sa.DateTime(timezone=True)


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Create all tables, and the view of the ids of older generations, which is empty."""
    for name, items in _tables().items():
        key = [item.name for item in items if isinstance(item, Column) and item.primary_key]
        for item in items:
            if isinstance(item, CheckConstraint):
                item.name = op.f(f"{prefix}{item.name}")
        primary_key = sa.PrimaryKeyConstraint(*key, name=op.f(f"{prefix}{name}_pkey"))
        op.create_table(f"{prefix}{name}", *items, primary_key, schema=schema)
    for name, table, columns, where in _INDEXES:
        op.create_index(
            op.f(f"{prefix}{table}_{name}"),
            f"{prefix}{table}",
            columns,
            unique=name == "parked_once",
            schema=schema,
            postgresql_where=where and sa.text(where),
        )
    view, inbox = (_name(schema, prefix, name) for name in ("processed_earlier", "processed_message"))
    _run(op, f"CREATE VIEW {view} AS SELECT subscriber_id, message_id FROM {inbox} WHERE false")  # noqa: S608 - quoted


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Drop all tables, and with them what was processed, what is parked, and what is not sent yet.

    Staging tables go too: without the ledger of bulk loads, nothing would tell which of them is complete, or remove
    them.
    """
    _run(op, _drop_staging_tables(schema, prefix))
    _run(op, f"DROP VIEW {_name(schema, prefix, 'processed_earlier')}")
    for name in reversed(_tables()):
        op.drop_table(f"{prefix}{name}", schema=schema)


def _id(name: str, comment: str | None = None) -> Column[Any]:
    return Column(name, BYTEWISE, primary_key=True, comment=comment)


def _null(name: str, type_: Any, comment: str | None = None) -> Column[Any]:
    return Column(name, type_, comment=comment)


def _text(name: str, comment: str | None = None) -> Column[Any]:
    return Column(name, Text, nullable=False, comment=comment)


def _bytes(name: str, comment: str | None = None) -> Column[Any]:
    return Column(name, LargeBinary, nullable=False, comment=comment)


def _json(name: str, comment: str | None = None, default: str | None = "{}") -> Column[Any]:
    value = None if default is None else sa.text(f"'{default}'::jsonb")
    return Column(name, JSONB, nullable=False, server_default=value, comment=comment)


def _number(name: str, comment: str | None = None, default: int = 0) -> Column[Any]:
    return Column(name, Integer, nullable=False, server_default=sa.text(str(default)), comment=comment)


def _count(name: str, comment: str | None = None) -> Column[Any]:
    return Column(name, BigInteger, nullable=False, server_default=sa.text("0"), comment=comment)


def _now(name: str, comment: str | None = None) -> Column[Any]:
    return Column(name, MOMENT, nullable=False, server_default=sa.func.now(), comment=comment)


def _tables() -> dict[str, list[Column[Any] | CheckConstraint]]:
    return {
        "processed_message": [
            _id("subscriber_id"),
            _id("message_id"),
            _now("processed_at"),
            _null("fingerprint", LargeBinary, "SHA-256 of the body; null where none was asked for"),
            _null("dead_letter_id", BigInteger, "the letter that it is parked as; null: it is processed"),
        ],
        "message_failure": [
            _id("subscriber_id"),
            _id("message_id"),
            Column("attempts", Integer, nullable=False),
            _text("error"),
            _now("first_failed_at"),
            _now("last_failed_at"),
            _json("history", "the last attempts that counted, newest first: when, at which delivery, and why", "[]"),
            CheckConstraint("attempts > 0", name="message_failure_attempts_check"),
        ],
        "dead_letter": [
            Column("dead_letter_id", BigInteger, Identity(always=True), primary_key=True),
            Column("subscriber_id", BYTEWISE, nullable=False),
            Column("message_id", BYTEWISE, nullable=False),
            _text("reason"),
            _text("error"),
            Column("attempts", Integer, nullable=False),
            _text("source"),
            _bytes("body", "as the broker delivered it"),
            _bytes("body_hash", "SHA-256 of body"),
            _json("headers", default=None),
            _json("envelope", "what the broker needs to send it again", default=None),
            _now("parked_at"),
            _null("redriven_at", MOMENT),
            _json("history", "the last attempts that counted, oldest first: when, at which delivery, and why", "[]"),
            _null("lease_attempts", Integer, "of the message in its ledger when it was parked"),
            _null("order_key", BYTEWISE, "the FIFO group, or the key, whose order the letter keeps"),
            _null("order_position", BigInteger, "its place among the letters of its key; null: it holds nothing"),
            _null("redriven_by", Text, "who sent it through again; for people"),
            _null("discarded_at", MOMENT, "when a person gave it up"),
            _null("discarded_by", Text, "who did; for people"),
            _null("note", Text, "why"),
            CheckConstraint(
                "reason IN ('failed', 'mismatch', 'malformed', 'crashed', 'expired', 'behind')",
                name="dead_letter_reason_check",
            ),
        ],
        "bulk_load": [
            _id("run_id"),
            Column("subscriber_id", BYTEWISE, nullable=False),
            _text("source", "what is loaded, in words"),
            _bytes("digest", "SHA-256 of what a resumed run must find again"),
            _text("writer"),
            Column("chunks", Integer, nullable=False),
            _json("bounds", "the first message id of each chunk but the first", default=None),
            _number("attempts", "how often it was begun; names the staging table", default=1),
            _null("staging_table", Text, "the complete staging table, of writer jdbc"),
            _null("rows_read", BigInteger),
            _null("rows_rejected", BigInteger),
            _null("rejected_sample", JSONB),
            _null("error", Text, "why the last attempt ended"),
            _now("started_at"),
            _now("heartbeat_at"),
            _null("finished_at", MOMENT),
            _null("content", LargeBinary, "digest of the message ids that a resumed run must find again"),
            CheckConstraint("writer IN ('copy', 'jdbc')", name="bulk_load_writer_check"),
            CheckConstraint("chunks > 0", name="bulk_load_chunks_check"),
        ],
        "bulk_load_chunk": [
            _id("run_id"),
            Column("chunk", Integer, primary_key=True, autoincrement=False),
            _count("rows_read"),
            _count("rows_rejected"),
            _count("already_processed"),
            _count("applied"),
            _null("rejected_sample", JSONB),
            _now("merged_at"),
            _count("parked", "of those already processed: events that wait as dead letters, and are not processed"),
            _count("expired", "events behind the horizon: not applied, and not parked"),
        ],
        "outbox_message": [
            Column("lane", BigInteger, primary_key=True, autoincrement=False, comment="made from destination and key"),
            Column("position", BigInteger, Identity(always=True), primary_key=True),
            Column(
                "transaction_id",
                BigInteger,
                server_default=sa.text("((pg_current_xact_id())::text)::bigint"),
                nullable=False,
                comment="whose insert it is; with its epoch, so it never comes again",
            ),
            Column("message_id", BYTEWISE, nullable=False),
            _text("destination"),
            _null("key", Text, "messages of one key keep their order"),
            _json("headers", default=None),
            _bytes("body"),
            _now("published_at"),
            _null("due_at", MOMENT, "not before; null: at once"),
            _number("attempts"),
            Column(
                "held",
                sa.Boolean,
                server_default=sa.text("false"),
                nullable=False,
                comment="its key has a failed message",
            ),
            _null("error", Text, "of the last attempt"),
            CheckConstraint(
                "octet_length(message_id) <= 1000 AND octet_length(destination) <= 1024 AND octet_length(key) <= 1024",
                name="outbox_message_names_check",
            ),
        ],
        "outbox_sent": [
            _id("message_id"),
            Column("position", BigInteger, primary_key=True, autoincrement=False),
            _text("destination"),
            _null("key", Text),
            _json("headers", default=None),
            _bytes("body"),
            Column("published_at", MOMENT, nullable=False),
            _now("sent_at"),
        ],
        "outbox_relay": [
            _id("relay_id"),
            _text("host"),
            Column("pid", Integer, nullable=False, comment="of the process, on its host"),
            _count("sent"),
            _count("failed"),
            Column("sent_per_second", Float, server_default=sa.text("0"), nullable=False),
            _now("started_at"),
            _now("seen_at"),
            _json("outages", "destinations that it cannot send to, and why"),
            _null("backend_pid", Integer, "the server process of its session; null behind a pooler"),
            _null("version", Text, "of txbox"),
            _null("state", Text, "working, paused or drained"),
            _json("destinations", "where it has sent to, the last ones, and how many messages"),
        ],
        "message_lease": [
            _id("subscriber_id"),
            _id("message_id"),
            Column("fence", BigInteger, nullable=False, comment="grows with every acquisition"),
            Column("attempts", Integer, nullable=False, comment="acquisitions"),
            _number("failures", "attempts that were released: known to have failed"),
            _number("unknown_before", "attempts that are out of the count, and whose end nobody knows"),
            _text("owner", "of the last attempt: its host and process; for people"),
            _null("fingerprint", LargeBinary, "SHA-256 of the payload; null where none was asked for"),
            Column("acquired_at", MOMENT, nullable=False),
            _null("expires_at", MOMENT, "of the lease; null: nobody has it"),
            _null("completed_at", MOMENT),
            _null("result", LargeBinary, "what the handler returned, as it was encoded"),
            _null("lease_seconds", Float, "how long the lease was asked for, or renewed"),
            CheckConstraint("failures >= 0 AND failures <= attempts", name="message_lease_attempts_check"),
            CheckConstraint("expires_at IS NULL OR completed_at IS NULL", name="message_lease_state_check"),
        ],
        "aggregate_watermark": [
            _id("subscriber_id"),
            _id("aggregate_type"),
            _id("aggregate_id"),
            Column("sequence", BigInteger, nullable=False),
            _null("sequence_before", BigInteger, "before the last advance; null: there was none"),
            _now("advanced_at"),
        ],
        "handler_conflict": [
            _id("subscriber_id"),
            Column("sqlstate", Text, primary_key=True),
            Column(
                "relation", Text, primary_key=True, comment="the relation, as the server named it; empty if it did not"
            ),
            Column("conflicts", BigInteger, nullable=False),
            _now("first_at"),
            _now("last_at"),
        ],
        "inbox_horizon": [
            _id("subscriber_id"),
            Column("horizon", MOMENT, nullable=False, comment="messages that were sent before it are not run any more"),
            _now("moved_at"),
        ],
        "inbox_generation": [
            Column("generation", Integer, primary_key=True, autoincrement=False),
            _now("opened_at"),
            _null("closed_at", MOMENT, "nothing was recorded in it since; null: it takes what is recorded"),
        ],
        "maintenance": [
            _id("task"),
            _null("owner", Text, "the maintainer that works on it, or did so last; for people"),
            _null("expires_at", MOMENT, "until when no other maintainer may work"),
            _null("started_at", MOMENT),
            _null("finished_at", MOMENT),
            _count("removed", "rows, in all"),
            _json("detail"),
        ],
        "dead_letter_operation": [
            Column("operation_id", BigInteger, Identity(always=True), primary_key=True),
            _text("kind"),
            _json("filter", "by which the letters were selected", default=None),
            _json("options"),
            _null("note", Text),
            _text("requested_by"),
            _now("requested_at"),
            _null("finished_at", MOMENT),
            CheckConstraint("kind IN ('redrive', 'discard')", name="dead_letter_operation_check"),
        ],
        "dead_letter_selection": [
            Column("operation_id", BigInteger, primary_key=True, autoincrement=False),
            Column("dead_letter_id", BigInteger, primary_key=True, autoincrement=False),
            _null("outcome", Text, "null: not done yet"),
            _null("error", Text),
            _null("done_at", MOMENT),
        ],
        "worker_report": [
            _id("worker_id"),
            Column("subscriber_id", BYTEWISE, nullable=False),
            _text("source"),
            _null("source_retention_seconds", Float, "how long the source keeps a message"),
            _text("host"),
            Column("pid", Integer, nullable=False, comment="of the process, on its host"),
            _text("version", "of txbox"),
            _text("state", "working, paused or drained"),
            _json("outcomes", "messages by outcome"),
            _json("per_second", "messages by outcome, between its last two reports"),
            _count("deadlocks"),
            _count("retries"),
            _now("started_at"),
            _now("seen_at"),
            _null("last_batch_at", MOMENT),
            _null("oldest_sent_at", MOMENT, "when the oldest message of its last batch was sent"),
        ],
        "paused": [
            _id("kind"),
            _id("name"),
            _text("paused_by"),
            _null("note", Text),
            _now("paused_at"),
            CheckConstraint("kind IN ('subscriber', 'destination')", name="paused_kind_check"),
        ],
        "reported_activity": [
            _id("kind"),
            _id("name", "of the subscriber or destination; of an outbox, empty"),
            Column("minute", MOMENT, primary_key=True),
            _id("figure", "what is counted, such as an outcome"),
            _count("count"),
            CheckConstraint("kind IN ('subscriber', 'destination', 'outbox')", name="reported_activity_kind_check"),
        ],
        "operator_action": [
            Column("action_id", BigInteger, Identity(always=True), primary_key=True),
            _now("acted_at"),
            _text("actor"),
            _text("action"),
            _text("target"),
            _json("detail"),
        ],
        "archive": [
            _id("location"),
            _text("archive_id", "is in the folder, too: another one is not taken for it"),
            _null("archived_upto", MOMENT, "what was sent or processed before it is there; null: nothing is"),
            _null("pending", JSONB, "days that are written, and are being put in place"),
            _now("begun_at"),
            _null("archived_at", MOMENT, "when it got on last"),
        ],
        "kept_response": [
            _id("subscriber_id"),
            _id("message_id"),
            _now("kept_at", "its row in the inbox has the same time"),
            _bytes("fingerprint", "SHA-256 of the request"),
            Column("status", Integer, nullable=False),
            _json("headers", "names and values, in order", default=None),
            _bytes("body"),
        ],
    }


_WAITS = "redriven_at IS NULL AND discarded_at IS NULL"
_LINE = ["subscriber_id", "order_key", "order_position"]

_INDEXES = (
    ("parked_once", "dead_letter", ["subscriber_id", "message_id", "body_hash"], _WAITS),
    ("by_message", "dead_letter", ["subscriber_id", "message_id"], None),
    ("in_order", "dead_letter", _LINE, "order_position IS NOT NULL AND discarded_at IS NULL"),
    ("in_line", "dead_letter", _LINE, f"order_position IS NOT NULL AND {_WAITS}"),
    ("by_transaction", "outbox_message", ["transaction_id"], "due_at IS NULL"),
    ("due", "outbox_message", ["due_at"], "due_at IS NOT NULL AND NOT held"),
    ("heads", "outbox_message", ["lane", "due_at"], "held AND due_at < 'infinity'::timestamptz"),
    ("held", "outbox_message", ["lane", "key", "position"], "held"),
    ("at", "outbox_sent", ["sent_at"], None),
)
"""Name, table, columns and predicate of each index."""


def _drop_staging_tables(schema: str | None, prefix: str) -> str:
    """Return a statement that drops every staging table beside the ledger; Postgres lists them, in offline runs too.

    Partitions go with their table. The statement has no percent sign, which some offline dialects would double.
    """
    start = f"{prefix}bulk_load_staging_"
    block = f"""
DECLARE
    staging regclass;
BEGIN
    FOR staging IN
        SELECT s.oid
        FROM pg_catalog.pg_class AS s
        JOIN pg_catalog.pg_class AS l ON l.relnamespace = s.relnamespace
        WHERE l.oid = pg_catalog.to_regclass({_literal(_name(schema, prefix, "bulk_load"))})
          AND s.relkind IN ('r', 'p') AND NOT s.relispartition
          AND pg_catalog.starts_with(s.relname, {_literal(start)})
          AND pg_catalog.substr(s.relname, {len(start) + 1}) ~ '^[0-9a-f]{{12}}_[0-9]+(_[0-9]+)?$'
    LOOP
        EXECUTE 'DROP TABLE ' || staging;
    END LOOP;
END
"""  # noqa: S608 # every name in it is quoted
    return f"DO {_literal(block)}"


def _run(op: Operations, statement: str) -> None:
    op.execute(sa.text(statement.replace(":", "\\:")))


def _name(schema: str | None, prefix: str, name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, f"{prefix}{name}") if part is not None)


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
