"""The inbox for coroutines: an ``Inbox`` with methods to await."""

from collections.abc import Iterable, Mapping
from datetime import datetime

from txbox.inbox.age_judge import UnknownAge
from txbox.inbox.inbox import NOTHING_KNOWN, WAIT_SECONDS, Inbox, Recorded
from txbox.postgres.transactions import AsyncConnectionOrSession, run_on


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
        wait_seconds: float = WAIT_SECONDS,
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
