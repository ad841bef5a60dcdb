"""Forgetting, by hand: what a maintainer does to one subscriber's inbox, in its order."""

import uuid
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine

LONG_AGO = datetime.now(UTC) - timedelta(days=30)
"""When an old message was sent."""


def id_of(moment: datetime) -> str:
    """Return an id, a UUID of version 7, that was made at this time."""
    return str(uuid.UUID(int=int(moment.timestamp() * 1_000) << 80 | 7 << 76 | 2 << 62))


def move_horizon(engine: Engine, days_ago: float = 7, subscriber_id: str = "billing") -> None:
    """Move the horizon; what was sent before it is not run any more."""
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES (%s, now() - make_interval(secs => %s)) "
            "ON CONFLICT (subscriber_id) DO UPDATE SET horizon = excluded.horizon, moved_at = now()",
            (subscriber_id, days_ago * 86_400),
        )


def forget(engine: Engine, *message_ids: str, days_ago: float = 7, table: str = "processed_message") -> None:
    """Move the horizon and delete the rows of these messages, as if they had been processed before it."""
    move_horizon(engine, days_ago)
    with engine.begin() as connection:
        deleted = connection.exec_driver_sql(f"DELETE FROM {table} WHERE message_id = ANY(%s)", (list(message_ids),))
        assert deleted.rowcount == len(message_ids)
