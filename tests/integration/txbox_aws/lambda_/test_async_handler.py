"""A function on Lambda whose handlers are coroutines."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from support.aws.lambda_events import NOTHING, Context, again, failing, of
from support.workers.business import APPLY, Business, once
from txbox import AsyncInbox, InvalidConfiguration, Message
from txbox.leases import Lease, PostgresLedger
from txbox_aws.lambda_ import async_sqs_handler


async def apply(session: AsyncSession, message: Message) -> None:
    await asyncio.sleep(0.001)
    if message.id == "c":
        raise ValueError("no")
    await session.execute(APPLY, {"id": message.id, "body": message.text})


@pytest.fixture
def pool(schema_url: str) -> AsyncEngine:
    """An engine as a function has it: one connection."""
    return create_async_engine(schema_url, pool_size=1, max_overflow=0, pool_timeout=5)


@pytest.fixture
def make(pool: AsyncEngine) -> Iterator[Callable[..., Callable[..., Any]]]:
    """Make functions; their loops end with the test, as with a process."""
    made: list[Any] = []

    def make_one(**options: Any) -> Callable[..., Any]:
        handle = async_sqs_handler(**options)
        made.append(handle.__self__)  # type: ignore[attr-defined] # it is a method
        return handle

    yield make_one
    for function in made:
        if function._loop is not None:
            function._loop.run_until_complete(pool.dispose())
            function._loop.run_until_complete(function._loop.shutdown_default_executor())
            function._loop.close()


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_only_what_has_failed_comes_again(
    make: Callable[..., Any], pool: AsyncEngine, business: Business, transactions: Any
) -> None:
    handle = make(inbox=AsyncInbox("billing"), engine=pool, handler=apply, transactions=transactions)
    asked = of(["a", "b", "c", "d"])
    assert handle(asked, Context(30)) == failing(["c"])
    assert business.applied() == once("abd")
    assert handle(again(asked, failing(["c"])), Context(30)) == failing(["c"])
    assert business.failing() == {"c": 2}
    assert handle(of(["a", "e"]), Context(30)) == NOTHING
    assert business.applied() == once("abde")


def test_what_time_does_not_suffice_for_comes_again(
    make: Callable[..., Any], pool: AsyncEngine, business: Business
) -> None:
    async def slow(session: AsyncSession, message: Message) -> None:
        await asyncio.sleep(0.3)
        await session.execute(APPLY, {"id": message.id, "body": message.text})

    handle = make(inbox=AsyncInbox("billing"), engine=pool, handler=slow, margin_seconds=0.1)
    answer = handle(of(["a", "b", "c", "d", "e", "f"]), Context(1))
    left = len(answer["batchItemFailures"])
    assert 0 < left < 6
    assert len(business.applied()) == 6 - left


def test_effects_under_a_lease(make: Callable[..., Any], schema_url: str, business: Business) -> None:
    engine = create_engine(schema_url, poolclass=NullPool)
    done: list[tuple[str, int]] = []

    async def mail(message: Message, lease: Lease) -> None:
        await asyncio.sleep(0)
        done.append((message.id, lease.attempt))

    handle = make(ledger=PostgresLedger("mailing", engine=engine), handler=mail)
    for _ in range(2):
        assert handle(of(["a", "b"]), Context(30)) == NOTHING
    assert done == [("a", 1), ("b", 1)]


def test_what_cannot_work_is_refused_by_its_own_name(pool: AsyncEngine) -> None:
    inbox = AsyncInbox("billing")
    with pytest.raises(InvalidConfiguration, match=r"async_sqs_handler\.handler must be a coroutine function"):
        async_sqs_handler(inbox=inbox, engine=pool, handler=lambda session, message: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidConfiguration, match=r"async_sqs_handler\.margin_seconds must be at least 0"):
        async_sqs_handler(inbox=inbox, engine=pool, handler=apply, margin_seconds=-1)
    with pytest.raises(TypeError, match=r"async_sqs_handler\(\) got an unexpected keyword argument 'concurrency'"):
        async_sqs_handler(inbox=inbox, engine=pool, handler=apply, concurrency=2)  # type: ignore[call-arg]
