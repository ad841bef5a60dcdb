"""Failures on a real Postgres: attempts are counted where a rollback cannot reach them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.schema import CreateSchema

from txbox import Failures, Inbox
from txbox.failures import MAX_ERROR_CHARACTERS, NO_OUTCOME, Attempt
from txbox.schema import tables


@pytest.fixture
def failures(engine: Engine) -> Failures:
    return Failures(engine, "billing")


def kept(engine: Engine) -> list[tuple[str, str, int, str]]:
    """What the table holds, read without any code under test."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT subscriber_id, message_id, attempts, error FROM message_failure ORDER BY 1, 2"
        )
        return [(row[0], row[1], row[2], row[3]) for row in rows]


def test_every_failure_counts_and_the_last_error_is_kept(engine: Engine, failures: Failures) -> None:
    assert [failures.fail("m-1", ValueError(f"attempt {number}")) for number in (1, 2, 3)] == [1, 2, 3]
    assert failures.attempts("m-1") == 3
    assert failures.attempts("m-2") == 0
    assert kept(engine) == [("billing", "m-1", 3, "ValueError: attempt 3")]


def test_the_first_and_the_last_failure_are_dated_by_the_database(engine: Engine, failures: Failures) -> None:
    failures.fail("m-1", ValueError("first"))
    failures.fail("m-1", ValueError("last"))
    with engine.connect() as connection:
        first, last, now = connection.exec_driver_sql(
            "SELECT first_failed_at, last_failed_at, clock_timestamp() FROM message_failure"
        ).one()
    assert first < last < now


def test_a_failure_survives_the_rollback_of_its_handler(engine: Engine, failures: Failures) -> None:
    with engine.connect() as connection:
        Inbox("billing").record(connection, "m-1")
        failures.fail("m-1", ValueError("no"))
        connection.rollback()
    assert failures.attempts("m-1") == 1


def test_an_attempt_is_counted_before_it_is_made_and_explained_when_it_fails(
    engine: Engine, failures: Failures
) -> None:
    assert failures.begin_attempt("m-1") == Attempt("m-1", number=1, error_before=None)
    assert kept(engine) == [("billing", "m-1", 1, NO_OUTCOME)]
    assert failures.fail("m-1", ValueError("no"), counted=True) == 1
    assert kept(engine) == [("billing", "m-1", 1, "ValueError: no")]
    assert failures.begin_attempt("m-1") == Attempt("m-1", number=2, error_before="ValueError: no")
    assert kept(engine) == [("billing", "m-1", 2, NO_OUTCOME)]


def test_a_message_that_is_processed_already_is_not_attempted(engine: Engine, failures: Failures) -> None:
    with engine.begin() as connection:
        Inbox("billing").record(connection, "m-1")
        Inbox("shipping").record(connection, "m-2")
    assert failures.begin_attempt("m-1") is None
    assert failures.begin_attempt("m-2") is not None, "what another subscriber has processed says nothing here"
    assert kept(engine) == [("billing", "m-2", 1, NO_OUTCOME)]


def test_a_counted_failure_is_counted_after_all_if_its_count_is_gone(failures: Failures) -> None:
    assert failures.fail("m-1", ValueError("no"), counted=True) == 1
    assert failures.attempts("m-1") == 1


def test_an_attempt_that_was_not_made_is_taken_back(engine: Engine, failures: Failures) -> None:
    first = failures.begin_attempt("m-1")
    assert first is not None
    failures.take_back(first)
    assert kept(engine) == [], "no attempts are no row"
    failures.take_back(first)
    assert kept(engine) == []


def test_what_is_taken_back_leaves_the_attempt_before_it_as_it_was(engine: Engine, failures: Failures) -> None:
    failures.fail("m-1", ValueError("no"))
    second = failures.begin_attempt("m-1")
    assert second is not None
    failures.take_back(second)
    assert kept(engine) == [("billing", "m-1", 1, "ValueError: no")]


def test_failures_are_forgotten_in_the_transaction_that_succeeds(engine: Engine, failures: Failures) -> None:
    for message_id in ("m-1", "m-2", "m-3"):
        failures.fail(message_id, ValueError("no"))
    with engine.connect() as connection:
        failures.forget(connection, ["m-1", "m-2"])
        connection.rollback()
    assert len(kept(engine)) == 3
    with engine.begin() as connection:
        failures.forget(connection, ["m-2", "m-1", "never failed"])
    assert [row[1] for row in kept(engine)] == ["m-3"]


def test_each_subscriber_counts_for_itself(engine: Engine, failures: Failures) -> None:
    shipping = Failures(engine, "shipping")
    failures.fail("m-1", ValueError("no"))
    assert shipping.attempts("m-1") == 0
    assert shipping.fail("m-1", ValueError("no")) == 1
    with engine.begin() as connection:
        shipping.forget(connection, ["m-1"])
    assert failures.attempts("m-1") == 1


def test_threads_that_fail_together_lose_no_count(failures: Failures) -> None:
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda number: failures.fail("m-1", ValueError(str(number))), range(40)))
    assert sorted(counts) == list(range(1, 41))
    assert failures.attempts("m-1") == 40


@pytest.mark.parametrize("isolation", ["AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE"])
def test_no_count_is_lost_whatever_level_the_host_prefers(engine: Engine, isolation: str) -> None:
    failures = Failures(engine.execution_options(isolation_level=isolation), "billing")
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: failures.fail("m-1", ValueError("no")), range(12)))
    assert sorted(counts) == list(range(1, 13))


def test_whatever_an_error_says_can_be_kept(engine: Engine, failures: Failures) -> None:
    failures.fail("m-1", ValueError("NUL \0, half \ud800, " + "x" * 100_000))
    ((_, _, _, text),) = kept(engine)
    assert text.startswith("ValueError: NUL \N{REPLACEMENT CHARACTER}, half ?, xxx")
    assert len(text) == MAX_ERROR_CHARACTERS


def test_schema_and_prefix_are_kept_to(fresh_database: str) -> None:
    engine = create_engine(fresh_database)
    place = {"schema": "Odd schema-%", "prefix": "Odd%_"}
    with engine.begin() as connection:
        connection.execute(CreateSchema(place["schema"]))
        tables(**place).metadata.create_all(connection)
    failures = Failures(engine, "100%", **place)  # type: ignore[arg-type]
    assert failures.begin_attempt("m-%s") is not None
    assert failures.fail("m-%s", ValueError("100%s"), counted=True) == 1
    second = failures.begin_attempt("m-%s")
    assert second == Attempt("m-%s", number=2, error_before="ValueError: 100%s")
    failures.take_back(second)
    assert failures.attempts("m-%s") == 1
    with engine.begin() as connection:
        failures.forget(connection, ["m-%s"])
    assert failures.attempts("m-%s") == 0
    engine.dispose()
