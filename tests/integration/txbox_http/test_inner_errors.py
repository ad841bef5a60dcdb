"""Applications inside that make something else of an error: mounted ones answer 500, task groups wrap it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import anyio
import httpx2
import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from support.web.service import engine_for, served
from support.workers.business import APPLY, Business
from txbox import Inbox
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
INSIDE = ["mounted", "mounted, with a handler of Exception", "task group", "mounted, task group", "caught"]
AT_ONCE = 6


class TaskGroup:
    """Runs the application in a task group, which wraps its errors, as middlewares do that watch a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self._app, scope, receive, send)


class CatchAnswers:
    """Answers 500 to every error, and does not raise it again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:  # noqa: BLE001 - that is what it does
            await JSONResponse({"detail": "caught"}, 500)(scope, receive, send)


@contextmanager
def serving(schema_url: str, inside: str, level: str, barrier: threading.Barrier | None = None) -> Iterator[Any]:
    engine = engine_for(schema_url, "async", isolation_level=level, pool_size=AT_ONCE)
    once = Idempotency(InTransaction(async_sessionmaker(engine), Inbox("billing", wait_seconds=0.2)), caller=everyone)
    app = FastAPI()
    inner = FastAPI() if "mounted" in inside else app

    @inner.post("/buy/{item}", status_code=201)
    async def buy(item: str, session: Annotated[AsyncSession, Depends(once)], then: str = "") -> dict[str, str]:
        await session.execute(text("SELECT balance FROM account WHERE account_id = 1"))
        if barrier is not None and not barrier.broken:
            with suppress(threading.BrokenBarrierError):
                await run_in_threadpool(barrier.wait, 5)
        await session.execute(text("UPDATE account SET balance = balance + 1 WHERE account_id = 1"))
        await session.execute(APPLY, {"id": item, "body": ""})
        if then == "raise":
            raise ZeroDivisionError
        return {"item": item}

    if "handler" in inside:

        def failed(_: Request, __: Exception) -> JSONResponse:
            return JSONResponse({"detail": "failed"}, 500)

        inner.add_exception_handler(Exception, failed)
    if "task group" in inside:
        inner.add_middleware(TaskGroup)
    if "caught" in inside:
        inner.add_middleware(CatchAnswers)
    if inner is not app:
        app.mount("/v1", inner)
    app.add_middleware(IdempotencyMiddleware, once)
    with served(app) as client:
        path = "/v1/buy" if inner is not app else "/buy"
        yield lambda key, item="tea", **query: client.post(
            f"{path}/{item}", params=query, headers={} if key is None else {"idempotency-key": key}
        )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inside", INSIDE)
def test_a_repeat_and_a_problem_are_answered_by_the_middleware(
    schema_url: str, business: Business, inside: str, level: str
) -> None:
    with serving(schema_url, inside, level) as buy:
        first, again = buy("k1"), buy("k1")
        assert (first.status_code, again.status_code) == (201, 201)
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true"
        reused = buy("k1", "coffee")
        assert (reused.status_code, reused.json()["title"]) == (422, "Idempotency-Key is already used")
        missing = buy(None)
        assert (missing.status_code, missing.headers["content-type"]) == (400, "application/problem+json")
        failed = buy("k2", "milk", then="raise")
        assert failed.status_code == 500
        assert "handler" not in inside or failed.json() == {"detail": "failed"}
    assert business.recorded() == {"k1"}
    assert business.applied() == {"tea": 1}


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("inside", [one for one in INSIDE if one != "caught"])
def test_a_conflict_is_run_again(
    schema_url: str, business: Business, pool: ThreadPoolExecutor, inside: str, level: str
) -> None:
    barrier = threading.Barrier(AT_ONCE)
    with serving(schema_url, inside, level, barrier) as buy:

        def request(number: int) -> httpx2.Response:
            response: httpx2.Response = buy(f"k{number}", f"item-{number}")
            barrier.abort()  # who has met others once runs on
            return response

        statuses = [response.status_code for response in pool.map(request, range(AT_ONCE))]
    assert set(statuses) <= {201, 503}, statuses
    assert 201 in statuses
    assert len(business.applied()) == statuses.count(201)
