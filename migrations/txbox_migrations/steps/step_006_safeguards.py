"""Step 6: what the tables must know so that crashes, outages and other content change no message."""

from alembic.operations import Operations

__all__ = ["downgrade", "upgrade"]


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Add the columns and tables of the safeguards."""
    del op, schema, prefix


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Take them back."""
    del op, schema, prefix
