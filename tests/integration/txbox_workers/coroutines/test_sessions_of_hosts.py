"""Async sessions that have engines of their own: what a handler does is in the transaction that records its message."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from support.workers.async_worker import Engines, make, work_off
from support.workers.business import Business, once
from support.workers.mapped import Base, Effect
from support.workers.memory_worker import messages
from txbox import InvalidConfiguration, Message
from txbox_workers.memory_source import MemorySource

pytestmark = pytest.mark.anyio


def routing(engine: AsyncEngine) -> Callable[..., AsyncSession]:
    class Routing(Session):
        def get_bind(self, *_: Any, **__: Any) -> Engine:
            return engine.sync_engine

    return async_sessionmaker(sync_session_class=Routing)


FACTORIES: dict[str, Callable[[AsyncEngine], Callable[..., AsyncSession]]] = {
    "binds": lambda engine: async_sessionmaker(binds={Base: engine}),
    "sync_session_class": routing,
    "a session that takes no engine": lambda engine: lambda **_: AsyncSession(engine),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=list(FACTORIES))
async def test_they_work_in_the_transaction_of_the_worker_or_not_at_all(
    business: Business, make_async_engine: Engines, factory: Callable[[AsyncEngine], Callable[..., AsyncSession]]
) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        session.add(Effect(message_id=message.id, body=message.text))
        await session.flush()
        await session.execute(insert(Effect).values(message_id=f"{message.id}, by a statement", body=""))
        if message.id == "bad":
            raise ValueError

    async with make_async_engine() as engine, make_async_engine() as other:
        source = MemorySource(messages("a", "bad", "c"))
        await work_off(source, engine, handle, session_factory=factory(engine), max_attempts=2)
        await work_off(
            MemorySource(messages("elsewhere")), engine, handle, session_factory=factory(other), max_attempts=2
        )
    assert business.applied() == once(f"{name}{way}" for name in "ac" for way in ("", ", by a statement"))
    assert business.recorded() == {"a", "c"}
    assert business.letters() == {"bad": "failed", "elsewhere": "failed"}
    assert business.rows("SELECT error FROM dead_letter WHERE message_id = 'elsewhere'")[0].count("engine of its own")


async def test_two_phases_and_other_schemas_are_refused(async_engine: AsyncEngine) -> None:
    async def handle(session: AsyncSession, message: Message) -> None: ...

    with pytest.raises(InvalidConfiguration, match="session_factory has twophase"):
        make(MemorySource([]), async_engine, handle, session_factory=async_sessionmaker(twophase=True))
    tenant = async_engine.execution_options(schema_translate_map={None: "tenant"})
    with pytest.raises(InvalidConfiguration, match=r"session_factory .*schema_translate_map"):
        make(MemorySource([]), async_engine, handle, session_factory=async_sessionmaker(tenant))
    make(MemorySource([]), tenant, handle, session_factory=async_sessionmaker(tenant))
