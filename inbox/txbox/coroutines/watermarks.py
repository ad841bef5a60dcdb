"""Watermarks for coroutines: ``Watermarks`` with methods to await."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnClause

from txbox.postgres.transactions import AsyncConnectionOrSession, run_on
from txbox.watermarks.watermarks import WAIT_SECONDS, Advance, Watermarks


class AsyncWatermarks:
    """The highest sequence of each aggregate, for coroutines: ``Watermarks`` with methods to await.

    A method takes what those of ``AsyncInbox`` take, and works in its transaction.

    Attributes:
        sync_watermarks: the sync watermarks with the same arguments.
    """

    def __init__(
        self, subscriber_id: str, *, schema: str | None = None, prefix: str = "", wait_seconds: float = WAIT_SECONDS
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
