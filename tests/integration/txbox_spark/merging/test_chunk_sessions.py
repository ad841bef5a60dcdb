"""The sessions of chunks: shared, but without traces of another chunk."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, make_url
from sqlalchemy.exc import DataError

from txbox.postgres.transactions import short_transaction
from txbox_spark.merging.chunk_sessions import open_sessions


@pytest.fixture
def sessions(database_url: str) -> Iterator[Engine]:
    engine = open_sessions(database_url, "SELECT FROM fresh_event")
    yield engine
    engine.dispose()


def server_process(sessions: Engine, *statements: str) -> int:
    """Run statements as a chunk does, and return which process of the server ran them."""
    with short_transaction(sessions) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
        return int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())


def test_a_chunk_finds_no_trace_of_the_one_before(sessions: Engine) -> None:
    leave = (
        "SET application_name = 'mine'",
        "SET ROLE pg_monitor",
        "CREATE TEMPORARY TABLE left_over ()",
        "PREPARE left_over AS SELECT 1",
        "SELECT pg_advisory_lock(1)",
        "LISTEN left_over",
    )
    first = server_process(sessions, *leave)
    with short_transaction(sessions) as connection:
        found = connection.exec_driver_sql(
            "SELECT pg_backend_pid(), current_setting('application_name'), current_setting('role'), "
            "to_regclass('left_over'), (SELECT count(*) FROM pg_prepared_statements), "
            "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()), "
            "(SELECT count(*) FROM pg_listening_channels())"
        ).one()
    assert tuple(found) == (first, "", "none", None, 0, 0, 0)


def test_statements_that_run_often_survive_resets(sessions: Engine) -> None:
    """Nor does psycopg go on to use statements that it has prepared, and a reset has dropped."""
    assert len({server_process(sessions, *["SELECT 1"] * 7) for _ in range(3)}) == 1


def test_a_failed_chunk_leaves_none_either(sessions: Engine) -> None:
    first = server_process(sessions)
    with pytest.raises(DataError):
        server_process(sessions, "SET application_name = 'mine'", "SELECT 1 / 0")
    assert server_process(sessions, "SELECT 1 / (current_setting('application_name') <> 'mine')::int") == first


def test_behind_a_pooler_no_session_is_reset(sessions: Engine) -> None:
    """Other clients may have prepared statements in it."""
    with short_transaction(sessions) as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.prepare_threshold = None  # as `txbox.postgres.engines` does when it notices one
        first = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    assert server_process(sessions) != first


def test_nor_where_the_url_tells_of_one(database_url: str) -> None:
    told = open_sessions(make_url(database_url).update_query_dict({"prepare_threshold": "None"}), "SELECT 1")
    assert server_process(told) != server_process(told)
    told.dispose()
