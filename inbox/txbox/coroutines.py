"""For coroutines: the inbox, the outbox, watermarks and entities with methods to await.

Each class only calls its sync counterpart in a greenlet (``txbox.postgres.drivers.greenlets``), so the statements,
answers and errors are the same.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnClause

from txbox.inbox.age_judge import UnknownAge
from txbox.inbox.inbox import NOTHING_KNOWN, Inbox, Recorded
from txbox.inbox.inbox import WAIT_SECONDS as INBOX_WAIT_SECONDS
from txbox.messages.body import Body
from txbox.outbox.outbox import Delay, Outbox, Outgoing
from txbox.postgres.transactions import AsyncConnectionOrSession, run_on
from txbox.tracing import Tracing
from txbox.watermarks.watermarks import WAIT_SECONDS as WATERMARK_WAIT_SECONDS
from txbox.watermarks.watermarks import Advance, Watermarks

__all__ = ["AsyncInbox", "AsyncOutbox", "AsyncWatermarks", "async_update_if_newer", "async_update_once"]


class AsyncInbox:
    """What one subscriber has already processed, for coroutines: an ``Inbox`` with methods to await.

    ::

        async with AsyncSession(engine) as session, session.begin():
            if await inbox.record(session, message_id):
                await apply(session, purchase)

    A method takes an AsyncSession or AsyncConnection of SQLAlchemy, over psycopg or asyncpg, or an AsyncConnection of
    psycopg, and works in its transaction. After a cancellation, roll back: the statement may or may not have run.

    Attributes:
        sync_inbox: the sync inbox with the same arguments.
    """

    def __init__(
        self,
        subscriber_id: str,
        *,
        schema: str | None = None,
        prefix: str = "",
        fingerprint: bool = False,
        wait_seconds: float = INBOX_WAIT_SECONDS,
        unknown_age: UnknownAge = "process",
    ) -> None:
        """Name the subscriber and its tables, as for an ``Inbox``; raise as ``Inbox`` does."""
        self.sync_inbox = Inbox(
            subscriber_id,
            schema=schema,
            prefix=prefix,
            fingerprint=fingerprint,
            wait_seconds=wait_seconds,
            unknown_age=unknown_age,
        )

    def __repr__(self) -> str:
        return f"Async{self.sync_inbox!r}"

    @property
    def subscriber_id(self) -> str:
        """The subscriber's name."""
        return self.sync_inbox.subscriber_id

    async def record(
        self,
        connection_or_session: AsyncConnectionOrSession,
        message_id: str,
        body: bytes | str | None = None,
        *,
        sent_at: datetime | None = None,
    ) -> bool:
        """Record one message in the caller's transaction; arguments, result and errors are as for ``Inbox.record``."""
        return await run_on(connection_or_session, self.sync_inbox.record, message_id, body, sent_at=sent_at)

    async def record_many(
        self,
        connection_or_session: AsyncConnectionOrSession,
        ids: Iterable[str] | Mapping[str, bytes | str],
        *,
        sent_at: Mapping[str, datetime | None] = NOTHING_KNOWN,
    ) -> set[str]:
        """Record many messages in the caller's transaction; as ``Inbox.record_many``."""
        return await run_on(connection_or_session, self.sync_inbox.record_many, ids, sent_at=sent_at)

    async def sort_out(
        self,
        connection_or_session: AsyncConnectionOrSession,
        ids: Iterable[str] | Mapping[str, bytes | str],
        *,
        sent_at: Mapping[str, datetime | None] = NOTHING_KNOWN,
    ) -> Recorded:
        """Record many messages, but return mismatched and expired ones instead of raising; as ``Inbox.sort_out``."""
        return await run_on(connection_or_session, self.sync_inbox.sort_out, ids, sent_at=sent_at)

    async def unrecord(self, connection_or_session: AsyncConnectionOrSession, ids: Iterable[str]) -> int:
        """Take back what this very transaction recorded; as ``Inbox.unrecord``."""
        return await run_on(connection_or_session, self.sync_inbox.unrecord, ids)

    async def check(self, connection_or_session: AsyncConnectionOrSession) -> None:
        """Raise unless the inbox can be used over this connection; as ``Inbox.check``."""
        await run_on(connection_or_session, self.sync_inbox.check)


class AsyncOutbox:
    """What this service still has to send, for coroutines: an ``Outbox`` with methods to await.

    ::

        async with AsyncSession(engine) as session, session.begin():
            session.add(order)
            await outbox.publish(session, queue_url, order.as_json(), key=order.customer)

    A method takes what those of ``AsyncInbox`` take, and works in its transaction.

    Attributes:
        sync_outbox: the sync outbox with the same arguments.
    """

    def __init__(
        self, *, schema: str | None = None, prefix: str = "", notify: bool = True, tracing: Tracing | None = None
    ) -> None:
        """Name the outbox's tables, as for an ``Outbox``."""
        self.sync_outbox = Outbox(schema=schema, prefix=prefix, notify=notify, tracing=tracing)

    def __repr__(self) -> str:
        return f"Async{self.sync_outbox!r}"

    async def publish(
        self,
        connection_or_session: AsyncConnectionOrSession,
        destination: str,
        body: Body,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        delay: Delay | None = None,
    ) -> str:
        """Publish one message in the caller's transaction, and return its id; as ``Outbox.publish``."""
        publish = self.sync_outbox.publish
        return await run_on(connection_or_session, publish, destination, body, key, headers, message_id, delay)

    async def publish_many(
        self, connection_or_session: AsyncConnectionOrSession, messages: Iterable[Outgoing]
    ) -> list[str]:
        """Publish many messages in the caller's transaction, and return their ids; as ``Outbox.publish_many``."""
        return await run_on(connection_or_session, self.sync_outbox.publish_many, messages)

    async def check(self, connection_or_session: AsyncConnectionOrSession) -> None:
        """Raise unless the outbox can be used over this connection; as ``Outbox.check``."""
        await run_on(connection_or_session, self.sync_outbox.check)


class AsyncWatermarks:
    """The highest sequence of each aggregate, for coroutines: ``Watermarks`` with methods to await.

    A method takes what those of ``AsyncInbox`` take, and works in its transaction.

    Attributes:
        sync_watermarks: the sync watermarks with the same arguments.
    """

    def __init__(
        self,
        subscriber_id: str,
        *,
        schema: str | None = None,
        prefix: str = "",
        wait_seconds: float = WATERMARK_WAIT_SECONDS,
    ) -> None:
        """Name the subscriber and its table, as for ``Watermarks``; raise as ``Watermarks`` does."""
        self.sync_watermarks = Watermarks(subscriber_id, schema=schema, prefix=prefix, wait_seconds=wait_seconds)

    def __repr__(self) -> str:
        return f"Async{self.sync_watermarks!r}"

    @property
    def subscriber_id(self) -> str:
        """The subscriber's name."""
        return self.sync_watermarks.subscriber_id

    async def advance(
        self,
        connection_or_session: AsyncConnectionOrSession,
        aggregate_type: str,
        aggregate_id: str,
        sequence: int,
        *,
        insist: bool = False,
        first: int = 1,
    ) -> Advance:
        """Advance a watermark to an event's sequence, in the caller's transaction; as ``Watermarks.advance``."""
        advance = self.sync_watermarks.advance
        return await run_on(
            connection_or_session, advance, aggregate_type, aggregate_id, sequence, insist=insist, first=first
        )

    async def advance_many(
        self,
        connection_or_session: AsyncConnectionOrSession,
        events: Iterable[tuple[str, str, int]],
        *,
        insist: bool = False,
        first: int = 1,
    ) -> list[Advance]:
        """Advance watermarks by many events, in the caller's transaction; as ``Watermarks.advance_many``."""
        return await run_on(
            connection_or_session, self.sync_watermarks.advance_many, events, insist=insist, first=first
        )

    async def advance_from(
        self,
        connection_or_session: AsyncConnectionOrSession,
        relation: str = "fresh_event",
        *,
        aggregate_type: str | ColumnClause[Any],
        aggregate_id: str,
        sequence: str,
        newest_only: bool = False,
        wait_seconds: float | None = None,
    ) -> int:
        """Advance watermarks by the events in a table of this transaction; as ``Watermarks.advance_from``."""
        return await run_on(
            connection_or_session,
            self.sync_watermarks.advance_from,
            relation,
            aggregate_type=aggregate_type,
            aggregate_id=aggregate_id,
            sequence=sequence,
            newest_only=newest_only,
            wait_seconds=wait_seconds,
        )


async def async_update_once(
    connection_or_session: AsyncConnectionOrSession,
    entity: type[Any],
    key: Any,
    message_id: str,
    values: Mapping[Any, Any],
) -> bool:
    """Update one row unless the message has updated it before, in a coroutine's transaction; as ``update_once``."""
    from txbox.entities import update_once  # it needs sqlalchemy.orm, which nothing else here does

    return await run_on(connection_or_session, update_once, entity, key, message_id, values)


async def async_update_if_newer(
    connection_or_session: AsyncConnectionOrSession,
    entity: type[Any],
    key: Any,
    source: str,
    event_id: int | str,
    values: Mapping[Any, Any],
) -> bool:
    """Update one row if the event's id exceeds all earlier ones of its source, in a coroutine's transaction.

    Arguments, result and errors are those of ``update_if_newer``.
    """
    from txbox.entities import update_if_newer

    return await run_on(connection_or_session, update_if_newer, entity, key, source, event_id, values)
