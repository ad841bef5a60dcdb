"""What recording costs the client: processor time for one message, many times in one transaction."""

import gc
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import psycopg
from business import INSERT_ONE, SCHEMA, SUBSCRIBER, conninfo
from rounds import Sample
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from supply import make_deliveries

from txbox import Inbox

__all__ = ["RECORD_WAYS", "measure_record"]

WARM_UP = 200


def measure_record(url: str, way: str, count: int, ids: str) -> tuple[Sample, int]:
    """Record messages in one transaction, in a process of its own.

    Args:
        url: the database.
        way: a key of ``RECORD_WAYS``.
        count: how many messages.
        ids: "v4" or "v7".

    Returns:
        Microseconds of processor time for each (and the time that passed beside it), and how many ids were first.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, url, way, count, ids).result()


def _measure(url: str, way: str, count: int, ids: str) -> tuple[Sample, int]:
    deliveries = make_deliveries(WARM_UP + count, ids=ids, distance=WARM_UP)
    message_ids = [delivery.message.id for delivery in deliveries]
    gc.collect()
    gc.freeze()
    return RECORD_WAYS[way](url, message_ids)


def _by_record_on_connection(url: str, ids: list[str]) -> tuple[Sample, int]:
    engine = create_engine(url)
    inbox = Inbox(SUBSCRIBER, schema=SCHEMA)
    with engine.begin() as connection:
        return _timed(lambda message_id: inbox.record(connection, message_id), ids)


def _by_record_on_session(url: str, ids: list[str]) -> tuple[Sample, int]:
    engine = create_engine(url)
    inbox = Inbox(SUBSCRIBER, schema=SCHEMA)
    with Session(engine) as session, session.begin():
        return _timed(lambda message_id: inbox.record(session, message_id), ids)


def _by_hand_on_cursor(url: str, ids: list[str]) -> tuple[Sample, int]:
    with psycopg.connect(conninfo(url)) as connection:
        cursor = connection.cursor()
        return _timed(lambda message_id: cursor.execute(INSERT_ONE, (message_id,)).rowcount == 1, ids)


def _by_hand_on_connection(url: str, ids: list[str]) -> tuple[Sample, int]:
    engine = create_engine(url)
    with engine.begin() as connection:
        return _timed(lambda message_id: connection.exec_driver_sql(INSERT_ONE, (message_id,)).rowcount == 1, ids)


def _timed(record: Callable[[str], bool], ids: list[str]) -> tuple[Sample, int]:
    first = sum(map(record, ids[:WARM_UP]))
    count = len(ids) - WARM_UP
    cpu, begun = time.process_time(), time.perf_counter()
    first += sum(map(record, ids[WARM_UP:]))
    cpu, passed = time.process_time() - cpu, time.perf_counter() - begun
    return Sample(cpu / count * 1e6, {"wall_us": passed / count * 1e6}), first


RECORD_WAYS: dict[str, Callable[[str, list[str]], tuple[Sample, int]]] = {
    "Inbox.record(connection)": _by_record_on_connection,
    "Inbox.record(session)": _by_record_on_session,
    "by hand, psycopg cursor": _by_hand_on_cursor,
    "by hand, SQLAlchemy connection": _by_hand_on_connection,
}
