"""Requests with a key under a lease, with both ledgers: the effect is a call that no transaction covers."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import Engine
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from support.txbox.horizon import LONG_AGO, id_of, move_horizon
from support.txbox.leases import Store, acquired, dynamodb_store, postgres_store
from support.web.service import Purchase, buy, served
from txbox.errors import EffectUnknown
from txbox.leases import Lease, Ledger, PostgresLedger
from txbox_http import Idempotency, IdempotencyMiddleware, UnderLease, everyone
from txbox_http.idempotency import Caller


@pytest.fixture(params=["postgres", "dynamodb"])
def store(request: pytest.FixtureRequest, engine: Engine, schema_url: str) -> Store:
    if request.param == "postgres":
        return postgres_store(engine, schema_url)
    return dynamodb_store(request.getfixturevalue("dynamodb"))


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return store.ledger("charging")


class Bank:
    """What charges cards, and is told by a purchase what to do then."""

    def __init__(self) -> None:
        self.charged: list[tuple[str, int]] = []
        self.entered = threading.Event()
        self.free = threading.Event()

    def charge(self, purchase: Purchase, lease: Lease) -> str:
        self.charged.append((purchase.item, lease.unknown_attempts))
        match purchase.then:
            case "wait":
                self.entered.set()
                assert self.free.wait(30)
            case "unknown":
                raise EffectUnknown("no answer")
            case "402" | "502" as status:
                raise HTTPException(int(status))
        return "x" * 2_000_000 if purchase.then == "large" else "done"


Serve = Callable[..., AbstractContextManager[httpx2.Client]]


def shop(ledger: Ledger, bank: Bank, caller: Caller = everyone) -> FastAPI:
    once = Idempotency(UnderLease(ledger), caller=caller)
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, once)

    @app.post("/purchases", status_code=201)
    async def charge(purchase: Purchase, lease: Annotated[Any, Depends(once)]) -> str:
        return await run_in_threadpool(bank.charge, purchase, lease)

    return app


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
def client(ledger: Ledger, bank: Bank) -> Iterator[httpx2.Client]:
    with served(shop(ledger, bank)) as client:
        yield client


def test_a_repeat_gets_the_answer_and_another_request_is_refused(client: httpx2.Client, bank: Bank) -> None:
    first, again, other = buy(client, "k1"), buy(client, "k1"), buy(client, "k1", "coffee")
    assert (first.status_code, first.json()) == (201, "done")
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (201, first.content, "true")
    assert other.status_code == 422
    assert bank.charged == [("tea", 0)]


def test_one_of_two_requests_at_once_is_told_to_come_later(
    client: httpx2.Client, bank: Bank, pool: ThreadPoolExecutor
) -> None:
    first = pool.submit(buy, client, "k1", then="wait")
    assert bank.entered.wait(30)
    second = buy(client, "k1", then="wait")
    bank.free.set()
    assert (second.status_code, second.headers["retry-after"]) == (409, "1")
    assert first.result().status_code == 201
    assert len(bank.charged) == 1


def test_after_a_failure_the_key_is_free_and_the_next_attempt_knows_what_is_unknown(
    client: httpx2.Client, bank: Bank
) -> None:
    for then, status, unknown in (("402", 402, 0), ("502", 502, 1), ("unknown", 500, 1)):
        assert buy(client, then, then=then).status_code == status
        # The same request: the ledger has the fingerprint of the first.
        buy(client, then, then=then)
        assert bank.charged == [("tea", 0), ("tea", unknown)], then
        bank.charged.clear()


@pytest.mark.parametrize("how", ["fails", "is cut"])
def test_after_a_response_that_is_not_whole_the_next_attempt_is_told(engine: Engine, how: str) -> None:
    once = Idempotency(UnderLease(PostgresLedger("charging", engine=engine)), caller=everyone)
    told = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        lease = await once(Request(scope, receive))
        told.append(lease.unknown_attempts)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if how == "fails":
            raise ZeroDivisionError

    client = TestClient(IdempotencyMiddleware(app, once), raise_server_exceptions=False)
    for _ in range(2):
        assert client.post("/", headers={"idempotency-key": "k1"}).status_code == 500
    assert told == [0, 1]


def test_a_response_that_is_too_large_is_sent_once_and_its_effect_is_not_repeated(
    client: httpx2.Client, bank: Bank
) -> None:
    first, again = buy(client, "k1", then="large"), buy(client, "k1", then="large")
    assert (first.status_code, len(first.json())) == (201, 2_000_000)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (204, "true")
    assert len(bank.charged) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_a_stream_that_is_too_large_to_be_held_is_sent_as_it_comes_but_for_its_end(engine: Engine, lost: bool) -> None:
    once, free = Idempotency(UnderLease(PostgresLedger("charging", engine=engine)), caller=everyone), threading.Event()

    async def handler(request: Request) -> StreamingResponse:
        await once(request)

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"a" * 600_000
            assert await run_in_threadpool(free.wait, 10)
            yield b"b"

        return StreamingResponse(parts())

    app = Starlette(routes=[Route("/", handler, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once)
    post = {"headers": {"idempotency-key": "k1"}}
    with served(app) as client, client.stream("POST", "/", **post) as response:
        body = response.iter_bytes()
        size = len(next(body))
        if lost:
            with engine.begin() as connection:
                connection.exec_driver_sql("UPDATE message_lease SET fence = fence + 1, owner = 'another'")
        free.set()
        if lost:
            with pytest.raises(httpx2.RemoteProtocolError):
                list(body)
        else:
            assert size + sum(map(len, body)) == 1_800_001
            assert client.post("/", **post).status_code == 204


def test_after_the_death_of_a_process_the_next_attempt_comes_with_the_end_of_its_lease_and_is_told(
    store: Store, client: httpx2.Client, bank: Bank
) -> None:
    acquired(store.ledger("charging"), "k1", lease_seconds=600)  # by a process that dies then
    assert buy(client, "k1").status_code == 409
    store.expire("k1")
    assert buy(client, "k1").status_code == 201
    assert bank.charged == [("tea", 1)]


def test_a_callers_key_from_before_the_horizon_is_refused(engine: Engine, bank: Bank) -> None:
    move_horizon(engine, subscriber_id="charging")
    with served(shop(PostgresLedger("charging", engine=engine), bank, caller=lambda _: "ada")) as client:
        assert buy(client, id_of(LONG_AGO)).status_code == 422
    assert bank.charged == []


def test_a_lease_that_was_lost_is_not_said_to_be_done(engine: Engine, bank: Bank, pool: ThreadPoolExecutor) -> None:
    with served(shop(PostgresLedger("charging", engine=engine), bank)) as client:
        first = pool.submit(buy, client, "k1", then="wait")
        assert bank.entered.wait(30)
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE message_lease SET fence = fence + 1, owner = 'another'")
        bank.free.set()
        assert first.result().status_code == 500
