"""The same consumer by three roads in Python: psycopg alone, a bare loop with a session, and our worker.

Each measurement runs in processes of its own, so that none inherits another's threads, garbage or warm caches.
"""

import gc
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, Literal

import psycopg
from business import AMOUNT, INSERT_MANY, INSERT_ONE, SCHEMA, SUBSCRIBER, UPDATE_MANY, UPDATE_ONE, conninfo
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session
from supply import Supply, make_deliveries

from txbox import Inbox, Message
from txbox.postgres.sqlstates import is_retryable
from txbox_workers.delivery import Delivery
from txbox_workers.worker import Worker

__all__ = ["Form", "Job", "JobResult", "Road", "run_job"]

Road = Literal["psycopg", "bare", "worker"]
Form = Literal["message", "each", "set"]
"""message: a transaction for each; each: one for a batch, a handler call for each; set: one for a batch, in sets."""

WARM_UP_SECONDS = 0.4
SUPPLY_PER_SECOND = {"message": 20_000, "each": 40_000, "set": 120_000}
"""More than any road reaches here; a faster machine ends its measurement when the supply is used up."""

RECEIVED_AT_ONCE = 10


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        road, form: what runs.
        inbox: with it, or only the business update.
        batch: deliveries received at once; in one transaction unless the form is "message".
        connections: all in all; each has a thread.
        processes: which share the connections evenly.
    """

    url: str
    road: Road
    form: Form
    inbox: bool
    batch: int
    connections: int
    processes: int
    seconds: float
    ids: str


@dataclass(frozen=True)
class JobResult:
    """What one process has done.

    Attributes:
        rate: deliveries a second, between warm-up and end.
        cpu_us: the client's processor time for a delivery.
        acked: deliveries settled, warm-up included.
        distinct: how many different messages these were.
        handed_back: deliveries that another transaction kept from us.
    """

    rate: float
    cpu_us: float
    acked: int
    distinct: int
    handed_back: int


def run_job(job: Job) -> list[JobResult]:
    """Run a measurement in its processes; one result for each."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(job.processes)
    with ProcessPoolExecutor(job.processes, context, _remember, (barrier,)) as pool:
        return [future.result() for future in [pool.submit(_measure, job) for _ in range(job.processes)]]


# --- in a process of its own -----------------------------------------------------------------------------------------

_barriers: list[Barrier] = []


def _remember(barrier: Barrier) -> None:
    _barriers.append(barrier)


def _measure(job: Job) -> JobResult:
    count = int((job.seconds + WARM_UP_SECONDS) * SUPPLY_PER_SECOND[job.form] / job.processes)
    threads = max(job.connections // job.processes, 1)
    at_once = RECEIVED_AT_ONCE if job.form == "message" else job.batch
    supply = Supply(make_deliveries(count, ids=job.ids, distance=2 * at_once * threads), at_once)
    gc.collect()
    gc.freeze()
    run = _run_worker if job.road == "worker" else _run_loops
    _barriers[0].wait()
    return run(job, threads, supply)


def _watch(job: Job, supply: Supply) -> tuple[float, float]:
    """Wait until the measurement is over; deliveries a second, and processor time for each."""
    supply.dry.wait(WARM_UP_SECONDS)
    acked, cpu, begun = supply.acked, time.process_time(), time.perf_counter()
    supply.dry.wait(job.seconds)
    done = supply.acked - acked
    return done / (time.perf_counter() - begun), (time.process_time() - cpu) / max(done, 1) * 1e6


def _result(supply: Supply, rate: float, cpu_us: float) -> JobResult:
    return JobResult(rate, cpu_us, supply.acked, supply.distinct_acked(), supply.handed_back)


def _run_worker(job: Job, threads: int, supply: Supply) -> JobResult:
    engine = _engine(job, threads)
    worker = Worker(
        supply,
        inbox=Inbox(SUBSCRIBER, schema=SCHEMA),
        engine=engine,
        handler=None if job.form == "set" else handle,
        batch_handler=handle_batch if job.form == "set" else None,
        transactions="message" if job.form == "message" else "batch",
        threads=threads,
    )
    worker.start()
    rate, cpu_us = _watch(job, supply)
    if not worker.stop():
        raise RuntimeError("the worker did not drain")
    engine.dispose()
    return _result(supply, rate, cpu_us)


def _run_loops(job: Job, threads: int, supply: Supply) -> JobResult:
    stopping = threading.Event()
    troubles: list[BaseException] = []
    engine = _engine(job, threads)
    loop: Callable[[], None]
    if job.road == "psycopg":

        def loop() -> None:
            with psycopg.connect(conninfo(job.url)) as connection:
                _PSYCOPG[job.form](connection, supply, stopping, job.inbox)
    else:

        def loop() -> None:
            _BARE[job.form](engine, supply, stopping, job.inbox)

    def guarded() -> None:
        try:
            loop()
        except BaseException as error:
            troubles.append(error)
            supply.dry.set()
            raise

    running = [threading.Thread(target=guarded) for _ in range(threads)]
    for thread in running:
        thread.start()
    rate, cpu_us = _watch(job, supply)
    stopping.set()
    for thread in running:
        thread.join()
    engine.dispose()
    if troubles:
        raise troubles[0]
    return _result(supply, rate, cpu_us)


def _engine(job: Job, threads: int) -> Engine:
    return create_engine(job.url, pool_size=threads, max_overflow=2)


# --- handlers: the same code in the bare loop and in the worker ------------------------------------------------------


def handle(session: Session, message: Message) -> None:
    """Apply one message with the driver's own cursor."""
    _cursor(session).execute(UPDATE_ONE, (AMOUNT, int(message.body)))


def handle_batch(session: Session, messages: Sequence[Message]) -> None:
    """Apply a batch with one statement."""
    _cursor(session).execute(UPDATE_MANY, _changes(messages))


def _cursor(session: Session) -> Any:
    connection = session.connection().connection.dbapi_connection
    if connection is None:
        raise RuntimeError("the connection was closed")
    return connection.cursor()


def _changes(messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    totals = Counter(int(message.body) for message in messages)
    accounts = sorted(totals)
    return accounts, [totals[account] * AMOUNT for account in accounts]


# --- a loop ----------------------------------------------------------------------------------------------------------


def _work_through(
    supply: Supply,
    stopping: threading.Event,
    apply: Callable[[Sequence[Delivery]], None],
    roll_back: Callable[[], None] = lambda: None,
) -> None:
    """Apply batch after batch; again where the database has rolled one back for a deadlock, as the worker does."""
    while not stopping.is_set():
        deliveries = supply.receive()
        while True:
            try:
                apply(deliveries)
                break
            except Exception as error:
                roll_back()
                if not is_retryable(error):
                    raise
        supply.ack(deliveries)


# --- psycopg: an ordinary cursor and commit --------------------------------------------------------------------------


def _psycopg_message(connection: psycopg.Connection, supply: Supply, stopping: threading.Event, inbox: bool) -> None:
    cursor = connection.cursor()
    while not stopping.is_set():
        deliveries = supply.receive()
        for delivery in deliveries:
            message = delivery.message
            if inbox:
                cursor.execute(INSERT_ONE, (message.id,))
            if not inbox or cursor.rowcount == 1:
                cursor.execute(UPDATE_ONE, (AMOUNT, int(message.body)))
            connection.commit()
        supply.ack(deliveries)


def _psycopg_each(connection: psycopg.Connection, supply: Supply, stopping: threading.Event, inbox: bool) -> None:
    cursor = connection.cursor()

    def apply(deliveries: Sequence[Delivery]) -> None:
        for message in _first_by_cursor(cursor, deliveries) if inbox else _messages(deliveries):
            cursor.execute(UPDATE_ONE, (AMOUNT, int(message.body)))
        connection.commit()

    _work_through(supply, stopping, apply, connection.rollback)


def _psycopg_set(connection: psycopg.Connection, supply: Supply, stopping: threading.Event, inbox: bool) -> None:
    cursor = connection.cursor()

    def apply(deliveries: Sequence[Delivery]) -> None:
        messages = _first_by_cursor(cursor, deliveries) if inbox else _messages(deliveries)
        cursor.execute(UPDATE_MANY, _changes(messages))
        connection.commit()

    _work_through(supply, stopping, apply, connection.rollback)


def _first_by_cursor(cursor: psycopg.Cursor, deliveries: Sequence[Delivery]) -> list[Message]:
    given = {delivery.message.id: delivery.message for delivery in deliveries}
    first = {row[0] for row in cursor.execute(INSERT_MANY, (sorted(given),)).fetchall()}
    return [message for message_id, message in given.items() if message_id in first]


def _messages(deliveries: Sequence[Delivery]) -> list[Message]:
    return [delivery.message for delivery in deliveries]


_PSYCOPG = {"message": _psycopg_message, "each": _psycopg_each, "set": _psycopg_set}


# --- the bare loop: what a careful person would write around the same handler -----------------------------------------


def _bare_message(engine: Engine, supply: Supply, stopping: threading.Event, inbox: bool) -> None:
    while not stopping.is_set():
        deliveries = supply.receive()
        for delivery in deliveries:
            with Session(engine) as session, session.begin():
                recorded = not inbox or (
                    session.connection().exec_driver_sql(INSERT_ONE, (delivery.message.id,)).rowcount == 1
                )
                if recorded:
                    handle(session, delivery.message)
        supply.ack(deliveries)


def _bare_each(engine: Engine, supply: Supply, stopping: threading.Event, inbox: bool) -> None:
    def apply(deliveries: Sequence[Delivery]) -> None:
        with Session(engine) as session, session.begin():
            for message in _first_by_session(session, deliveries) if inbox else _messages(deliveries):
                handle(session, message)

    _work_through(supply, stopping, apply)


def _bare_set(engine: Engine, supply: Supply, stopping: threading.Event, inbox: bool) -> None:
    def apply(deliveries: Sequence[Delivery]) -> None:
        with Session(engine) as session, session.begin():
            handle_batch(session, _first_by_session(session, deliveries) if inbox else _messages(deliveries))

    _work_through(supply, stopping, apply)


def _first_by_session(session: Session, deliveries: Sequence[Delivery]) -> list[Message]:
    given = {delivery.message.id: delivery.message for delivery in deliveries}
    first = set(session.connection().exec_driver_sql(INSERT_MANY, (sorted(given),)).scalars())
    return [message for message_id, message in given.items() if message_id in first]


_BARE = {"message": _bare_message, "each": _bare_each, "set": _bare_set}
