"""Step 4: outbox_message holds what is still to be sent, outbox_sent what was, outbox_relay who sends."""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import JSONB


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Create outbox_message, outbox_sent and outbox_relay."""
    op.create_table(
        f"{prefix}outbox_message",
        sa.Column("lane", sa.BigInteger, autoincrement=False, nullable=False, comment="made from destination and key"),
        sa.Column("position", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column(
            "transaction_id",
            sa.BigInteger,
            server_default=sa.text("((pg_current_xact_id())::text)::bigint"),
            nullable=False,
            comment="whose insert it is; with its epoch, so it never comes again",
        ),
        sa.Column("message_id", sa.Text(collation="C"), nullable=False),
        sa.Column("destination", sa.Text, nullable=False),
        sa.Column("key", sa.Text, comment="messages of one key keep their order"),
        sa.Column("headers", JSONB, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), comment="not before; null: at once"),
        sa.Column("attempts", sa.Integer, server_default=sa.text("0"), nullable=False),
        sa.Column(
            "held", sa.Boolean, server_default=sa.text("false"), nullable=False, comment="its key has a failed message"
        ),
        sa.Column("error", sa.Text, comment="of the last attempt"),
        sa.PrimaryKeyConstraint("lane", "position", name=op.f(f"{prefix}outbox_message_pkey")),
        sa.CheckConstraint(
            "octet_length(message_id) <= 1000 AND octet_length(destination) <= 1024 AND octet_length(key) <= 1024",
            name=op.f(f"{prefix}outbox_message_names_check"),
        ),
        schema=schema,
    )
    for name, columns, where in (
        ("by_transaction", ["transaction_id"], "due_at IS NULL"),
        ("due", ["due_at"], "due_at IS NOT NULL AND NOT held"),
        ("heads", ["lane", "due_at"], "held AND due_at < 'infinity'::timestamptz"),
        ("held", ["lane", "key", "position"], "held"),
    ):
        op.create_index(
            op.f(f"{prefix}outbox_message_{name}"),
            f"{prefix}outbox_message",
            columns,
            schema=schema,
            postgresql_where=sa.text(where),
        )
    op.create_table(
        f"{prefix}outbox_sent",
        sa.Column("message_id", sa.Text(collation="C"), nullable=False),
        sa.Column("position", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("destination", sa.Text, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("headers", JSONB, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sent_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("message_id", "position", name=op.f(f"{prefix}outbox_sent_pkey")),
        schema=schema,
    )
    op.create_index(op.f(f"{prefix}outbox_sent_at"), f"{prefix}outbox_sent", ["sent_at"], schema=schema)
    op.create_table(
        f"{prefix}outbox_relay",
        sa.Column("relay_id", sa.Text(collation="C"), nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False, comment="of the process, on its host"),
        sa.Column("sent", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("failed", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("sent_per_second", sa.Float, server_default=sa.text("0"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column(
            "outages",
            JSONB,
            server_default=sa.text("'{}'::jsonb"),
            nullable=False,
            comment="destinations that it cannot send to, and why",
        ),
        sa.PrimaryKeyConstraint("relay_id", name=op.f(f"{prefix}outbox_relay_pkey")),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Drop the three tables, with every message that is not sent yet."""
    for name in ("outbox_relay", "outbox_sent", "outbox_message"):
        op.drop_table(f"{prefix}{name}", schema=schema)
