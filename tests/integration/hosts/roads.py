"""Roads by which a host has messages applied: each is given two messages and a duplicate of the first."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from html import unescape
from typing import Annotated, Any

from celery import Celery
from django.db import connections
from django.db.backends.signals import connection_created
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from integration.hosts.shapes import Host, Server
from support.aws.lambda_events import Context, event, record
from support.django_shop import project
from support.txbox.publishers import RecordingPublisher
from support.workers import async_worker
from support.workers.business import APPLY, apply
from support.workers.memory_worker import AT_ONCE, at_work, messages, work_off
from txbox import Inbox, Message, Outbox, Outgoing
from txbox.relay import Relay
from txbox_aws.lambda_ import sqs_handler
from txbox_celery import inbox_task
from txbox_dashboard import dashboard
from txbox_django import database_engine, orm_worker
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

IDS = ("ä1", "ä2", "ä1")


def inbox() -> Inbox:
    return Inbox("billing", wait_seconds=0.2)


def worker(host: Host, url: str) -> None:
    engine = host.engine(url)
    try:
        sessions = sessionmaker(**host.sessions(engine))
        work_off(MemorySource(messages(*IDS)), engine, session_factory=sessions, max_attempts=1)
    finally:
        engine.dispose()


def async_worker_(host: Host, url: str) -> None:
    async def run() -> None:
        engine = host.async_engine(url)
        try:
            sessions = async_sessionmaker(**async_options(host, engine))
            source = MemorySource(messages(*IDS))
            await async_worker.work_off(source, engine, session_factory=sessions, max_attempts=1)
        finally:
            await engine.dispose()

    asyncio.run(run())


def async_options(host: Host, engine: Any) -> dict[str, Any]:
    options = host.sessions(engine)
    return {"sync_session_class": options["class_"]} if "class_" in options else options


def function(host: Host, url: str) -> None:
    engine = host.engine(url)
    try:
        handle = sqs_handler(
            inbox=inbox(),
            engine=engine,
            handler=apply,
            max_attempts=1,
            session_factory=sessionmaker(**host.sessions(engine)),
        )
        for id_ in IDS:
            handle(event(record(id_)), Context(30))
    finally:
        engine.dispose()


def requests(host: Host, url: str) -> None:
    engine = host.engine(url)
    try:
        once = Idempotency(InTransaction(sessionmaker(engine, **host.sessions(engine)), inbox()), caller=everyone)
        app = FastAPI()
        app.add_middleware(IdempotencyMiddleware, once)

        @app.post("/{number}")
        def buy(number: str, session: Annotated[Session, Depends(once)]) -> None:
            session.execute(APPLY, {"id": number, "body": ""})

        ask(app)
    finally:
        engine.dispose()


def async_requests(host: Host, url: str) -> None:
    engine = host.async_engine(url)
    options = async_options(host, engine)
    once = Idempotency(InTransaction(async_sessionmaker(engine, **options), inbox()), caller=everyone)
    app = FastAPI(on_shutdown=[engine.dispose])
    app.add_middleware(IdempotencyMiddleware, once)

    @app.post("/{number}")
    async def buy(number: str, session: Annotated[AsyncSession, Depends(once)]) -> None:
        await session.execute(APPLY, {"id": number, "body": ""})

    ask(app)


def ask(app: FastAPI) -> None:
    with TestClient(app) as client:
        for id_ in IDS:
            client.post(f"/{id_}", headers={"idempotency-key": '"' + id_.replace("ä", "a") + '"'}).raise_for_status()


def task(host: Host, url: str) -> None:
    engine = host.engine(url)
    app = Celery("hosts", set_as_current=False)
    try:

        @inbox_task(app, inbox=inbox(), engine=engine)
        def buy(session: Session, id_: str) -> None:
            session.execute(APPLY, {"id": id_, "body": ""})

        for id_ in IDS:
            buy.apply((id_,), task_id=id_).get()
    finally:
        app.close()
        engine.dispose()


def django(host: Host, url: str) -> None:
    project.use(url)

    def connected(connection: Any, **_: object) -> None:
        host.register(connection.connection)

    def handle(message: Message) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("INSERT INTO effect (message_id, body) VALUES (%s, '')", [message.id])

    connection_created.connect(connected)
    engine = database_engine(**{k: v for k, v in host.options.items() if k != "connect_args"})
    try:
        source = MemorySource(messages(*IDS))
        made = orm_worker(
            Worker, source, handler=handle, engine=engine, inbox=inbox(), backoff=AT_ONCE, max_attempts=1
        )
        with at_work(made):
            assert source.wait_until_empty(20)
    finally:
        connection_created.disconnect(connected)
        engine.dispose()
        connections.close_all()


def relay(host: Host, url: str) -> None:
    engine = host.engine(url)
    broker = RecordingPublisher()
    try:
        with at_work(Relay(engine, {"own": broker}, backoff=AT_ONCE)):
            with sessionmaker(engine, **host.sessions(engine)).begin() as session:
                for id_ in IDS[:2]:
                    Outbox().publish(session, "own:x", id_)
            broker.wait_for(2, timeout=5)
        assert Counter(broker.bodies) == Counter(IDS[:2])
    finally:
        engine.dispose()


def pages(host: Host, url: str) -> str:
    engine = host.engine(url)
    try:
        with TestClient(dashboard(engine), base_url="http://127.0.0.1:8790") as client:
            return "\n".join(words(client.get(path)) for path in ("/", "/subscriber?id=billing", "/letters", "/outbox", "/message?id=ä1", "/leases", "/loads", "/maintenance"))
    finally:
        engine.dispose()


def words(answer: Any) -> str:
    text = re.sub(r"read in \d+ ms|≈ \d+", "", unescape(re.sub(r"<[^>]+>", " ", answer.text)))
    return " ".join(text.split())


ROADS: dict[str, Callable[[Host, str], None]] = {
    "worker": worker,
    "async worker": async_worker_,
    "HTTP": requests,
    "async HTTP": async_requests,
    "Lambda": function,
    "Celery": task,
    "Django": django,
    "relay": relay,
}
