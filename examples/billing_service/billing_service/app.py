"""The web application, with the relay and the worker inside: coroutines, but for the relay, as boto3 blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import boto3
from fastapi import Depends, FastAPI, HTTPException, Request
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from billing_service import settings
from billing_service.accounts import Purchase, add_purchase, find_account
from txbox import AsyncInbox, AsyncOutbox, Inbox
from txbox.relay import Relay
from txbox_aws.publishers import aws_publishers
from txbox_aws.sqs import AsyncSqsWorker
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone

DRAIN_SECONDS = 20.0

log = logging.getLogger("billing_service")

# hide_parameters: a failed statement's values go into no log and no dead letter.
engine = create_async_engine(settings.database_url(), hide_parameters=True, pool_size=15)
sessions = async_sessionmaker(engine)
outbox = AsyncOutbox()
once = Idempotency(InTransaction(sessions, Inbox("shop")), caller=everyone)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start relay and worker before the first request, and drain them after the last one."""
    queue_url = await asyncio.to_thread(find_queue)
    relay_engine = create_engine(settings.database_url(), hide_parameters=True)
    relay = Relay(relay_engine, aws_publishers())
    worker = AsyncSqsWorker(queue_url, inbox=AsyncInbox("billing"), engine=engine, handler=add_purchase, wait_seconds=2)
    app.state.queue_url, app.state.relay, app.state.worker = queue_url, relay, worker
    await asyncio.to_thread(relay.start)  # it has threads of its own, and waits for servers
    await worker.start()
    try:
        yield
    finally:
        drained = await asyncio.gather(worker.stop(DRAIN_SECONDS), asyncio.to_thread(relay.stop, DRAIN_SECONDS))
        if not all(drained):
            log.warning("not drained within %.0f s; the rest comes again", DRAIN_SECONDS)
        relay_engine.dispose()
        await engine.dispose()


def find_queue() -> str:
    """Return the URL of the queue."""
    sqs = boto3.client("sqs")
    try:
        return sqs.get_queue_url(QueueName=settings.queue_name())["QueueUrl"]
    finally:
        sqs.close()


app = FastAPI(title="billing", lifespan=lifespan)
app.add_middleware(IdempotencyMiddleware, once)


@app.post("/purchases", status_code=202)
async def post_purchase(
    purchase: Purchase, request: Request, session: Annotated[AsyncSession, Depends(once)]
) -> dict[str, str]:
    """Take a purchase: it goes to the queue, in the transaction that records its key.

    The caller chooses the header Idempotency-Key before its first try and keeps it when it tries again: then the
    purchase is published once, and the answer is that of the first time.
    """
    key = purchase.account_id  # the purchases of an account are sent in their order
    return {"message_id": await outbox.publish(session, request.app.state.queue_url, purchase, key=key)}


@app.get("/accounts/{account_id}")
async def get_account(account_id: str) -> dict[str, object]:
    """Show an account."""
    async with sessions() as session:
        found = await find_account(session, account_id)
    if found is None:
        raise HTTPException(404, f"nothing was bought for {account_id} yet")
    return found


@app.get("/health")
async def get_health(request: Request) -> dict[str, bool]:
    """Say whether relay and worker are at work; for a liveness probe."""
    if not (request.app.state.worker.running and request.app.state.relay.running):
        raise HTTPException(503, "the relay or the worker has stopped")
    return {"running": True}
