"""Workers with coroutine handlers that are fed from memory."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from support.txbox.events import Kept
from support.workers.business import APPLY
from support.workers.memory_worker import AT_ONCE
from txbox import AsyncInbox, Message
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.memory_source import MemorySource

Engines = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
"""The fixture ``make_async_engine``."""


async def apply(session: AsyncSession, message: Message) -> None:
    await session.execute(APPLY, {"id": message.id, "body": message.text})


def make(source: MemorySource, engine: AsyncEngine, handler: Any = apply, **options: Any) -> AsyncWorker:
    if "batch_handler" not in options:
        options["handler"] = handler
    return AsyncWorker(
        source, engine=engine, **{"inbox": AsyncInbox("billing", wait_seconds=0.2), "backoff": AT_ONCE, **options}
    )


async def work_off(source: MemorySource, engine: AsyncEngine, handler: Any = apply, **options: Any) -> Kept:
    """Work until everything is acked; return the worker's events."""
    kept = Kept()
    async with make(source, engine, handler, hooks=[kept], **options):
        assert await asyncio.to_thread(source.wait_until_empty, 60), "something was never acked"
    return kept
