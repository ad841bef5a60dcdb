"""The outbox for coroutines: an ``Outbox`` with methods to await."""

from collections.abc import Iterable, Mapping

from txbox.messages.body import Body
from txbox.outbox.outbox import Delay, Outbox, Outgoing
from txbox.postgres.transactions import AsyncConnectionOrSession, run_on
from txbox.tracing import Tracing


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
