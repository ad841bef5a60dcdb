"""Ids in business entities, for coroutines: the same updates, awaited."""

from collections.abc import Mapping
from typing import Any

from txbox.entities.entity import update_if_newer, update_once
from txbox.entities.event_ids import EventId
from txbox.postgres.transactions import AsyncConnectionOrSession, run_on


async def async_update_once(
    connection_or_session: AsyncConnectionOrSession,
    entity: type[Any],
    key: Any,
    message_id: str,
    values: Mapping[Any, Any],
) -> bool:
    """Update one row unless the message has updated it before, in a coroutine's transaction; as ``update_once``."""
    return await run_on(connection_or_session, update_once, entity, key, message_id, values)


async def async_update_if_newer(
    connection_or_session: AsyncConnectionOrSession,
    entity: type[Any],
    key: Any,
    source: str,
    event_id: EventId,
    values: Mapping[Any, Any],
) -> bool:
    """Update one row if the event's id exceeds all earlier ones of its source, in a coroutine's transaction.

    Arguments, result and errors are those of ``update_if_newer``.
    """
    return await run_on(connection_or_session, update_if_newer, entity, key, source, event_id, values)
