"""Bulk loads that are killed with SIGKILL, at every moment of theirs; and what becomes of them.

The driver, its JVM and its Python workers die at one moment. Each test then cures the same state twice: one copy of the
database by resuming the run, the other by running the load again as if it had never been tried.
"""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.pool import NullPool

from support.spark.bulk_load_moments import (
    CHUNKS,
    PURCHASES,
    REACHED_SECONDS,
    SETTINGS,
    Moment,
    between_chunks,
    connected,
    gate,
    inside_a_chunk,
    while_copying,
    while_staging,
)
from support.spark.bulk_load_process import BulkLoadProcess
from support.spark.bulk_loads import WRITERS
from support.spark.purchases import APPLY, GATE, GATED, Books, adds_up
from support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # each needs a JVM or two of its own, and a machine may be slow


MOMENTS = [
    pytest.param("copy", while_copying, id="copy, while copying"),
    pytest.param("copy", between_chunks, id="copy, between chunks"),
    pytest.param("copy", inside_a_chunk, id="copy, inside a chunk"),
    pytest.param("jdbc", while_staging, id="jdbc, while staging"),
    pytest.param("jdbc", between_chunks, id="jdbc, between chunks"),
    pytest.param("jdbc", inside_a_chunk, id="jdbc, inside a chunk"),
]


@pytest.mark.parametrize(("writer", "moment"), MOMENTS)
def test_killed_at_any_moment(
    writer: str,
    moment: Moment,
    fresh_database: str,
    make_database: Callable[..., str],
    engine: Engine,
    books: Books,
    path: str,
    driver: Callable[[], BulkLoadProcess],
) -> None:
    victim = driver()
    settings = {**SETTINGS, "writer": writer}
    if moment is while_copying:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"CREATE FUNCTION passes(value bigint) RETURNS boolean LANGUAGE sql VOLATILE AS "
                f"$$ SELECT pg_advisory_xact_lock_shared({GATE}) IS NOT NULL $$"
            )
            connection.exec_driver_sql("CREATE DOMAIN slow AS bigint CHECK (value <> 991 OR passes(value))")
        settings["column_types"] = {"amount": "slow"}
    with moment(engine, books) as reached:
        victim.begin(path, url=fresh_database, apply=GATED, **settings)
        reached()
        victim.kill()
    wait_until(lambda: connected(engine) == 0, "the dead driver's connections end once nothing holds them up")
    (run_id,) = books.rows("SELECT run_id FROM bulk_load WHERE finished_at IS NULL")
    before = sum(books.applied().values())
    assert books.rows("SELECT coalesce(sum(applied), 0)::bigint FROM bulk_load_chunk") == [before]
    assert len(books.recorded()) == before < len(PURCHASES.ids)

    copy = make_database(f"TEMPLATE {make_url(fresh_database).database}")  # nobody is connected
    resumed = driver().load(path, url=fresh_database, apply=APPLY, resume=run_id, **settings)
    assert (resumed.run_id, resumed.attempts, resumed.writer) == (run_id, 2, writer)
    adds_up(resumed, PURCHASES)
    books.assert_exact(PURCHASES)
    books.assert_finished(run_id)

    other = create_engine(copy, poolclass=NullPool)
    with other.begin() as connection:
        connection.exec_driver_sql("UPDATE bulk_load SET heartbeat_at = heartbeat_at - interval '2 days'")
    again = driver().load(path, url=copy, apply=APPLY, **settings)
    assert (again.attempts, again.chunks) == (1, CHUNKS)
    adds_up(again, PURCHASES, already=before)
    Books(other).assert_exact(PURCHASES)
    Books(other).assert_finished(again.run_id)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_resumed_run_waits_for_what_the_dead_one_has_left_in_the_database(
    writer: str, fresh_database: str, engine: Engine, books: Books, path: str, driver: Callable[[], BulkLoadProcess]
) -> None:
    """A connection whose client is dead notices it no sooner than it has something to say, or the server looks."""
    unnoticed = f"SELECT set_config('client_connection_check_interval', '0', true); {GATED}"
    victim = driver()
    settings = {**SETTINGS, "writer": writer, "url": fresh_database}
    with gate(engine):
        victim.begin(path, apply=unnoticed, **settings)
        wait_until(lambda: books.waiting("advisory", GATE), timeout=REACHED_SECONDS)
        victim.kill()
        (run_id,) = books.rows("SELECT run_id FROM bulk_load")
        heir = driver()
        heir.begin(path, apply=APPLY, resume=run_id, **settings)
        wait_until(
            lambda: books.waiting("transactionid"), "a chunk waits for the one before it", timeout=REACHED_SECONDS
        )
        assert books.waiting("advisory", GATE), "the dead one's chunk is still there"
    adds_up(heir.report(), PURCHASES)
    books.assert_exact(PURCHASES)
    books.assert_finished(run_id)
