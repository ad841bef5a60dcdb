"""A service whose requests are cut short at any moment, as by time-outs: a program, as it may crash.

``python -m support.web.cut_short SOCKET URL STYLE``; each handler sees whether it gets the rows that it has asked for.
"""

import asyncio
import os
import random
import socket
import sys
import time
from typing import Any

import uvicorn
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from support.web.service import engine_for, sessions_of
from support.workers.business import APPLY
from txbox import Inbox
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone

STYLES = ["sync", "async", "asyncpg", "async shielded", "asyncpg shielded"]

ECHO = text("SELECT CAST(:token AS text), pg_sleep(:seconds)")

WHOLE = b"x-whole"
"""A header of requests that are not cut short."""


class CutShort:
    """Cancels most requests somewhere on their way, in one of the ways of asyncio, and answers 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._usual_seconds = 0.05  # that a request takes, on this machine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or any(name == WHOLE for name, _ in scope["headers"]) or random.random() < 0.05:
            began = time.monotonic()
            await self._app(scope, receive, send)
            self._usual_seconds += (time.monotonic() - began - self._usual_seconds) / 10
            return
        has_begun = False

        async def note(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        seconds = random.uniform(0, 0.9 * self._usual_seconds)
        try:
            if random.random() < 0.5:
                await asyncio.wait_for(self._app(scope, receive, note), seconds)
            else:
                async with asyncio.timeout(seconds):
                    await self._app(scope, receive, note)
        except TimeoutError:
            if not has_begun:
                await Response(status_code=503)(scope, receive, send)


def service(url: str, style: str) -> CutShort:
    """Make the service: POST / with a token inserts it into ``effect`` and answers with it.

    Its process ends, and says why, when a handler is given a row of another one.
    """
    is_async = style.startswith("async")
    engine = engine_for(url, style, pool_size=10)
    once = Idempotency(InTransaction(sessions_of(engine), Inbox("billing", wait_seconds=0.2)), caller=everyone)

    def see(row: Any, token: str) -> None:
        if row[0] != token:
            sys.stderr.write(f"{token} was given the row of {row[0]}\n")
            sys.stderr.flush()
            os._exit(3)

    async def work(session: AsyncSession, token: str) -> None:
        see((await session.execute(ECHO, echo(token))).one(), token)
        await session.execute(APPLY, {"id": token, "body": ""})
        see((await session.execute(ECHO, echo(token))).one(), token)

    def work_in_thread(session: Session, token: str) -> None:
        see(session.execute(ECHO, echo(token)).one(), token)
        session.execute(APPLY, {"id": token, "body": ""})
        see(session.execute(ECHO, echo(token)).one(), token)

    shielded: set[asyncio.Future[None]] = set()

    async def buy(request: Request) -> Response:
        session, token = await once(request), (await request.body()).decode()
        if not is_async:
            await run_in_threadpool(work_in_thread, session, token)
        elif style.endswith("shielded"):
            task = asyncio.ensure_future(work(session, token))
            shielded.add(task)
            task.add_done_callback(lambda ended: (shielded.discard(ended), ended.cancelled() or ended.exception()))
            await asyncio.shield(task)
        else:
            await work(session, token)
        return JSONResponse({"token": token}, status_code=201)

    app = Starlette(routes=[Route("/", buy, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)
    return CutShort(app)


def echo(token: str) -> dict[str, Any]:
    return {"token": token, "seconds": random.choice((0, 0.005, 0.02))}


if __name__ == "__main__":
    number, place, chosen = sys.argv[1:]
    listener = socket.socket(fileno=int(number))
    config = uvicorn.Config(service(place, chosen), log_level="critical", ws="none")
    uvicorn.Server(config).run(sockets=[listener])
