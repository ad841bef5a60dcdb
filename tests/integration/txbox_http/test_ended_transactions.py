"""Handlers that end the transaction of their request behind SQLAlchemy: the server refuses, or finds it at the end."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support.web.service import disposing, engine_for, served, sessions_of
from support.workers.business import APPLY, Business
from txbox import Inbox
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone, posts_and_patches

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
STYLES = ["async", "asyncpg", "sync"]
HIDDEN = r"SELECT E'\''; COMMIT; SELECT '1'"
BEHIND_SQLALCHEMY = ["COMMIT", "COMMIT AND CHAIN", "COMMIT; BEGIN", HIDDEN, "ROLLBACK", "ROLLBACK; BEGIN"]


def tea(number: int = 1) -> dict[str, Any]:
    return {"id": f"tea {number}", "body": ""}


async def misbehave(session: AsyncSession, how: str, *, again: bool) -> None:
    """Have an effect before the transaction is ended, and one after it, whatever the driver says to that."""
    await session.execute(APPLY, tea(1))
    with suppress(Exception):
        driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        await driver.execute(how)
    if again:
        await session.execute(APPLY, tea(2))


def misbehave_in_thread(session: Session, how: str, *, again: bool) -> None:
    session.execute(APPLY, tea(1))
    with suppress(Exception):
        driver: Any = session.connection().connection.driver_connection
        driver.execute(how)
    if again:
        session.execute(APPLY, tea(2))


@contextmanager
def serve(url: str, style: str, level: str) -> Iterator[httpx2.Client]:
    """Serve POST /?how=…, which says how the transaction is ended; ?again has an effect after it."""
    engine = engine_for(url, style, isolation_level=level)
    once = Idempotency(InTransaction(sessions_of(engine), Inbox("billing")), caller=everyone, required=False)

    async def endpoint(request: Request) -> Response:
        asked = request.query_params
        await misbehave(once.current(request), asked["how"], again="again" in asked)
        return Response(status_code=201)

    def endpoint_in_thread(request: Request) -> Response:
        asked = request.query_params
        misbehave_in_thread(once.current(request), asked["how"], again="again" in asked)
        return Response(status_code=201)

    path = Route("/", endpoint_in_thread if style == "sync" else endpoint, methods=["POST"])
    app = Starlette(routes=[path], lifespan=disposing(engine))
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
                    answer = client.post("/", params={"how": how, **again}, headers=headers)
                    assert (answer.status_code, business.applied()) == (500, {}), (how, again, headers)
                    assert business.recorded() == set(), (how, again, headers)
        answer = client.post("/", params={"how": "SELECT 1"}, headers={"idempotency-key": "k1"})
        assert (answer.status_code, business.applied(), business.recorded()) == (201, {"tea 1": 1}, {"k1"})
