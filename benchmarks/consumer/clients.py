"""The same consumer in Python: a bare loop with a session, written with care, and our worker, by handler and in SQL.

Each measurement runs in processes of its own. Loop and handlers call the same code, which uses the driver's own cursor;
the effect in SQL does the same to the same rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from benchmarks.consumer.deliveries import PreparedSource, make_deliveries
from benchmarks.shared.database import INSERT_MANY, INSERT_ONE, SCHEMA, SUBSCRIBER
from benchmarks.shared.effects import EFFECT, add_to, add_to_all
from benchmarks.shared.work import WARM_UP_SECONDS, Rate, in_threads, ready, window
from txbox import Inbox, Message
from txbox.postgres.sqlstates import is_retryable
from txbox_workers.delivery import Delivery
from txbox_workers.worker import Worker

DELIVERIES_PER_SECOND = {"message": 20_000, "each": 40_000, "set": 120_000}
"""More than either reaches here; a faster machine ends its measurement when they are used up."""

RECEIVED_AT_ONCE = 10


class Case(NamedTuple):
    """What is measured.

    Attributes:
        client: "pgbench", "bare", "worker", or "effect": the worker with an effect in SQL.
        form: how messages are handled.
        batch: deliveries received at once; in one transaction unless the form is "message".
        connections: of all processes together; each has a thread.
        processes: that share them.
        inbox: with it, or only the business update; a worker has it always.
    """

    client: str
    form: str
    batch: int
    connections: int
    processes: int = 1
    inbox: bool = True

    @property
    def key(self) -> str:
        """Its name in tables."""
        form = f"{self.form} {self.batch}" if self.batch > 1 else self.form
        inbox, processes = "" if self.inbox else " no inbox", f" x{self.processes}" if self.processes > 1 else ""
        return f"{self.client} {form}{inbox}, {self.connections}c{processes}"


def consume(_number: int, case: Case, url: str, seconds: float) -> tuple[Rate, int, int]:
    """Consume in this process; return the rate, how many deliveries were settled, and of how many messages."""
    count = int((seconds + WARM_UP_SECONDS) * DELIVERIES_PER_SECOND[case.form] / case.processes)
    threads = case.connections // case.processes
    at_once = RECEIVED_AT_ONCE if case.form == "message" else case.batch
    as_json = case.client == "effect"
    source = PreparedSource(make_deliveries(count, distance=2 * at_once * threads, as_json=as_json), at_once)
    engine = create_engine(url, pool_size=threads, max_overflow=2)
    ready()
    rate = (_by_loop if case.client == "bare" else _by_worker)(case, engine, source, threads, seconds)
    engine.dispose()
    return rate, source.acked, source.distinct_acked()


def _by_worker(case: Case, engine: Engine, source: PreparedSource, threads: int, seconds: float) -> Rate:
    worker = Worker(
        source,
        inbox=Inbox(SUBSCRIBER, schema=SCHEMA),
        engine=engine,
        handler=handle if case.client == "worker" and case.form != "set" else None,
        batch_handler=_handle_batch if case.client == "worker" and case.form == "set" else None,
        effect=EFFECT if case.client == "effect" else None,
        transactions="message" if case.form == "message" else "batch",
        threads=threads,
    )
    worker.start()
    rate = window(lambda: source.acked, seconds, source.used_up)
    if not worker.stop():
        raise RuntimeError("the worker did not drain")
    return rate


def _by_loop(case: Case, engine: Engine, source: PreparedSource, threads: int, seconds: float) -> Rate:
    @contextmanager
    def client(_number: int) -> Iterator[Callable[[], int]]:
        def step() -> int:
            deliveries = source.receive()
            for part in [[each] for each in deliveries] if case.form == "message" else [deliveries]:
                _apply(case, engine, part)
            source.ack(deliveries)
            return len(deliveries)

        yield step

    return in_threads(threads, client, seconds, source.used_up)


def _apply(case: Case, engine: Engine, deliveries: Sequence[Delivery]) -> None:
    """Apply deliveries in a transaction; again if the database rolled it back for a deadlock, as a worker does."""
    while True:
        try:
            with Session(engine) as session, session.begin():
                messages = _first(case, session, deliveries) if case.inbox else [each.message for each in deliveries]
                if case.form == "set":
                    _handle_batch(session, messages)
                else:
                    for message in messages:
                        handle(session, message)
            return
        except Exception as error:
            if not is_retryable(error):
                raise


def _first(case: Case, session: Session, deliveries: Sequence[Delivery]) -> list[Message]:
    """Record, and return the messages that are first."""
    given = {delivery.message.id: delivery.message for delivery in deliveries}
    connection = session.connection()
    if case.form == "message":
        recorded = connection.exec_driver_sql(INSERT_ONE, tuple(given)).rowcount == 1
        return list(given.values()) if recorded else []
    first = set(connection.exec_driver_sql(INSERT_MANY, (sorted(given),)).scalars())
    return [message for message_id, message in given.items() if message_id in first]


def handle(session: Session, message: Message) -> None:
    """Apply one message."""
    add_to(session, int(message.body))


def _handle_batch(session: Session, messages: Sequence[Message]) -> None:
    """Apply a batch with one statement."""
    add_to_all(session, (int(message.body) for message in messages))
