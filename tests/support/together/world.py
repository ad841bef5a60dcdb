"""Features together: what users and operators do at once, at random from a seed, and the promises asked afterwards.

Workers of both kinds, over a queue in memory and over the outbox, a relay and a service over HTTP share one inbox, by
sessions with ``binds``, over drivers with loaders of the host's. Threads of the test publish, deliver again, import,
redrive, discard, rotate, forget, sweep, load in bulk, call what leases guard, and end sessions, each as its lots say.
What has to be true then is computed from what was sent, and from tables that refuse nothing.

Where order is kept, a key has one road: those with names in ``p`` go by the outbox, the others by the queue. Elsewhere
any message may come by both.
"""

import asyncio
import itertools
import random
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import httpx2
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from support.postgres.host_loaders import AsBytes, AsDecimal, AsText, Loaders, Upper, register_loaders
from support.waiting import wait_until
from support.web.service import served
from support.workers.async_worker import make as make_async
from support.workers.business import APPLY, Business
from support.workers.fifo_source import FifoSource
from support.workers.mapped import Base
from support.workers.memory_worker import AT_ONCE, at_work, make, messages
from txbox import (
    AsyncInbox,
    DeadLetter,
    DeadLetters,
    Inbox,
    InFlight,
    InvalidConfiguration,
    LeaseLost,
    LedgerError,
    LetterNotFound,
    Message,
    Outbox,
    OutOfOrder,
    ResultNotStored,
)
from txbox.coroutines import AsyncOutbox
from txbox.dead_letters.letter import Reason
from txbox.leases import Lease, PostgresLedger, idempotent
from txbox.maintenance import Maintainer, Retention
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.outbox import Subscriptions
from txbox.outbox.message_ids import new_message_id
from txbox.postgres.sqlstates import is_outage, is_retryable
from txbox.relay import FunctionPublisher, OutboxMessage, Relay
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone
from txbox_spark.merging.chunk_merger import begin_chunk, merge_chunk
from txbox_spark.merging.fresh_event import create_fresh
from txbox_spark.merging.merge_plan import ChunkCounts, MergePlan
from txbox_workers.postgres import AsyncPostgresWorker, PostgresWorker

NAME = "together"
"""Of the sessions that may be ended at any moment."""

REPEATED_SECONDS = 4.0
"""What is older is forgotten, where the inbox rotates."""

KEYS = 4

INBOX, TOPIC = "inbox:billing", "topic:sold"

LOADERS: tuple[Loaders, ...] = ({}, {"text": AsBytes, "jsonb": AsText}, {"text": Upper, "int8": AsDecimal})
"""One of these is what a host has registered."""

ROADS = "SELECT body FROM effect WHERE message_id = '{}' ORDER BY position"


class World:
    """All of them, and what was sent.

    Attributes:
        seed: what the lots come from; threads and the server are not bound by it.
        loaders: what the host has registered with its driver.
        done: how often each action was begun.
        errors: what nobody has expected.
    """

    def __init__(self, url: str, engine: Engine, *, seed: int, level: str, rotating: bool, ordered: bool) -> None:
        self.seed, self.rotating, self.ordered = seed, rotating, ordered
        self.done: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self.sent: dict[str, str] = {}  # ids and their keys, in order
        self.receipts: set[str] = set()
        self._business = Business(engine)
        self._engine = engine
        own = {"application_name": NAME}
        self._ours = create_engine(url, isolation_level=level, connect_args=own, pool_size=20)
        self._async: AsyncEngine = create_async_engine(url, isolation_level=level, connect_args=own, pool_size=16)
        self.loaders = random.Random(seed).choice(LOADERS)
        for one in (self._ours, self._async.sync_engine):
            register_loaders(one, self.loaders)
        self._letters = DeadLetters(self._ours)
        self._source = FifoSource(batch_size=4, wait_seconds=0.01)
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        self._recent: deque[str] = deque(maxlen=40)
        self._stopping = threading.Event()
        self._mail = idempotent(
            self._send_mail, ledger=PostgresLedger("mailing", engine=self._ours), identify=_first, lease_seconds=1
        )
        self._fences: dict[str, int] = {}
        self._answered: set[str] = set()
        self._broken_leases: list[str] = []
        self._chunks = 0
        self._chunk_lock = threading.Lock()  # what is loaded has no time: it is not to be older than the horizon
        self._horizon = 0.0
        self._given_up: set[str] = set()
        Subscriptions(engine).add(TOPIC, "billing")
        if rotating:
            assert InboxConversion(engine).forward()

    def run(self, seconds: float) -> None:
        """Let all of it happen for a while, then end what is under way, and let the source run empty."""
        actions = self._actions()
        threads = [
            threading.Thread(target=self._act, args=[random.Random(f"{self.seed}-{number}"), actions])
            for number in range(3)
        ]
        with self._at_work() as client:
            self._client = client
            for thread in threads:
                thread.start()
            self._stopping.wait(seconds)
            self._stopping.set()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "an action does not end"
            self._failing.clear()
            assert self._source.wait_until_empty(90), "something is never acked"
            left = f"SELECT message_id FROM outbox_message WHERE destination = '{INBOX}'"
            wait_until(lambda: not self._business.rows(left), "what was published is settled", timeout=90)
        self._ours.dispose()

    def broken_promises(self) -> list[str]:
        """Return what is not as guarantees.md says."""
        effects = self._business.applied()
        with self._engine.connect() as connection:
            letters = connection.exec_driver_sql(
                "SELECT message_id, reason, redriven_at IS NULL AND discarded_at IS NULL AS waits, "
                "discarded_at IS NOT NULL AS discarded FROM dead_letter WHERE subscriber_id = 'billing'"
            ).all()
            unsent = set(connection.exec_driver_sql("SELECT headers ->> 'of' FROM outbox_message").scalars())
        waits = {one.message_id for one in letters if one.waits}
        parked = {one.message_id for one in letters if one.waits and one.reason != "expired"}
        given_up = {one.message_id for one in letters if one.discarded} | self._given_up
        broken = [
            f"{one} was applied {times} times, by {self._business.rows(ROADS.format(one))}"
            for one, times in effects.items()
            if times > 1
        ]
        broken += self._broken_leases
        broken += [f"{one} was acked and not applied" for one in self.sent if one not in {*effects, *waits, *given_up}]
        broken += [f"{one} is both processed and parked" for one in sorted(parked & effects.keys())]
        broken += [f"{one} was never sent" for one in effects.keys() - self.sent.keys()]
        by_workers = set(self._business.rows("SELECT message_id FROM effect WHERE body = 'worker'"))
        broken += [f"the receipt of {one} is lost" for one in by_workers - self.receipts - unsent]
        broken += [f"there is a receipt of {one}, and no effect" for one in self.receipts - by_workers]
        if not self.rotating:
            recorded = self._business.recorded()
            kept = {one for one in effects if _made_at(one) > self._horizon}
            broken += [f"{one} has an effect and no row" for one in kept - recorded]
            broken += [f"{one} has a row and no effect" for one in recorded - effects.keys()]
        if self.ordered:
            numbers = {one: number for number, one in enumerate(self.sent)}
            for key in set(self.sent.values()):
                order = [one for one in self._business.order() if self.sent[one] == key]
                broken += [
                    f"{two} came after {one}" for one, two in itertools.pairwise(order) if numbers[two] < numbers[one]
                ]
        return broken

    def _actions(self) -> dict[Callable[[random.Random], None], int]:
        actions = {
            self._send: 40,
            self._publish: 40,
            self._publish_later: 5,
            self._roll_back: 3,
            self._deliver_again: 15,
            self._redrive: 25,
            self._discard: 3,
            self._call_with_lease: 10,
            self._end_a_session: 2,
            self._sweep: 3,
        }
        if self.rotating:
            actions |= {self._rotate: 4, self._forget: 1}
        if not self.ordered:  # they come from elsewhere, in no order
            actions |= {self._send_over_http: 15, self._import: 5, self._load: 5}
        return actions

    def _act(self, lots: random.Random, actions: dict[Callable[[random.Random], None], int]) -> None:
        while not self._stopping.is_set():
            (action,) = lots.choices(list(actions), list(actions.values()))
            self.done[action.__name__.strip("_")] += 1
            try:
                action(lots)
            except (InFlight, LeaseLost, LedgerError, ResultNotStored, OutOfOrder, LetterNotFound, ConnectionError):
                continue
            except InvalidConfiguration as error:
                if "expired" not in str(error):  # it is for a person to say that it was not processed
                    self.errors.append(error)
            except DBAPIError as error:
                if not (is_retryable(error) or is_outage(error)):
                    self.errors.append(error)
            except Exception as error:  # noqa: BLE001 - the test raises it
                self.errors.append(error)
            self._stopping.wait(lots.random() / 50)

    def _new(self, lots: random.Random, key: str = "k") -> str:
        message_id = new_message_id()
        self.sent[message_id] = f"{key}{lots.randrange(KEYS)}"
        if lots.random() < 0.4:
            self._failing.add(message_id)
        self._recent.append(message_id)
        return message_id

    def _one(self, lots: random.Random) -> str:
        return lots.choice(list(self._recent) or [self._new(lots)])

    def _deliver(self, lots: random.Random, message_id: str) -> None:
        key = self.sent[message_id]
        if key.startswith("p") if self.ordered else lots.random() < 0.5:
            self._put(lots, message_id)
        else:
            self._source.send_in(key, message_id)

    def _put(self, lots: random.Random, message_id: str, delay: float | None = None, *, commit: bool = True) -> None:
        (message,) = messages(message_id)
        key = self.sent.get(message_id)
        with self._engine.connect() as connection:  # not one that may be ended: it would not be known what was sent
            Outbox().publish(
                connection, lots.choice([INBOX, TOPIC]), message.body, key, message.headers, message_id, delay
            )
            if commit:
                connection.commit()

    def _send(self, lots: random.Random) -> None:
        with self._lock:  # ids grow in the order of the queue
            message_id = self._new(lots)
            self._source.send_in(self.sent[message_id], message_id)

    def _publish(self, lots: random.Random) -> None:
        with self._lock:
            self._put(lots, self._new(lots, "p"))

    def _publish_later(self, lots: random.Random) -> None:
        """Publish with a delay, under a key of its own: it takes its place when its time has come."""
        with self._lock:
            message_id = self._new(lots, f"p{len(self.sent)}-")
            self._put(lots, message_id, lots.random())

    def _roll_back(self, lots: random.Random) -> None:
        self._put(lots, new_message_id(), commit=False)

    def _deliver_again(self, lots: random.Random) -> None:
        self._deliver(lots, self._one(lots))

    def _letter(self, lots: random.Random) -> DeadLetter:
        letters = self._letters.list(limit=20)
        if not letters:
            raise LetterNotFound(0)
        return lots.choice(letters)

    def _redrive(self, lots: random.Random) -> None:
        letter = self._letter(lots)
        if lots.random() < 0.7:
            self._failing.discard(letter.message_id)
        if letter.source == INBOX and lots.random() < 0.7:
            self._letters.republish(letter.dead_letter_id or 0, Outbox())
            return

        def send(_: DeadLetter) -> None:
            self._deliver(lots, letter.message_id)
            time.sleep(lots.random() / 50)  # its copy arrives before the redrive commits
            if lots.random() < 0.1:
                raise ConnectionError("after it was sent")

        self._letters.redrive(letter.dead_letter_id or 0, send)

    def _discard(self, lots: random.Random) -> None:
        letter = self._letter(lots)
        self._given_up.add(letter.message_id)  # if it is, its letter may be swept
        self._letters.discard(letter.dead_letter_id or 0, note="nobody wants it")

    def _import(self, lots: random.Random) -> None:
        (message,) = messages(self._one(lots))
        self._letters.park(
            DeadLetter("billing", message.id, Reason.FAILED, "imported", 1, "queue", message.body, {}, {})
        )

    def _send_over_http(self, lots: random.Random) -> None:
        message_id = self._new(lots) if lots.random() < 0.5 else self._one(lots)
        response = self._client.post("/", headers={"idempotency-key": message_id})
        if response.status_code not in {201, 204}:
            assert response.status_code in {409, 422, 500, 503}, response.text
            self._deliver(lots, message_id)

    def _load(self, lots: random.Random) -> None:
        with self._chunk_lock:
            self._chunks += 1
            repeated = {one for one in (self._one(lots) for _ in range(5)) if _made_at(one) > self._horizon}
            ids = sorted({*(self._new(lots) for _ in range(3)), *repeated})
            self._failing.difference_update(ids)
            apply = "INSERT INTO effect (message_id, body) SELECT message_id, 'load' FROM fresh_event"
            plan = MergePlan(
                run_id=f"{self.seed:012x}", subscriber_id="billing", columns=(), apply=apply, stalled_seconds=10
            )
            try:
                with self._engine.begin() as connection:
                    assert begin_chunk(connection, plan, self._chunks)
                    connection.exec_driver_sql(create_fresh(()))
                    connection.exec_driver_sql("INSERT INTO fresh_event SELECT unnest(%s::text[]) ORDER BY 1", (ids,))
                    counts = ChunkCounts(len(ids), 0, len(ids))
                    merge_chunk(connection, plan, self._chunks, (ids[0], None), counts)
            finally:
                for message_id in ids:
                    self._deliver(lots, message_id)

    def _call_with_lease(self, lots: random.Random) -> None:
        mail_id = f"mail-{lots.randrange(200)}"
        self._mail(mail_id, lots)
        with self._lock:
            self._answered.add(mail_id)

    def _send_mail(self, mail_id: str, lots: random.Random, lease: Lease) -> None:
        with self._lock:
            if mail_id in self._answered:
                self._broken_leases.append(f"{mail_id} was sent again, though a call had its answer")
            if lease.fence <= self._fences.get(mail_id, 0):
                self._broken_leases.append(f"{mail_id} was given fence {lease.fence} after {self._fences[mail_id]}")
            self._fences[mail_id] = lease.fence
        time.sleep(lots.random() / 50)
        if lots.random() < 0.2:
            raise ConnectionError("the mail server hangs up")

    def _rotate(self, _: random.Random) -> None:
        Generations(self._ours).rotate(tries=3)

    def _forget(self, _: random.Random) -> None:
        with self._chunk_lock:
            self._horizon = time.time() - REPEATED_SECONDS
            with self._engine.begin() as connection:
                connection.exec_driver_sql(
                    "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', to_timestamp(%s)) "
                    "ON CONFLICT (subscriber_id) DO UPDATE SET horizon = excluded.horizon",
                    (self._horizon,),
                )
            generations = Generations(self._ours)
            generations.forget(settled=generations.settle(seconds=5), slack=timedelta(), tries=3)

    def _sweep(self, _: random.Random) -> None:
        """Remove what is too old, as a maintainer does; the ids of a rotating inbox go with their generation."""
        ended = timedelta(seconds=1)
        window = {} if self.rotating else {"billing": timedelta(seconds=REPEATED_SECONDS)}
        retention = Retention(window, results=ended, responses=ended, letters=ended, operations=ended)
        with self._chunk_lock:
            try:
                Maintainer(self._ours, retention, force=True, budget_ms_per_second=1_000).run_once()
            finally:
                if not self.rotating:  # the horizon is not later than that
                    self._horizon = time.time() - REPEATED_SECONDS

    def _end_a_session(self, _: random.Random) -> None:
        with self._engine.begin() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity "
                "WHERE application_name IN (%s, 'txbox-lane-claims') AND datname = current_database() "
                "ORDER BY state = 'idle', random() LIMIT 1) AS one",
                (NAME,),
            )

    @contextmanager
    def _at_work(self) -> Iterator[httpx2.Client]:
        options: dict[str, Any] = {"max_attempts": 2, "ordered": self.ordered}
        by_outbox = {**options, "backoff": AT_ONCE, "visibility_seconds": 3}
        own: dict[str, Any] = {"session_factory": sessionmaker(binds={Base: self._ours}), "transactions": "message"}
        worker = make(self._source, self._ours, self._handle, **own, **options)
        inbox = Inbox("billing", wait_seconds=0.2)
        of_outbox = PostgresWorker(inbox=inbox, engine=self._ours, handler=self._handle, **own, **by_outbox)
        relay = Relay(self._ours, {"own": FunctionPublisher(self._receive)}, senders=1)
        stop = threading.Event()

        async def work() -> None:
            own: dict[str, Any] = {"session_factory": async_sessionmaker(binds={Base: self._async})}
            inbox, handle = AsyncInbox("billing", wait_seconds=0.2), self._handle_async
            async with (
                make_async(self._source, self._async, handle, **own, **options),
                AsyncPostgresWorker(inbox=inbox, engine=self._async, handler=handle, **own, **by_outbox),
            ):
                await asyncio.to_thread(stop.wait)
            await self._async.dispose()

        thread = threading.Thread(target=lambda: asyncio.run(work()))
        thread.start()
        try:
            with served(self._service()) as client, at_work(worker, of_outbox, relay):
                yield client
        finally:
            stop.set()
            thread.join(30)
            assert not thread.is_alive(), "the worker of coroutines does not end"

    def _check(self, message_id: str) -> None:
        if message_id in self._failing:
            raise ValueError("not yet")

    def _handle(self, session: Session, message: Message) -> None:
        session.execute(APPLY, {"id": message.id, "body": "worker"})
        Outbox().publish(session, "own:receipts", b"", headers={"of": message.id})
        self._check(message.id)

    async def _handle_async(self, session: AsyncSession, message: Message) -> None:
        await session.execute(APPLY, {"id": message.id, "body": "worker"})
        await AsyncOutbox().publish(session, "own:receipts", b"", headers={"of": message.id})
        self._check(message.id)

    def _receive(self, message: OutboxMessage) -> None:
        self.receipts.add(message.headers["of"])

    def _service(self) -> IdempotencyMiddleware:
        in_transaction = InTransaction(sessionmaker(binds={Base: self._ours}), Inbox("billing", wait_seconds=0.2))
        once = Idempotency(in_transaction, caller=everyone)

        async def apply(request: Request) -> Response:
            session, message_id = await once(request), request.headers["idempotency-key"]
            await run_in_threadpool(session.execute, APPLY, {"id": message_id, "body": "http"})
            self._check(message_id)
            return JSONResponse({}, status_code=201)

        app = Starlette(routes=[Route("/", apply, methods=["POST"])])
        return IdempotencyMiddleware(app, once)


def _first(mail_id: str, _: random.Random) -> str:
    return mail_id


def _made_at(message_id: str) -> float:
    """Return when an id was made, in seconds since 1970."""
    return (uuid.UUID(message_id).int >> 80) / 1_000
