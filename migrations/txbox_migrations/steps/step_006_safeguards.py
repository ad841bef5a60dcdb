"""Step 6: what the tables must know so that crashes, outages and other content change no message."""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import JSONB, insert


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Add the columns and tables of the safeguards."""
    _leases(op, schema, prefix)
    _add_parking(op, schema, prefix)
    _bulk_loads(op, schema, prefix)
    _conflicts(op, schema, prefix)
    op.add_column(
        f"{prefix}outbox_relay",
        sa.Column("backend_pid", sa.Integer, comment="the server process of its session; null behind a pooler"),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Take them back."""
    op.drop_column(f"{prefix}outbox_relay", "backend_pid", schema=schema)
    op.drop_table(f"{prefix}handler_conflict", schema=schema)
    op.drop_column(f"{prefix}bulk_load", "content", schema=schema)
    _drop_parking(op, schema, prefix)
    _leases_as_before(op, schema, prefix)


def _bulk_loads(op: Operations, schema: str | None, prefix: str) -> None:
    """A run is resumed only with the events that it was begun with; one that was begun before this step is not."""
    op.add_column(
        f"{prefix}bulk_load",
        sa.Column("content", sa.LargeBinary, comment="digest of the message ids that a resumed run must find again"),
        schema=schema,
    )


def _conflicts(op: Operations, schema: str | None, prefix: str) -> None:
    """Deadlocks of handlers are seen by ``txbox status``, too, not only by the process that has them."""
    op.create_table(
        f"{prefix}handler_conflict",
        sa.Column("subscriber_id", sa.Text(collation="C"), nullable=False),
        sa.Column("sqlstate", sa.Text, nullable=False),
        sa.Column(
            "place", sa.Text, nullable=False, comment="the relation, as the server named it; empty if it did not"
        ),
        sa.Column("conflicts", sa.BigInteger, nullable=False),
        sa.Column("first_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("subscriber_id", "sqlstate", "place", name=op.f(f"{prefix}handler_conflict_pkey")),
        schema=schema,
    )


def _leases(op: Operations, schema: str | None, prefix: str) -> None:
    """A fence begins with the server's timeline: a sequence gives out numbers twice after a failover."""
    table = f"{prefix}message_lease"
    op.alter_column(
        table, "fence", server_default=None, existing_server_default=sa.Identity(always=True), schema=schema
    )
    op.add_column(
        table,
        sa.Column("lease_seconds", sa.Float, comment="how long the lease was asked for, or renewed"),
        schema=schema,
    )


def _leases_as_before(op: Operations, schema: str | None, prefix: str) -> None:
    table = f"{prefix}message_lease"
    op.drop_column(table, "lease_seconds", schema=schema)
    op.alter_column(
        table,
        "fence",
        server_default=sa.Identity(always=True, start=_BEYOND_ANY_FENCE),
        existing_server_default=None,  # else some versions of Alembic alter an identity that is not there
        schema=schema,
    )


_BEYOND_ANY_FENCE = 1 << 62
"""So that fences go on growing: those of step 6 have the timeline in their upper bits."""


def _add_parking(op: Operations, schema: str | None, prefix: str) -> None:
    """The inbox knows what is parked, so that a message is processed or parked, and never both."""
    op.add_column(
        f"{prefix}processed_message",
        sa.Column(
            "dead_letter_id",
            sa.BigInteger,
            comment="the letter that it is parked as; null: it is processed",
        ),
        schema=schema,
    )
    for name, order in (("message_failure", "newest"), ("dead_letter", "oldest")):
        op.add_column(
            f"{prefix}{name}",
            sa.Column(
                "history",
                JSONB,
                server_default=sa.text("'[]'::jsonb"),
                nullable=False,
                comment=f"the last attempts that counted, {order} first: when, at which delivery, and why",
            ),
            schema=schema,
        )
    op.add_column(
        f"{prefix}dead_letter",
        sa.Column("lease_attempts", sa.Integer, comment="of the message in its ledger when it was parked"),
        schema=schema,
    )
    op.add_column(
        f"{prefix}bulk_load_chunk",
        sa.Column(
            "parked",
            sa.BigInteger,
            server_default=sa.text("0"),
            nullable=False,
            comment="of those already processed: events that wait as dead letters, and are not processed",
        ),
        schema=schema,
    )
    # What waits already is parked, too. Letters of relays were received by nobody, and have no place in an inbox.
    processed, letter = _parking_tables(schema, prefix)
    waiting = sa.select(letter.c.subscriber_id, letter.c.message_id, sa.func.min(letter.c.dead_letter_id)).where(
        letter.c.redriven_at.is_(None),
        letter.c.reason != sa.literal_column("'mismatch'"),
        sa.not_(sa.func.starts_with(letter.c.subscriber_id, sa.literal_column("'txbox:outbox:'"))),
    )
    columns = ["subscriber_id", "message_id", "dead_letter_id"]
    op.execute(
        insert(processed)
        .from_select(columns, waiting.group_by(letter.c.subscriber_id, letter.c.message_id))
        .on_conflict_do_nothing()
    )


def _drop_parking(op: Operations, schema: str | None, prefix: str) -> None:
    """Before this step, what is parked is not in the inbox."""
    processed, _ = _parking_tables(schema, prefix)
    op.execute(sa.delete(processed).where(processed.c.dead_letter_id.is_not(None)))
    op.drop_column(f"{prefix}bulk_load_chunk", "parked", schema=schema)
    op.drop_column(f"{prefix}dead_letter", "lease_attempts", schema=schema)
    for name in ("dead_letter", "message_failure"):
        op.drop_column(f"{prefix}{name}", "history", schema=schema)
    op.drop_column(f"{prefix}processed_message", "dead_letter_id", schema=schema)


def _parking_tables(schema: str | None, prefix: str) -> tuple[sa.TableClause, sa.TableClause]:
    keys = ("subscriber_id", "message_id", "dead_letter_id")
    processed = sa.table(f"{prefix}processed_message", *map(sa.column, keys), schema=schema)
    letter = sa.table(f"{prefix}dead_letter", *map(sa.column, (*keys, "reason", "redriven_at")), schema=schema)
    return processed, letter
