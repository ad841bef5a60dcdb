"""Sessions that have engines of their own: what a handler does commits with its request, or is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, func, insert, select
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from support.web.service import engine_for
from support.workers.business import Business
from support.workers.mapped import Base, Effect
from txbox import Inbox, InvalidConfiguration, TransactionEnded
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone, posts_and_patches

STYLES = ["sync", "async", "asyncpg"]
EFFECT = insert(Effect).values(message_id="tea", body="")

USES: dict[str, Callable[[Session], object]] = {
    "an entity": lambda session: session.add(Effect(message_id="tea", body="")) or session.flush(),
    "a statement": lambda session: session.execute(EFFECT),
    "a connection": lambda session: session.connection(bind_arguments={"mapper": Effect}).execute(EFFECT),
}
"""Each way in which a session looks for its engine."""


def add(connection: Connection) -> None:
    connection.execute(insert(Effect).values(message_id="added", body=""))


def listen(session: Session) -> None:
    event.listen(session.connection(), "commit", add)


def roll_back(session: Session) -> None:
    session.execute(EFFECT)
    session.rollback()
    session.execute(EFFECT)


MORE_USES = {"a listener": listen, "a rollback": roll_back}


def make(style: str, *engines: Any, session: type[Session] = Session, **options: Any) -> Any:
    if style == "sync":
        return sessionmaker(*engines, class_=session, **options)
    return async_sessionmaker(*engines, sync_session_class=session, **options)


def routing(style: str, engine: Any, other: Any) -> Any:
    class Routing(Session):
        def get_bind(self, mapper: Any = None, *_: Any, **__: Any) -> Engine:
            chosen = engine if mapper is None else other
            made: Engine = getattr(chosen, "sync_engine", chosen)
            return made

    return make(style, session=Routing)


FACTORIES: dict[str, Callable[[str, Any, Any], Any]] = {
    "binds": lambda style, engine, other: make(style, engine, binds={Base: other}),
    "binds with options": lambda style, engine, other: make(
        style, engine, binds={Base: other.execution_options(isolation_level="AUTOCOMMIT")}
    ),
    "get_bind": routing,
}
"""Given a style, make sessions that have one engine for requests, and another one for the class of the effect."""

ALONE: dict[str, Callable[[str, Any, Any], Any]] = {
    "binds alone": lambda style, engine, _: make(style, binds={Base: engine}),
    "binds by table": lambda style, engine, _: make(style, binds={Effect.__table__: engine}),
}
"""These have no engine but that of the effect."""


class Host:
    """A host with two engines of one database."""

    def __init__(self, url: str, style: str) -> None:
        self.style = style
        self.engine, self.other = engine_for(url, style), engine_for(url, style)

    @contextmanager
    def serving(self, sessions: Any) -> Iterator[Callable[..., int]]:
        """Serve requests that use a session in one way; send one, and return its status or raise its error."""
        once = Idempotency(InTransaction(sessions, Inbox("billing")), caller=everyone, required=False)

        async def endpoint(request: Request) -> Response:
            session, use = once.current(request), (USES | MORE_USES)[request.query_params["use"]]
            await (run_in_threadpool(use, session) if self.style == "sync" else session.run_sync(use))
            return Response(status_code=201)

        app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, once, covers=posts_and_patches)
        with TestClient(app) as client:

            def send(use: str, key: str | None) -> int:
                headers = {} if key is None else {"idempotency-key": key}
                return client.post("/", params={"use": use}, headers=headers).status_code

            try:
                yield send
            finally:
                assert client.portal is not None
                for engine in (self.engine, self.other):
                    client.portal.call(engine.dispose)


@pytest.fixture(params=STYLES)
def host(schema_url: str, request: pytest.FixtureRequest) -> Host:
    return Host(schema_url, request.param)


@pytest.mark.parametrize("factory", [*FACTORIES, *ALONE])
def test_of_the_engine_of_requests_they_work_in_its_transaction(host: Host, business: Business, factory: str) -> None:
    with host.serving({**FACTORIES, **ALONE}[factory](host.style, host.engine, host.engine)) as send:
        for use in USES:
            assert [send(use, use.replace(" ", "-")) for _ in range(2)] == [201, 201]
            assert send(use, None) == 201
    assert business.applied() == {"tea": 2 * len(USES)}
    assert business.recorded() == {use.replace(" ", "-") for use in USES}


@pytest.mark.parametrize("factory", FACTORIES)
def test_of_another_engine_they_are_refused(host: Host, business: Business, factory: str) -> None:
    with host.serving(FACTORIES[factory](host.style, host.engine, host.other)) as send:
        for use in USES:
            for key in ("k1", None):
                with pytest.raises(InvalidConfiguration, match=r"an engine of its own, .*\*\*\*"):
                    send(use, key)
    assert business.applied() == {}
    assert business.recorded() == set()


@pytest.mark.parametrize("key", ["k1", None])
@pytest.mark.parametrize("factory", ["binds", "get_bind"])
def test_of_the_same_engine_for_another_schema_they_are_refused(
    host: Host, business: Business, factory: str, key: str | None
) -> None:
    tenant = host.engine.execution_options(schema_translate_map={None: "no_such_schema"})
    with host.serving(FACTORIES[factory](host.style, host.engine, tenant)) as send:
        for use in USES:
            with pytest.raises(InvalidConfiguration, match="schema_translate_map"):
                send(use, key)
    assert business.applied() == {}
    assert business.recorded() == set()


@pytest.mark.parametrize("several", [False, True])
def test_where_no_engine_is_that_of_requests_one_is_asked_for(host: Host, business: Business, several: bool) -> None:
    binds: Any = {Effect: host.engine, Base: host.other} if several else {}
    with host.serving(make(host.style, binds=binds)) as send:
        for key in ("k1", None):
            with pytest.raises(InvalidConfiguration, match="which engine"):
                send("a statement", key)
    assert business.applied() == {}
    assert business.recorded() == set()


@pytest.mark.parametrize("key", ["k1", None])
def test_what_a_host_adds_before_a_commit_commits_with_the_request(
    host: Host, business: Business, key: str | None
) -> None:
    with host.serving(make(host.style, host.engine)) as send:
        assert send("a listener", key) == 201
        event.listen(getattr(host.engine, "sync_engine", host.engine), "commit", add)
        assert send("a statement", key and "k2") == 201
    assert business.applied() == {"tea": 1, "added": 2}


def test_what_comes_after_a_rollback_commits_only_where_no_record_was_rolled_back(
    host: Host, business: Business
) -> None:
    with host.serving(make(host.style, host.engine)) as send:
        with pytest.raises(TransactionEnded):
            send("a rollback", "k1")
        assert (business.applied(), business.recorded()) == ({}, set())
        assert send("a rollback", None) == 201
    assert business.applied() == {"tea": 1}


@pytest.mark.parametrize("key", ["k1", None])
@pytest.mark.parametrize("mode", ["create_savepoint", "control_fully"])
def test_a_session_of_a_hosts_connection_leaves_that_free_to_commit(
    engine: Engine, schema_url: str, business: Business, key: str | None, mode: str
) -> None:
    host = Host(schema_url, "sync")
    with engine.connect() as connection, connection.begin() as transaction:
        with host.serving(sessionmaker(connection, join_transaction_mode=mode)) as send:
            assert send("a statement", key) == 201
        if mode == "create_savepoint":
            assert business.applied() == {}
            transaction.commit()
    assert business.applied() == {"tea": 1}
    assert business.recorded() == ({key} if key else set())


@pytest.mark.parametrize("key", ["k1", None])
def test_a_hosts_connection_serves_several_requests_and_then_the_host(
    engine: Engine, schema_url: str, business: Business, key: str | None
) -> None:
    host = Host(schema_url, "sync")
    with engine.connect() as connection, connection.begin() as transaction:
        with host.serving(sessionmaker(connection, join_transaction_mode="create_savepoint")) as send:
            assert send("a statement", key) == 201
            assert connection.execute(select(func.count()).select_from(Effect)).scalar() == 1
            with pytest.raises(KeyError):
                send("no such use", key and "k2")
            assert send("an entity", key and "k3") == 201
        transaction.commit()
    assert business.applied() == {"tea": 2}
    assert business.recorded() == ({"k1", "k3"} if key else set())


def test_a_request_that_fails_leaves_a_hosts_connection_free_to_commit(
    engine: Engine, schema_url: str, business: Business
) -> None:
    host = Host(schema_url, "sync")
    with engine.connect() as connection:
        with host.serving(sessionmaker(connection)) as send, pytest.raises(KeyError):
            send("no such use", "k1")
        add(connection)
        connection.commit()
    assert business.applied() == {"added": 1}
    assert business.recorded() == set()
