"""The worker with coroutine handlers on a real Postgres and a local SQS over HTTP."""

import asyncio
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from support.aws.queues import send, wait_until_empty
from support.workers.business import APPLY, Business, once
from txbox import AsyncInbox, DeadLetters, Message, Outcome
from txbox.backoff import Backoff
from txbox_aws.sqs import AsyncSqsWorker

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

pytestmark = pytest.mark.anyio

AT_ONCE = Backoff(first_seconds=0.0, longest_seconds=0.0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def apply(session: AsyncSession, message: Message) -> None:
    await session.execute(APPLY, {"id": message.id, "body": message.text})


def make(queue: str, engine: AsyncEngine, handler: Any = apply, **options: Any) -> AsyncSqsWorker:
    inbox = AsyncInbox("billing", wait_seconds=0.2)
    return AsyncSqsWorker(
        queue, inbox=inbox, engine=engine, handler=handler, **{"backoff": AT_ONCE, "wait_seconds": 0, **options}
    )


@pytest.mark.parametrize("options", [{}, {"batch_size": 40, "concurrency": 15}])
async def test_what_is_sent_twice_and_redelivered_is_applied_once(
    schema_url: str, business: Business, sqs: "SQSClient", queue: str, options: dict[str, Any]
) -> None:
    engine = create_async_engine(schema_url)
    send(sqs, queue, [f"m{number:03}" for number in range(60)])
    send(sqs, queue, [f"m{number:03}" for number in range(20)])
    async with make(queue, engine, **options), make(queue, engine, **options):
        await asyncio.to_thread(wait_until_empty, sqs, queue)
    await engine.dispose()
    assert business.applied() == once(f"m{number:03}" for number in range(60))


async def test_groups_keep_their_order_and_a_failure_its_attempts(
    schema_url: str, business: Business, sqs: "SQSClient", make_queue: Any, engine: Engine
) -> None:
    queue = make_queue(fifo=True)
    failed: Counter[str] = Counter()

    async def handle(session: AsyncSession, message: Message) -> None:
        await asyncio.sleep(0.001)
        if message.id in ("a2", "b1") and failed[message.id] < 2:
            failed[message.id] += 1
            raise ValueError("not yet")
        if message.id == "c0":
            raise ValueError("never")
        await apply(session, message)

    for group in "abc":
        send(sqs, queue, [f"{group}{number}" for number in range(5)], group=group)
    asynchronous = create_async_engine(schema_url)
    worker = make(queue, asynchronous, handle, max_attempts=3)
    async with worker:
        await asyncio.to_thread(wait_until_empty, sqs, queue)
    await asynchronous.dispose()
    order = business.order()
    for group in "ab":
        assert [one for one in order if one[0] == group] == [f"{group}{number}" for number in range(5)]
    assert [letter.message_id for letter in DeadLetters(engine).list()] == ["c0"]
    assert worker.counts[Outcome.DEAD] == 1


def test_its_options_are_listed() -> None:
    parameters = inspect.signature(AsyncSqsWorker).parameters
    assert {"queue_url", "envelope", "concurrency", "engine", "prefetch", "batch_size"} <= parameters.keys()
    assert parameters["concurrency"].default == 10
    assert "threads" not in parameters
