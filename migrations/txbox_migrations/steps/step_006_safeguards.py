"""Step 6: what the tables must know so that crashes, outages and other content change no message."""

import sqlalchemy as sa
from alembic.operations import Operations

__all__ = ["downgrade", "upgrade"]


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Add the columns and tables of the safeguards."""
    _leases(op, schema, prefix)


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Take them back."""
    _leases_as_before(op, schema, prefix)


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
    op.alter_column(table, "fence", server_default=sa.Identity(always=True, start=_BEYOND_ANY_FENCE), schema=schema)


_BEYOND_ANY_FENCE = 1 << 62
"""So that fences go on growing: those of step 6 have the timeline in their upper bits."""
