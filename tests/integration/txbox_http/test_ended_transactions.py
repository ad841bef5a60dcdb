"""Handlers that end the transaction of their request behind SQLAlchemy: the server refuses, or finds it at the end."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx2
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support.web.service import engine_for, served
from support.workers.business import APPLY, Business
from txbox import Inbox
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone, posts_and_patches

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
STYLES = ["async", "asyncpg", "sync"]
HIDDEN = r"SELECT E'\''; COMMIT; SELECT '1'"
BEHIND_SQLALCHEMY = ["COMMIT", "COMMIT AND CHAIN", "COMMIT; BEGIN", HIDDEN, "ROLLBACK", "ROLLBACK; BEGIN"]


def tea(number: int = 1) -> dict[str, Any]:
    return {"id": f"tea {number}", "body": ""}


async def misbehave(session: AsyncSession, how: str) -> None:
    """Have an effect before the transaction is ended, and one after it, whatever the driver says to that."""
    await session.execute(APPLY, tea(1))
    with suppress(Exception):
        driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        await driver.execute(how)
    if "again" in session.info:
        await session.execute(APPLY, tea(2))


def misbehave_in_thread(session: Session, how: str) -> None:
    session.execute(APPLY, tea(1))
    with suppress(Exception):
        driver: Any = session.connection().connection.driver_connection
        driver.execute(how)
    if "again" in session.info:
        session.execute(APPLY, tea(2))


@contextmanager
def serve(url: str, style: str, level: str) -> Iterator[httpx2.Client]:
    """Serve POST /, whose body says how the transaction is ended, and ?again that there is an effect after it."""
    engine = engine_for(url, style, isolation_level=level)
    sessions: Any = (sessionmaker if style == "sync" else async_sessionmaker)(engine)
    once = Idempotency(InTransaction(sessions, Inbox("billing")), caller=everyone, required=False)

    async def endpoint(request: Request) -> Response:
        session = once.current(request)
        if "again" in request.query_params:
            session.info["again"] = True
        await misbehave(session, (await request.body()).decode())
        return Response(status_code=201)

    def endpoint_in_thread(request: Request) -> Response:
        session = once.current(request)
        if "again" in request.query_params:
            session.info["again"] = True
        misbehave_in_thread(session, request.query_params["how"])
        return Response(status_code=201)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        if style == "sync":
            engine.dispose()
        else:
            await engine.dispose()

    path = Route("/", endpoint_in_thread if style == "sync" else endpoint, methods=["POST"])
    app = Starlette(routes=[path], lifespan=lifespan)
    app.add_middleware(IdempotencyMiddleware, once, covers=posts_and_patches)
    with served(app) as client:
        yield client


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("style", STYLES)
def test_what_is_committed_or_rolled_back_behind_sqlalchemy_is_not_recorded_without_its_effect(
    schema_url: str, business: Business, style: str, level: str
) -> None:
    with serve(schema_url, style, level) as client:
        for how in BEHIND_SQLALCHEMY:
            for again in ({}, {"again": ""}):
                for headers in ({"idempotency-key": "k1"}, {}):
                    answer = client.post("/", params={"how": how, **again}, content=how, headers=headers)
                    assert (answer.status_code, business.applied()) == (500, {}), (how, again, headers)
                    assert business.recorded() == set(), (how, again, headers)
        answer = client.post("/", params={"how": "SELECT 1"}, content="SELECT 1", headers={"idempotency-key": "k1"})
        assert (answer.status_code, business.applied(), business.recorded()) == (201, {"tea 1": 1}, {"k1"})
