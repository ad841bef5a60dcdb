"""Step 7: what is needed to operate it for years: retention, dead letters in bulk, pauses, and who works."""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import JSONB, dialect

BYTEWISE = sa.Text(collation="C")
MOMENT = sa.DateTime(timezone=True)


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Add the tables and columns of operations."""
    _rename_relation(op, schema, prefix, "place", "relation")
    _retention(op, schema, prefix)
    _letters(op, schema, prefix)
    _operations(op, schema, prefix)
    _work(op, schema, prefix)
    expired = _count("expired", "events behind the horizon: not applied, and not parked")
    op.add_column(f"{prefix}bulk_load_chunk", expired, schema=schema)


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Take them back. Letters stay as they are, discarded ones as if they were redriven."""
    _run(op, f"DROP VIEW {_quoted(schema, prefix, 'processed_earlier')}")
    op.drop_column(f"{prefix}bulk_load_chunk", "expired", schema=schema)
    for table in ("worker_report", "paused", "dead_letter_selection", "dead_letter_operation"):
        op.drop_table(f"{prefix}{table}", schema=schema)
    for column in ("version", "state", "destinations"):
        op.drop_column(f"{prefix}outbox_relay", column, schema=schema)
    _letters_as_before(op, schema, prefix)
    for table in ("maintenance", "inbox_generation", "inbox_horizon"):
        op.drop_table(f"{prefix}{table}", schema=schema)
    _rename_relation(op, schema, prefix, "relation", "place")


def _rename_relation(op: Operations, schema: str | None, prefix: str, old: str, new: str) -> None:
    comment = "the relation, as the server named it; empty if it did not"
    op.alter_column(f"{prefix}handler_conflict", old, new_column_name=new, existing_comment=comment, schema=schema)


def _retention(op: Operations, schema: str | None, prefix: str) -> None:
    """A horizon for each subscriber, the generations of a rotating inbox, and what a maintainer has done."""
    op.create_table(
        f"{prefix}inbox_horizon",
        sa.Column("subscriber_id", BYTEWISE, nullable=False),
        sa.Column("horizon", MOMENT, nullable=False, comment="messages that were sent before it are not run any more"),
        _now("moved_at"),
        sa.PrimaryKeyConstraint("subscriber_id", name=op.f(f"{prefix}inbox_horizon_pkey")),
        schema=schema,
    )
    op.create_table(
        f"{prefix}inbox_generation",
        sa.Column("generation", sa.Integer, autoincrement=False, nullable=False),
        _now("opened_at"),
        sa.Column("closed_at", MOMENT, comment="nothing was recorded in it since; null: it takes what is recorded"),
        sa.PrimaryKeyConstraint("generation", name=op.f(f"{prefix}inbox_generation_pkey")),
        schema=schema,
    )
    _create_earlier(op, schema, prefix)
    op.create_table(
        f"{prefix}maintenance",
        sa.Column("task", BYTEWISE, nullable=False),
        sa.Column("owner", sa.Text, comment="the maintainer that works on it, or did so last; for people"),
        sa.Column("expires_at", MOMENT, comment="until when no other maintainer may work"),
        sa.Column("started_at", MOMENT),
        sa.Column("finished_at", MOMENT),
        _count("removed", "rows, in all"),
        _json("detail"),
        sa.PrimaryKeyConstraint("task", name=op.f(f"{prefix}maintenance_pkey")),
        schema=schema,
    )


def _create_earlier(op: Operations, schema: str | None, prefix: str) -> None:
    """The ids of the older generations: none. Those may read it who may read the inbox: who records needs it."""
    inbox, view = (_quoted(schema, prefix, name) for name in ("processed_message", "processed_earlier"))
    _run(op, f"CREATE VIEW {view} AS SELECT subscriber_id, message_id FROM {inbox} WHERE false")  # noqa: S608 - quoted
    inbox, view = (name.replace("'", "''") for name in (inbox, view))
    _run(
        op,
        f"""DO $grants$ DECLARE reader regrole; BEGIN
  FOR reader IN
    SELECT DISTINCT granted.grantee FROM pg_catalog.pg_class, pg_catalog.aclexplode(relacl) AS granted
    WHERE pg_class.oid = '{inbox}'::regclass AND granted.privilege_type = 'SELECT'
  LOOP
    EXECUTE format('GRANT SELECT ON %s TO %s', '{view}'::regclass,
      CASE WHEN reader::oid = 0 THEN 'PUBLIC' ELSE reader::text END);
  END LOOP;
END $grants$""",  # noqa: S608 - quoted
    )


def _quoted(schema: str | None, prefix: str, name: str) -> str:
    plain = dialect(paramstyle="named")  # type: ignore[no-untyped-call]  # it doubles no percent signs
    return plain.identifier_preparer.format_table(sa.Table(f"{prefix}{name}", sa.MetaData(), schema=schema))


def _run(op: Operations, statement: str) -> None:
    op.execute(sa.text(statement.replace(":", "\\:")))


def _letters(op: Operations, schema: str | None, prefix: str) -> None:
    """Letters have a place in an order, and end by a redrive or by being discarded."""
    table = f"{prefix}dead_letter"
    for name, type_, comment in _LETTER_COLUMNS:
        op.add_column(table, sa.Column(name, type_, comment=comment), schema=schema)
    _reasons(op, schema, prefix, "'failed', 'mismatch', 'malformed', 'crashed', 'expired', 'behind'")
    _parked_once(op, schema, prefix, "redriven_at IS NULL AND discarded_at IS NULL")
    op.create_index(
        op.f(f"{prefix}dead_letter_by_message"), table, ["subscriber_id", "message_id"], unique=False, schema=schema
    )
    for name, waits in (("in_order", ""), ("in_line", "redriven_at IS NULL AND ")):
        op.create_index(
            op.f(f"{prefix}dead_letter_{name}"),
            table,
            ["subscriber_id", "order_key", "order_position"],
            unique=False,
            schema=schema,
            postgresql_where=sa.text(f"order_position IS NOT NULL AND {waits}discarded_at IS NULL"),
        )


_LETTER_COLUMNS = (
    ("order_key", BYTEWISE, "the FIFO group, or the key, whose order the letter keeps"),
    ("order_position", sa.BigInteger(), "its place among the letters of its key; null: it holds nothing"),
    ("redriven_by", sa.Text(), "who sent it through again; for people"),
    ("discarded_at", MOMENT, "when a person gave it up"),
    ("discarded_by", sa.Text(), "who did; for people"),
    ("note", sa.Text(), "why"),
)


def _letters_as_before(op: Operations, schema: str | None, prefix: str) -> None:
    table = f"{prefix}dead_letter"
    letter = sa.table(table, *map(sa.column, ("reason", "redriven_at", "discarded_at")), schema=schema)
    op.execute(
        sa.update(letter)
        .where(letter.c.discarded_at.is_not(None), letter.c.redriven_at.is_(None))
        .values(redriven_at=letter.c.discarded_at)
    )
    op.execute(
        sa.update(letter)
        .where(letter.c.reason.in_([sa.literal_column("'expired'"), sa.literal_column("'behind'")]))
        .values(reason=sa.literal_column("'failed'"))
    )
    for name in ("dead_letter_in_line", "dead_letter_in_order", "dead_letter_by_message"):
        op.drop_index(op.f(f"{prefix}{name}"), table_name=table, schema=schema)
    _parked_once(op, schema, prefix, "redriven_at IS NULL")
    _reasons(op, schema, prefix, "'failed', 'mismatch', 'malformed', 'crashed'")
    for name, _, _ in reversed(_LETTER_COLUMNS):
        op.drop_column(table, name, schema=schema)


def _reasons(op: Operations, schema: str | None, prefix: str, reasons: str) -> None:
    name, table = op.f(f"{prefix}dead_letter_reason_check"), f"{prefix}dead_letter"
    op.drop_constraint(name, table, schema=schema, type_="check")
    op.create_check_constraint(name, table, f"reason IN ({reasons})", schema=schema)


def _parked_once(op: Operations, schema: str | None, prefix: str, waiting: str) -> None:
    name = op.f(f"{prefix}dead_letter_parked_once")
    op.drop_index(name, table_name=f"{prefix}dead_letter", schema=schema)
    op.create_index(
        name,
        f"{prefix}dead_letter",
        ["subscriber_id", "message_id", "body_hash"],
        unique=True,
        schema=schema,
        postgresql_where=sa.text(waiting),
    )


def _operations(op: Operations, schema: str | None, prefix: str) -> None:
    """Redrives and discards of many letters: who asked for what, and which letters were selected."""
    op.create_table(
        f"{prefix}dead_letter_operation",
        sa.Column("operation_id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("filter", JSONB, nullable=False, comment="by which the letters were selected"),
        _json("options"),
        sa.Column("note", sa.Text),
        sa.Column("requested_by", sa.Text, nullable=False),
        _now("requested_at"),
        sa.Column("finished_at", MOMENT),
        sa.PrimaryKeyConstraint("operation_id", name=op.f(f"{prefix}dead_letter_operation_pkey")),
        sa.CheckConstraint("kind IN ('redrive', 'discard')", name=op.f(f"{prefix}dead_letter_operation_check")),
        schema=schema,
    )
    op.create_table(
        f"{prefix}dead_letter_selection",
        sa.Column("operation_id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("dead_letter_id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("outcome", sa.Text, comment="null: not done yet"),
        sa.Column("error", sa.Text),
        sa.Column("done_at", MOMENT),
        sa.PrimaryKeyConstraint("operation_id", "dead_letter_id", name=op.f(f"{prefix}dead_letter_selection_pkey")),
        schema=schema,
    )


def _work(op: Operations, schema: str | None, prefix: str) -> None:
    """Who works, by their own reports, and what is paused."""
    for column, comment in (("version", "of txbox"), ("state", "working, paused or drained")):
        op.add_column(f"{prefix}outbox_relay", sa.Column(column, sa.Text, comment=comment), schema=schema)
    destinations = _json("destinations", "where it has sent to, the last ones, and how many messages")
    op.add_column(f"{prefix}outbox_relay", destinations, schema=schema)
    op.create_table(
        f"{prefix}worker_report",
        sa.Column("worker_id", BYTEWISE, nullable=False),
        sa.Column("subscriber_id", BYTEWISE, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("source_retention_seconds", sa.Float, comment="how long the source keeps a message"),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False, comment="of the process, on its host"),
        sa.Column("version", sa.Text, nullable=False, comment="of txbox"),
        sa.Column("state", sa.Text, nullable=False, comment="working, paused or drained"),
        _json("outcomes", "messages by outcome"),
        _json("per_second", "messages by outcome, between its last two reports"),
        _count("deadlocks"),
        _count("retries"),
        _now("started_at"),
        _now("seen_at"),
        sa.Column("last_batch_at", MOMENT),
        sa.PrimaryKeyConstraint("worker_id", name=op.f(f"{prefix}worker_report_pkey")),
        schema=schema,
    )
    op.create_table(
        f"{prefix}paused",
        sa.Column("kind", BYTEWISE, nullable=False),
        sa.Column("name", BYTEWISE, nullable=False),
        sa.Column("paused_by", sa.Text, nullable=False),
        sa.Column("note", sa.Text),
        _now("paused_at"),
        sa.PrimaryKeyConstraint("kind", "name", name=op.f(f"{prefix}paused_pkey")),
        sa.CheckConstraint("kind IN ('subscriber', 'destination')", name=op.f(f"{prefix}paused_kind_check")),
        schema=schema,
    )


def _now(name: str) -> sa.Column[object]:
    return sa.Column(name, MOMENT, server_default=sa.func.now(), nullable=False)


def _json(name: str, comment: str | None = None) -> sa.Column[object]:
    return sa.Column(name, JSONB, server_default=sa.text("'{}'::jsonb"), nullable=False, comment=comment)


def _count(name: str, comment: str | None = None) -> sa.Column[object]:
    return sa.Column(name, sa.BigInteger, server_default=sa.text("0"), nullable=False, comment=comment)
