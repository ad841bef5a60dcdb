"""The web application, with the worker inside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import boto3
from fastapi import FastAPI, Header, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy import create_engine

from billing_service import settings
from billing_service.accounts import add_purchase, find_account
from txbox import Inbox
from txbox_aws.sqs import SqsWorker

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

DRAIN_SECONDS = 20.0

log = logging.getLogger("billing_service")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the worker before the first request, and drain it after the last one."""
    # hide_parameters: a failed statement's values go into no log and no dead letter.
    engine = create_engine(settings.database_url(), hide_parameters=True)
    sqs: SQSClient = boto3.client("sqs")
    queue_url = sqs.get_queue_url(QueueName=settings.queue_name())["QueueUrl"]
    worker = SqsWorker(
        queue_url, inbox=Inbox("billing"), engine=engine, handler=add_purchase, threads=2, wait_seconds=2
    )
    app.state.engine, app.state.sqs, app.state.queue_url, app.state.worker = engine, sqs, queue_url, worker
    # start and stop wait for servers and handlers: not on the event loop.
    await asyncio.to_thread(worker.start)
    try:
        yield
    finally:
        if not await asyncio.to_thread(worker.stop, DRAIN_SECONDS):
            log.warning("not drained within %.0f s; the rest will be delivered again", DRAIN_SECONDS)
        sqs.close()
        engine.dispose()


app = FastAPI(title="billing", lifespan=lifespan)


class Purchase(BaseModel):
    """A purchase, as it is posted and sent."""

    account_id: str
    cents: int


@app.post("/purchases", status_code=202)
def post_purchase(
    purchase: Purchase, request: Request, idempotency_key: Annotated[str, Header(min_length=1, max_length=200)]
) -> dict[str, str]:
    """Send a purchase to the queue.

    The caller chooses the key before its first try and keeps it when it tries again; as ``message-id``, it makes
    both the same message.
    """
    request.app.state.sqs.send_message(
        QueueUrl=request.app.state.queue_url,
        MessageBody=purchase.model_dump_json(),
        MessageAttributes={"message-id": {"DataType": "String", "StringValue": idempotency_key}},
    )
    return {"message_id": idempotency_key}


@app.get("/accounts/{account_id}")
def get_account(account_id: str, request: Request) -> dict[str, object]:
    """Show an account."""
    found = find_account(request.app.state.engine, account_id)
    if found is None:
        raise HTTPException(404, f"nothing was bought for {account_id} yet")
    return found


@app.get("/health")
def get_health(request: Request) -> dict[str, bool]:
    """Say whether the worker is at work; for a liveness probe."""
    if not request.app.state.worker.running:
        raise HTTPException(503, "the worker has stopped")
    return {"running": True}
