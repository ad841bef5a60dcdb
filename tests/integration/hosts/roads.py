"""Roads by which a host has messages applied: each is given two messages and a duplicate of the first.

Each raises ``TxboxError``, or ``Unusable``, where it refuses the host.
"""

import asyncio
import gc
import re
from collections import Counter
from collections.abc import Callable
from html import unescape
from typing import Annotated, Any

from celery import Celery
from django.db import connections
from django.db.backends.signals import connection_created
from fastapi import Depends, FastAPI
from pyspark.sql import SparkSession
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from integration.hosts.shapes import Host, Place
from support.aws.lambda_events import Context, event, record
from support.django_shop import project
from support.postgres.host_loaders import register_at
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers import async_worker
from support.workers.business import APPLY, apply
from support.workers.memory_worker import AT_ONCE, at_work, make, messages
from txbox import AsyncInbox, Inbox, Message, Outbox
from txbox.instrumentation import DatabaseLost, Event
from txbox.relay import Relay
from txbox_aws.lambda_ import sqs_handler
from txbox_celery import inbox_task
from txbox_dashboard import dashboard
from txbox_django import database_engine, orm_worker
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone
from txbox_spark import bulk_load
from txbox_workers.memory_source import MemorySource
from txbox_workers.processing.outage_errors import DatabaseUnavailable
from txbox_workers.worker import Worker

IDS = ("ä1", "ä2", "ä1")
PAGES = ("/", "/subscriber?id=billing", "/message?id=ä1", "/letters", "/outbox", "/leases", "/loads", "/maintenance")


class Unusable(Exception):
    """What a page or a task shows while the database cannot be used; without a text, it is what was logged."""


class Losses:
    """A worker's source, and whether the worker, or a relay, has lost the database."""

    def __init__(self) -> None:
        self.source = MemorySource(messages(*IDS))
        self.any = False

    def __call__(self, event: Event) -> None:
        self.any = self.any or isinstance(event, DatabaseLost)

    def wait(self) -> None:
        """Wait until all is acked, or the database is lost."""
        wait_until(lambda: self.any or self.source.wait_until_empty(0), "all is acked", timeout=20)

    def tell(self) -> None:
        """Raise ``Unusable`` if the database was lost."""
        if self.any:
            raise Unusable


def by_worker(host: Host, engine: Engine) -> None:
    losses = Losses()
    sessions = sessionmaker(**host.sessions(engine))
    with at_work(make(losses.source, engine, session_factory=sessions, hooks=[losses])):
        losses.wait()
    losses.tell()


async def by_async_worker(host: Host, engine: Any) -> None:
    losses = Losses()
    sessions = async_sessionmaker(**async_sessions(host, engine))
    async with async_worker.make(losses.source, engine, session_factory=sessions, hooks=[losses]):
        await asyncio.to_thread(losses.wait)
    losses.tell()


def async_sessions(host: Host, engine: Any) -> dict[str, Any]:
    """Return options of an ``async_sessionmaker``."""
    options = host.sessions(engine)
    return {"sync_session_class": options["class_"]} if "class_" in options else options


def by_function(host: Host, engine: Engine) -> None:
    sessions = sessionmaker(**host.sessions(engine))
    handle = sqs_handler(inbox=Inbox("billing"), engine=engine, handler=apply, session_factory=sessions)
    for id_ in IDS:
        assert handle(event(record(id_)), Context(30)) == {"batchItemFailures": []}


def by_request(host: Host, engine: Engine) -> None:
    sessions = sessionmaker(engine, **host.sessions(engine))
    app, once = service(InTransaction(sessions, Inbox("billing")))

    @app.post("/{item}")
    def buy(item: str, session: Annotated[Session, Depends(once)]) -> None:
        session.execute(APPLY, {"id": item, "body": ""})

    with TestClient(app) as client:
        ask(client)


async def by_async_request(host: Host, engine: Any) -> None:
    sessions = async_sessionmaker(engine, **async_sessions(host, engine))
    app, once = service(InTransaction(sessions, AsyncInbox("billing")))

    @app.post("/{item}")
    async def buy(item: str, session: Annotated[AsyncSession, Depends(once)]) -> None:
        await session.execute(APPLY, {"id": item, "body": ""})

    def ask_and_close() -> None:  # the client has a loop of its own
        with TestClient(app) as client:
            try:
                ask(client)
            finally:
                assert client.portal is not None
                client.portal.call(engine.dispose)

    await asyncio.to_thread(ask_and_close)


def service(strength: InTransaction) -> tuple[FastAPI, Idempotency]:
    once = Idempotency(strength, caller=everyone)
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, once)
    return app, once


def ask(client: TestClient) -> None:
    for id_ in IDS:
        key = id_.replace("ä", "a")  # a header is ASCII
        client.post(f"/{id_}", headers={"idempotency-key": f'"{key}"'}).raise_for_status()


def by_task(_: Host, engine: Engine) -> None:
    app = Celery("hosts", set_as_current=False)

    @inbox_task(app, inbox=Inbox("billing"), engine=engine)
    def buy(session: Session, id_: str) -> None:
        session.execute(APPLY, {"id": id_, "body": ""})

    try:
        for id_ in IDS:
            buy.apply((id_,), task_id=id_).get()
    except DatabaseUnavailable as error:  # what Celery is to send again
        raise Unusable(str(error)) from error
    finally:
        app.close()


def by_django(host: Host, place: Place) -> None:
    """Django makes the connections, of the same URL."""
    project.use(place.url)
    connections["default"].settings_dict["OPTIONS"] |= host.options.get("connect_args", {})
    losses = Losses()

    def register(connection: Any, **_: object) -> None:
        register_at(connection.connection, host.loaders)

    def handle(message: Message) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("INSERT INTO effect (message_id, body) VALUES (%s, '')", [message.id])

    connection_created.connect(register)
    engine = database_engine(**{name: value for name, value in host.options.items() if name != "connect_args"})
    worker = orm_worker(
        Worker, losses.source, handler=handle, engine=engine, inbox=Inbox("billing"), backoff=AT_ONCE, hooks=[losses]
    )
    try:
        with at_work(worker):
            losses.wait()
    finally:
        connection_created.disconnect(register)
        engine.dispose()
        connections.close_all()
    losses.tell()


def by_load(place: Place, spark: SparkSession) -> None:
    """A load connects by its URL; it takes neither an engine nor sessions."""
    events = spark.createDataFrame([(id_,) for id_ in IDS], "id string").coalesce(1)
    apply = "INSERT INTO effect (message_id, body) SELECT id, '' FROM fresh_event"
    bulk_load(events, url=place.url, subscriber_id="billing", message_id="id", apply=apply, force=True)


def by_relay(host: Host, engine: Engine) -> None:
    broker, losses = RecordingPublisher(), Losses()
    with at_work(Relay(engine, {"own": broker}, hooks=[losses])):
        try:
            with sessionmaker(engine, **host.sessions(engine)).begin() as session:
                for id_ in IDS[:2]:
                    Outbox().publish(session, "own:x", id_)
        except DBAPIError:  # Postgres's own, which is the publishing host's
            wait_until(lambda: losses.any, "the relay has noticed")
        else:
            broker.wait_for(2, timeout=10)
    gc.collect()  # a connection that was left open fails the test now, and not another one
    losses.tell()
    assert Counter(broker.bodies) == Counter(IDS[:2])


def in_dashboard(_: Host, engine: Engine, truth: str | None) -> None:
    """Its pages show what those over a plain engine show, or say why not."""
    shown = pages(engine)
    expected = dict.fromkeys(PAGES, "") if truth is None else over_plain_engine(truth, pages)
    reasons = []
    for path, text in shown.items():
        if text != expected[path]:
            assert (found := re.search(REASON, text)), text  # noqa: RUF018 - as a type checker needs it
            reasons.append(found[0])
    if reasons:
        raise Unusable(reasons[0])


REASON = r"The database cannot be used\. .+?(?= txbox \d)|this user of the database may not read it: [^\"]+\"\w+\""
"""What a page says in place of what it cannot read."""


def pages(engine: Engine) -> dict[str, str]:
    with TestClient(dashboard(engine), base_url="http://127.0.0.1:8790") as client:
        return {path: words(client.get(path).text) for path in PAGES}


def words(page: str) -> str:
    """Return the words of a page, without the figures of estimates and durations."""
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    return " ".join(re.sub(r"read in \d+ ms|≈ \d+", "", text).split())


def over_plain_engine(url: str, work: Callable[[Engine], Any]) -> Any:
    engine = create_engine(url)
    try:
        return work(engine)
    finally:
        engine.dispose()


def _with_engine(work: Callable[[Host, Engine], None]) -> Callable[[Host, Place], None]:
    def road(host: Host, place: Place) -> None:
        engine = host.engine(place.url)
        try:
            work(host, engine)
        finally:
            engine.dispose()

    return road


def _with_async_engine(work: Callable[[Host, Any], Any]) -> Callable[[Host, Place], None]:
    async def run(host: Host, place: Place) -> None:
        engine = host.async_engine(place.url)
        try:
            await work(host, engine)
        finally:
            await engine.dispose()

    return lambda host, place: asyncio.run(run(host, place))


def _in_dashboard(host: Host, place: Place) -> None:
    if place.truth is not None:
        over_plain_engine(place.truth, lambda engine: by_worker(Host(), engine))
        place.catch_up()
    _with_engine(lambda host, engine: in_dashboard(host, engine, place.truth))(host, place)


ROADS: dict[str, Callable[[Host, Place], None]] = {
    "Worker": _with_engine(by_worker),
    "Async worker": _with_async_engine(by_async_worker),
    "HTTP": _with_engine(by_request),
    "Async HTTP": _with_async_engine(by_async_request),
    "Lambda": _with_engine(by_function),
    "Celery": _with_engine(by_task),
    "Django": by_django,
    "Relay": _with_engine(by_relay),
    "Dashboard": _in_dashboard,
}
"""By their names in docs/hosts.md, which also has ``by_load``."""
