"""Moments of a bulk load, made certain: the load is held up there by a lock of the test's.

Each is a context manager over what waits until the moment is reached; what holds the load up ends with the block.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import NullPool

from support.spark.purchases import GATE, Books, Purchases
from support.waiting import wait_until
from txbox.schema import tables

PURCHASES = Purchases.make(2_500, twice=250, without_id=3)
SETTINGS = {"subscriber_id": "billing", "message_id": "purchase_id", "chunk_rows": 500, "parallelism": 2}
CHUNKS = 6
REACHED_SECONDS = 120

Moment = Callable[[Engine, Books], contextlib.AbstractContextManager[Callable[[], object]]]


def database(url: str) -> Engine:
    """Make txbox's tables in an empty database; the engine keeps no connection: whoever is connected is the load."""
    engine = create_engine(url, poolclass=NullPool)
    tables().metadata.create_all(engine)
    return engine


def connected(engine: Engine) -> int:
    """How many others are connected to the database."""
    with engine.connect() as connection:
        return int(
            connection.exec_driver_sql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
            ).scalar_one()
        )


@contextmanager
def held(engine: Engine, sql: str) -> Iterator[None]:
    """Hold a lock."""
    with engine.connect() as connection, connection.begin():
        connection.exec_driver_sql(sql)
        yield


def gate(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return held(engine, f"SELECT pg_advisory_xact_lock({GATE})")


# Staging tables get a trigger that has one purchase wait at the gate.
GATED_STAGING = f"""
CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared({GATE}); RETURN new; END $$;
CREATE FUNCTION gate_staging() RETURNS event_trigger LANGUAGE plpgsql AS $$
DECLARE made text;
BEGIN
  FOR made IN
    SELECT object_identity FROM pg_event_trigger_ddl_commands() WHERE object_identity ~ 'staging_[0-9a-f]{{12}}_1_\\d+$'
  LOOP
    EXECUTE 'CREATE TRIGGER gate BEFORE INSERT ON ' || made ||
      ' FOR EACH ROW WHEN (new.message_id = ''p002499'') EXECUTE FUNCTION wait_at_gate()';
  END LOOP;
END $$;
CREATE EVENT TRIGGER gate_staging ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION gate_staging()"""


@contextmanager
def while_staging(engine: Engine, books: Books) -> Iterator[Callable[[], object]]:
    with engine.begin() as connection:
        connection.exec_driver_sql(GATED_STAGING.replace("%", "%%"))

    def reached() -> bool:
        if not books.waiting("advisory", GATE):
            return False
        (table,) = books.staging_tables()
        return bool(books.rows(f"SELECT count(*) FROM {table}")[0])

    with gate(engine):
        yield lambda: wait_until(reached, "a task has staged, another waits", timeout=REACHED_SECONDS)
        assert not books.chunks_done()


@contextmanager
def while_copying(engine: Engine, books: Books) -> Iterator[Callable[[], object]]:
    """A chunk waits in COPY, at a value whose type has it wait at the gate."""
    with gate(engine):
        yield lambda: wait_until(lambda: books.waiting("advisory", GATE), "COPY waits", timeout=REACHED_SECONDS)


@contextmanager
def between_chunks(engine: Engine, books: Books) -> Iterator[Callable[[], object]]:
    """No chunk is at work: a lock lets those end that have claimed theirs, and keeps the others from claiming."""
    with engine.connect() as connection, ThreadPoolExecutor(1) as pool:

        def reached() -> None:
            with gate(engine):
                wait_until(lambda: books.waiting("advisory", GATE), "a chunk waits", timeout=REACHED_SECONDS)
                locking = pool.submit(
                    connection.exec_driver_sql, "LOCK TABLE bulk_load_chunk IN SHARE ROW EXCLUSIVE MODE"
                )
                wait_until(lambda: books.waiting("relation"), "the lock is asked for, and the next in the queue")
            locking.result(20)
            wait_until(lambda: books.waiting("relation"), "chunks wait to be claimed")
            assert 3 <= books.chunks_done() < CHUNKS

        yield reached
        connection.rollback()


@contextmanager
def inside_a_chunk(engine: Engine, books: Books) -> Iterator[Callable[[], object]]:
    with gate(engine):
        yield lambda: wait_until(lambda: books.waiting("advisory", GATE), "a chunk waits", timeout=REACHED_SECONDS)
        assert books.chunks_done() == 2
