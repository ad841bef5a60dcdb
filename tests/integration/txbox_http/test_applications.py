"""What applications do: streams, background tasks, commits of their own; plain handlers of Starlette."""

import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import anyio
import httpx2
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from support.waiting import wait_until
from support.web.service import disposing, engine_for, served, sessions_of
from support.workers.business import APPLY, Business
from txbox import Inbox, InvalidConfiguration, StatementLeftOpen, TransactionEnded
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone, posts_and_patches
from txbox_http.idempotency import EXCHANGES

Handler = Callable[[Idempotency, Request], Any]
Serve = Callable[..., AbstractContextManager[httpx2.Client]]
POST = {"headers": {"idempotency-key": "k1"}, "content": b"tea"}


@pytest.fixture
def errors() -> list[BaseException]:
    """What applications have raised, which a server logs."""
    return []


@pytest.fixture
def serve(schema_url: str, business: Business, errors: list[BaseException]) -> Serve:
    """Serve one handler of Starlette: serve(handler, covers=..., style="async", **options)."""

    @contextmanager
    def serve(
        handler: Handler,
        *,
        covers: Any = None,
        around: Any = None,
        style: str = "async",
        mounted: bool = False,
        **options: Any,
    ) -> Iterator[httpx2.Client]:
        engine = engine_for(schema_url, style)
        inbox = Inbox("billing", wait_seconds=0.2)
        once = Idempotency(InTransaction(sessions_of(engine), inbox), **{"caller": everyone, **options})

        if style == "sync":

            def endpoint(request: Request) -> Any:
                return handler(once, request)
        else:

            async def endpoint(request: Request) -> Any:
                return await handler(once, request)

        app = Starlette(routes=[Route("/", endpoint, methods=["GET", "POST"])], lifespan=disposing(engine))
        app.add_exception_handler(IntegrityError, lambda *_: Response(status_code=409))
        if around is not None:
            app.add_middleware(BaseHTTPMiddleware, dispatch=around)
        app.add_middleware(IdempotencyMiddleware, once, covers=covers)
        if around is not None:
            app.add_middleware(BaseHTTPMiddleware, dispatch=around)

        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            if mounted:
                scope["endpoint"] = app  # as Mount does it, whose lifespan would not be run
            try:
                await app(scope, receive, send)
            except Exception as error:
                errors.append(error)
                raise

        with served(noting) as client:
            yield client

    return serve


async def apply(session: AsyncSession) -> None:
    await session.execute(APPLY, {"id": "tea", "body": ""})


def test_a_handler_of_starlette_begins_by_itself_before_or_after_it_reads_the_body(
    serve: Serve, business: Business
) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        if "late" in request.query_params:
            body = b"".join([part async for part in request.stream()])
            session = await once.begin(request, "ada")
        else:
            session = await once(request)
            body = b"".join([part async for part in request.stream()])
        assert session is await once(request)
        await apply(session)
        return PlainTextResponse(body, 201)

    with serve(handler) as client:
        for path, key in (("/", "k1"), ("/?late", "k2")):
            post = {"headers": {"idempotency-key": key}, "content": b"tea" * 100_000}
            first, again = (client.post(path, **post) for _ in range(2))
            assert (first.status_code, first.content, again.content) == (201, post["content"], post["content"])
            assert again.headers["idempotent-replayed"] == "true"
    assert business.applied() == {"tea": 2}
    assert business.recorded() == {"k1", "ada k2"}


def test_without_the_middleware_the_application_is_told_what_is_missing() -> None:
    once = Idempotency(InTransaction(sessionmaker(), Inbox("billing")), caller=everyone)
    with pytest.raises(InvalidConfiguration, match=r"app.add_middleware\(IdempotencyMiddleware, once\)"):
        once.current(Request({"type": "http", "headers": []}))


def test_a_request_whose_caller_has_no_name_is_not_taken_for_everyones(
    serve: Serve, business: Business, errors: list[BaseException]
) -> None:
    names: dict[str, Any] = {"none": None, "int": 1, "blank": ""}

    async def handler(once: Idempotency, request: Request) -> Response:
        if "begin" in request.query_params:
            await apply(await once.begin(request, names[request.query_params["name"]]))
        else:
            await apply(await once(request))
        return Response(status_code=201)

    with serve(handler, caller=lambda request: names[request.query_params["name"]]) as client:
        for said in ("name=none", "name=none&begin", "name=int", "name=blank"):
            assert client.post(f"/?{said}", **POST).status_code == 500, said
    assert all(isinstance(error, InvalidConfiguration) for error in errors)
    assert [str(error).split(":")[0] for error in errors[:3:2]] == [
        "this request has no caller, but None",
        "a caller's name must be a str, not int",
    ]
    assert business.applied() == {}


def test_a_coroutine_function_is_no_caller() -> None:
    async def caller(_: Request) -> str:
        return "ada"

    with pytest.raises(InvalidConfiguration, match="coroutine function"):
        Idempotency(InTransaction(sessionmaker(), Inbox("billing")), caller=caller)  # type: ignore[arg-type]


def test_middlewares_of_the_application_may_stand_on_either_side(serve: Serve, business: Business) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        session = await once(request)
        await apply(session)
        return PlainTextResponse(await request.body(), 201)

    with serve(handler, around=pass_on) as client:
        first, again = (client.post("/", **POST) for _ in range(2))
        other = client.post("/", **{**POST, "content": b"coffee"})
    assert (first.status_code, first.content, again.content, other.status_code) == (201, b"tea", b"tea", 422)
    assert business.applied() == {"tea": 1}


def test_a_function_finds_the_session_that_the_middleware_has_begun(serve: Serve, business: Business) -> None:
    def handler(once: Idempotency, request: Request) -> Response:
        session: Session = once.current(request)
        session.execute(APPLY, {"id": "tea", "body": ""})
        return JSONResponse({}, 201)

    with serve(handler, covers=posts_and_patches, style="sync") as client:
        assert [client.post("/", **POST).status_code for _ in range(2)] == [201, 201]
    assert business.applied() == {"tea": 1}


def test_a_stream_is_held_until_the_commit_and_kept_whole(serve: Serve, business: Business) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        session = await once(request)

        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            await apply(session)  # an effect while the response is under way
            yield b"b"

        return StreamingResponse(parts())

    with serve(handler) as client:
        first, again = (client.post("/", **POST) for _ in range(2))
    assert (first.content, again.content) == (b"ab", b"ab")
    assert business.applied() == {"tea": 1}


async def pass_on(request: Request, call_next: Any) -> Response:
    """As a middleware, take the answer apart and put it together again."""
    response: Response = await call_next(request)
    return response


async def begin_and_pass_on(request: Request, call_next: Any) -> Response:
    """As a middleware inside, begin the request for the handler."""
    for once in request.scope.get(EXCHANGES, {}):
        await once(request)
    return await pass_on(request, call_next)


@pytest.mark.parametrize(
    ("around", "covers"), [(pass_on, None), (begin_and_pass_on, None), (pass_on, posts_and_patches)]
)
@pytest.mark.parametrize("mounted", [False, True])
def test_a_stream_that_fails_is_rolled_back_though_a_middleware_has_ended_its_body(
    serve: Serve, business: Business, errors: list[BaseException], around: Any, covers: Any, mounted: bool
) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        await apply(await once(request))

        async def parts() -> AsyncIterator[bytes]:
            if "late" in request.query_params:
                yield b"a"
            raise ZeroDivisionError

        return StreamingResponse(parts())

    with serve(handler, around=around, covers=covers, mounted=mounted) as client:
        for path in ("/", "/?late"):
            assert client.post(path, **POST).status_code == 500, path
            assert isinstance(errors.pop(), ZeroDivisionError)
            assert errors == []
            assert business.applied() == {}, path


def test_a_stream_whose_client_leaves_is_kept_whole(serve: Serve, business: Business) -> None:
    entered, left = threading.Event(), threading.Event()

    async def handler(once: Idempotency, request: Request) -> Response:
        await apply(await once(request))

        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            entered.set()
            await run_in_threadpool(left.wait, 30)
            # Time for what would stop the stream: nothing says that it is not going to.
            await anyio.sleep(0.2)
            yield b"b"

        return StreamingResponse(parts())

    with serve(handler, around=pass_on) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k1\r\nContent-Length: 3\r\n\r\ntea")
            assert entered.wait(30)
        left.set()
        wait_until(lambda: business.recorded() == {"k1"}, "it has committed")
        again = client.post("/", **POST)
    assert again.content == b"ab"


def test_messages_beside_the_response_do_not_fail_it_and_are_not_kept(schema_url: str, business: Business) -> None:
    engine = create_engine(schema_url)
    once = Idempotency(InTransaction(sessionmaker(engine), Inbox("billing")), caller=everyone)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await once(Request(scope, receive))
        await send({"type": "http.response.debug", "info": {"a": 1}})  # of a template, for TestClient
        await send({"type": "http.response.early_hint", "links": []})
        await send({"type": "http.response.start", "status": 201, "headers": [], "trailers": True})
        await send({"type": "http.response.body", "body": b"a"})
        await send({"type": "http.response.trailers", "headers": [(b"b", b"c")]})

    client = TestClient(IdempotencyMiddleware(app, once))
    first, again = (client.post("/", **POST) for _ in range(2))
    engine.dispose()
    assert first.extensions["http.response.debug"] == {"a": 1}
    assert (first.status_code, first.content, again.status_code, again.content) == (201, b"a", 201, b"a")
    assert business.recorded() == {"k1"}


@pytest.mark.parametrize("kind", [Response, StreamingResponse])
def test_a_background_task_runs_after_the_commit_and_not_for_a_repeat(
    serve: Serve, business: Business, kind: Any
) -> None:
    seen: list[Counter[str]] = []

    async def handler(once: Idempotency, request: Request) -> Response:
        await apply(await once(request))
        task = BackgroundTask(lambda: seen.append(business.applied()))
        return kind(background=task) if kind is Response else kind(parts(), background=task)

    async def parts() -> AsyncIterator[bytes]:
        yield b"a"

    with serve(handler) as client:
        for _ in range(2):
            client.post("/", **POST)
    assert seen == [{"tea": 1}]


@pytest.mark.parametrize("style", ["async", "asyncpg", "sync"])
def test_what_comes_after_the_response_is_refused_and_not_lost(
    serve: Serve, business: Business, errors: list[BaseException], style: str
) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        session = await once(request)
        await apply(session)
        return Response(status_code=201, background=BackgroundTask(apply, session))

    def handler_in_thread(once: Idempotency, request: Request) -> Response:
        session: Session = once.current(request)
        session.execute(APPLY, {"id": "tea", "body": ""})
        return Response(status_code=201, background=BackgroundTask(session.execute, APPLY, {"id": "late", "body": ""}))

    is_sync = style == "sync"
    options: dict[str, Any] = {"style": style, "required": False, "covers": posts_and_patches if is_sync else None}
    with serve(handler_in_thread if is_sync else handler, **options) as client:
        for number, headers in enumerate([{}, POST["headers"]], 1):
            assert client.post("/", headers=headers).status_code == 201
            wait_until(lambda: errors, "it is refused")
            assert isinstance(errors.pop(), InvalidRequestError)
            assert business.applied() == {"tea": number}


WAYS_TO_END = (
    "commit",
    "connection",
    "connection, swallowed",
    "rollback",
    "undo",
    "COMMIT",
    "COMMIT AND CHAIN",
    "ROLLBACK",
    "swallow",
)


@pytest.mark.parametrize("driver", ["async", "asyncpg"])
def test_a_handler_that_ends_the_transaction_is_told_so_and_nothing_is_said_to_be_done(
    serve: Serve, business: Business, driver: str, errors: list[BaseException]
) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        session = await once(request)
        await apply(session)
        match how := (await request.body()).decode():
            case "commit":
                await session.commit()
            case "rollback":
                await session.rollback()
                await apply(session)  # in another transaction, which has not recorded the request
            case "connection" | "connection, swallowed":
                with suppress(TransactionEnded) if how.endswith("swallowed") else nullcontext():
                    await (await session.connection()).commit()
            case "undo":
                await (await session.connection()).rollback()
                await apply(session)
            case "COMMIT" | "COMMIT AND CHAIN" | "ROLLBACK":
                await session.execute(text(how))
                await apply(session)  # by itself, where the driver thinks that it is in the transaction
            case "swallow":
                with pytest.raises(Exception, match="division"):
                    await session.execute(text("SELECT 1/0"))
        return Response(status_code=201)

    expected: dict[str, type[Exception]] = dict.fromkeys(WAYS_TO_END, TransactionEnded)
    expected["connection, swallowed"] = PendingRollbackError
    if driver == "asyncpg":  # it does not tell that a transaction is aborted; the server refuses the next statement
        expected["swallow"] = DBAPIError
    with serve(handler, style=driver) as client:
        for how in WAYS_TO_END:
            # The second one finds nothing of the first, of which no open transaction may be left in the pool.
            for _ in range(2):
                assert client.post("/", **{**POST, "content": how}).status_code == 500, how
                assert isinstance(errors.pop(), expected[how]), how
                assert errors == []
            assert business.applied() == {}, how
            assert business.recorded() == set(), how


@pytest.mark.parametrize("driver", ["async", "asyncpg"])
def test_without_a_key_too_a_swallowed_error_is_not_said_to_be_done_and_a_response_may_be_large(
    serve: Serve, business: Business, driver: str
) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        session = await once(request)
        if "large" in request.query_params:
            return PlainTextResponse("x" * 2_000_000)
        await apply(session)
        with pytest.raises(Exception, match="division"):
            await session.execute(text("SELECT 1/0"))
        return Response(status_code=201)

    with serve(handler, style=driver, required=False) as client:
        assert client.post("/").status_code == 500
        assert client.post("/?large").status_code == 200
    assert business.applied() == {}


def test_a_stream_of_the_driver_that_a_handler_leaves_open_does_not_hold_the_service_up(
    serve: Serve, business: Business, errors: list[BaseException]
) -> None:
    left_open: list[Any] = []

    def handler(once: Idempotency, request: Request) -> Response:
        session: Session = once.current(request)
        left_open.append(session.connection().connection.cursor().stream("SELECT * FROM generate_series(1, 9)"))
        next(left_open[-1])
        return Response(status_code=201)

    with serve(handler, covers=posts_and_patches, style="sync") as client:
        assert client.post("/", **POST).status_code == 500
    assert isinstance(errors.pop(), StatementLeftOpen)
    assert business.recorded() == set()


def test_a_savepoint_is_the_handlers_own(serve: Serve, business: Business) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        session = await once(request)
        async with session.begin_nested():
            await apply(session)
        return Response(status_code=201)

    with serve(handler) as client:
        assert client.post("/", **POST).status_code == 201
    assert business.applied() == {"tea": 1}


def test_what_fails_at_the_commit_is_not_said_to_be_done(
    serve: Serve, business: Business, errors: list[BaseException]
) -> None:
    with business.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE deferred (id int, UNIQUE (id) DEFERRABLE INITIALLY DEFERRED)")

    async def handler(once: Idempotency, request: Request) -> Response:
        session = await once(request)
        for _ in range(2):
            await session.execute(text("INSERT INTO deferred VALUES (1)"))
        return Response(status_code=201)

    with serve(handler) as client:
        assert client.post("/", **POST).status_code == 500
    # Starlette would have its handler's answer follow one that has begun, and say so; the reason is what counts.
    assert isinstance(errors.pop(), IntegrityError)
    assert business.recorded() == set()


def test_requests_that_need_no_key_pass_and_those_without_one_may(serve: Serve, business: Business) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        if request.method == "GET":
            return FileResponse(__file__)  # not held, so it may be sent as servers like
        await apply(await once(request))
        return Response(status_code=int(request.query_params.get("status", 201)))

    with serve(handler, required=False) as client:
        assert client.get("/", headers={"idempotency-key": "k1"}).status_code == 200
        assert [client.post("/").status_code for _ in range(2)] == [201, 201]
        assert client.post("/?status=400").status_code == 400
    assert business.applied() == {"tea": 2}
    assert business.recorded() == set()


def test_statuses_of_the_services_own_choice_are_kept(serve: Serve, business: Business) -> None:
    async def handler(once: Idempotency, request: Request) -> Response:
        await apply(await once(request))
        return PlainTextResponse("the card was declined", 402)

    with serve(handler, keeps=lambda status: status < 500) as client:
        first, again = (client.post("/", **POST) for _ in range(2))
    assert (first.status_code, again.status_code, again.text) == (402, 402, "the card was declined")
    assert business.applied() == {"tea": 1}
