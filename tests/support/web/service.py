"""A web service that sells, in all styles: a program that tests may kill, or a server in a thread of theirs."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

import httpx2
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.concurrency import run_in_threadpool

from support.waiting import wait_until
from support.workers.business import ADD, APPLY
from txbox import Inbox
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone, posts_and_patches
from txbox_http.idempotency import Everyone

STYLES = ["async dependency", "async middleware", "asyncpg dependency", "sync dependency", "sync middleware"]


class Purchase(BaseModel):
    """A purchase, and what its handler does then."""

    item: str
    then: str = ""


Then = Callable[[str], None]
"""Called within the handler, in a thread, with what its purchase says."""

Also = Callable[[Session, Purchase], object]
"""What a handler does in its transaction besides."""


def caller_of(request: Request) -> str | Everyone:
    """The header x-user stands for what a service has made of a token."""
    return request.headers.get("x-user") or everyone(request)


def answer(purchase: Purchase, response: Response) -> dict[str, str]:
    """What a handler answers, or raises, after its effect."""
    if purchase.then == "raise":
        raise ZeroDivisionError("a bug")
    if purchase.then.isdigit():
        raise HTTPException(int(purchase.then), "as was asked for")
    response.status_code = 201
    response.headers["location"] = f"/purchases/{purchase.item}"
    response.set_cookie("session", "secret")
    return {"item": purchase.item * (2_000_000 if purchase.then == "large" else 1)}


def engine_for(url: str, style: str, **options: Any) -> Any:
    """Make the engine of a style."""
    if style.startswith("asyncpg"):
        place = make_url(url)
        path = str(place.query.get("options", "")).removeprefix("-csearch_path=")
        url = place.set(drivername="postgresql+asyncpg", query={}).render_as_string(hide_password=False)
        if path:  # a pooler takes none
            options["connect_args"] = {"server_settings": {"search_path": path}}
    return (create_async_engine if style.startswith("async") else create_engine)(url, **options)


def service(
    url: str,
    style: str = "async dependency",
    *,
    then: Then = lambda _: None,
    also: Also = lambda *_: None,
    inbox: Inbox | None = None,
    level: str = "READ COMMITTED",
    **options: Any,
) -> FastAPI:
    """Make the service: POST /purchases inserts into ``effect`` and adds to ``account``."""
    is_async, covers = style.startswith("async"), posts_and_patches if style.endswith("middleware") else None
    engine = engine_for(url, style, isolation_level=level, pool_size=20)
    inbox = inbox or Inbox("billing", wait_seconds=0.2)
    once = Idempotency(InTransaction(sessions_of(engine), inbox), **{"caller": caller_of, **options})
    app = FastAPI(lifespan=disposing(engine))
    app.add_middleware(IdempotencyMiddleware, once, covers=covers)
    app.state.once = once

    async def buy(
        purchase: Purchase, response: Response, session: Annotated[AsyncSession, Depends(once)]
    ) -> dict[str, str]:
        await session.execute(APPLY, {"id": purchase.item, "body": ""})
        await session.execute(ADD, {"account": 1, "amount": 1})
        await session.run_sync(also, purchase)
        await run_in_threadpool(then, purchase.then)
        return answer(purchase, response)

    def buy_in_thread(
        purchase: Purchase, response: Response, session: Annotated[Session, Depends(once)]
    ) -> dict[str, str]:
        session.execute(APPLY, {"id": purchase.item, "body": ""})
        session.execute(ADD, {"account": 1, "amount": 1})
        also(session, purchase)
        then(purchase.then)
        return answer(purchase, response)

    app.post("/purchases")(buy if is_async else buy_in_thread)
    return app


def sessions_of(engine: Any) -> Any:
    """Make the sessions of an engine."""
    return (async_sessionmaker if isinstance(engine, AsyncEngine) else sessionmaker)(engine)


def disposing(engine: Any) -> Any:
    """Return the lifespan of an application whose engine ends with it."""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        if isinstance(engine, AsyncEngine):
            await engine.dispose()
        else:
            engine.dispose()

    return lifespan


async def no_body() -> dict[str, Any]:
    """Receive a request that has no body."""
    return {"type": "http.request", "body": b"", "more_body": False}


@contextmanager
def served(app: Any) -> Iterator[httpx2.Client]:
    """Serve an application with uvicorn in a thread, and give a client of it."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "it serves")
        port = server.servers[0].sockets[0].getsockname()[1]
        with client_of(port) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def client_of(port: int) -> httpx2.Client:
    """Return a client that opens a connection for each request: uvicorn closes one after an error, in its own time."""
    limits = httpx2.Limits(max_keepalive_connections=0)
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits, trust_env=False)


def buy(client: httpx2.Client, key: str | None, item: str = "tea", then: str = "", **headers: str) -> httpx2.Response:
    """Send a purchase."""
    keyed = {"idempotency-key": f'"{key}"'} if key is not None else {}
    return client.post("/purchases", json={"item": item, "then": then}, headers={**keyed, **headers})
