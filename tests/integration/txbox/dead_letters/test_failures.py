"""Failures on a real Postgres: attempts are counted where a rollback cannot reach them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from support.postgres.tables import make_tables
from txbox import Failures, Inbox, InFlight
from txbox.dead_letters.failures import MAX_ERROR_CHARACTERS, MAX_HISTORY, NO_OUTCOME, Attempt, History


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
    assert [failures.fail("m-1", ValueError(f"attempt {number}")).attempts for number in (1, 2, 3)] == [1, 2, 3]
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


def begun(failures: Failures, message_id: str = "m-1", receive_count: int = 2) -> Attempt:
    attempt = failures.begin_attempt(message_id, receive_count=receive_count)
    assert attempt is not None
    return attempt


def told(history: History) -> list[tuple[int, str]]:
    """At which deliveries attempts were made that counted, and why."""
    return [(entry["delivery"], entry["error"]) for entry in history]


def test_an_attempt_is_counted_before_it_is_made_and_explained_when_it_fails(
    engine: Engine, failures: Failures
) -> None:
    first = begun(failures)
    assert (first.number, first.error_before, first.seconds_before, first.before) == (1, None, None, ())
    assert kept(engine) == [("billing", "m-1", 1, NO_OUTCOME)]
    failed = failures.fail("m-1", ValueError("no"), attempt=first, receive_count=2)
    assert (failed.attempts, told(failed.history)) == (1, [(2, "ValueError: no")])
    assert kept(engine) == [("billing", "m-1", 1, "ValueError: no")]
    second = begun(failures, receive_count=5)
    assert (second.number, second.error_before) == (2, "ValueError: no")
    assert second.seconds_before is not None
    assert 0 < second.seconds_before < 60
    assert told(second.before) == [(2, "ValueError: no")]
    assert kept(engine) == [("billing", "m-1", 2, NO_OUTCOME)]


def test_a_message_that_is_processed_already_is_not_attempted(engine: Engine, failures: Failures) -> None:
    with engine.begin() as connection:
        Inbox("billing").record(connection, "m-1")
        Inbox("shipping").record(connection, "m-2")
    assert failures.begin_attempt("m-1") is None
    assert failures.begin_attempt("m-2") is not None, "what another subscriber has processed says nothing here"
    assert kept(engine) == [("billing", "m-2", 1, NO_OUTCOME)]


def test_a_message_that_is_being_processed_and_failed_before_is_waited_for_so_long(engine: Engine) -> None:
    failures = Failures(engine, "billing", wait_seconds=0.05)
    failures.fail("m-1", ValueError("no"))
    with engine.connect() as elsewhere:
        failures.forget(elsewhere, ["m-1"])
        with pytest.raises(InFlight):
            failures.begin_attempt("m-1")
    assert begun(failures).number == 2


def test_a_counted_failure_is_counted_after_all_if_its_count_is_gone(engine: Engine, failures: Failures) -> None:
    attempt = begun(failures)
    with engine.begin() as connection:
        failures.forget(connection, ["m-1"])
    assert failures.fail("m-1", ValueError("no"), attempt=attempt).attempts == 1
    assert failures.attempts("m-1") == 1


def test_an_attempt_that_was_not_made_is_taken_back(engine: Engine, failures: Failures) -> None:
    first = begun(failures)
    failures.take_back(first)
    assert kept(engine) == [], "no attempts are no row"
    failures.take_back(first)
    assert kept(engine) == []


def test_what_is_taken_back_leaves_the_attempt_before_it_as_it_was(engine: Engine, failures: Failures) -> None:
    failures.fail("m-1", ValueError("no"))
    second = begun(failures)
    for _ in range(2):
        failures.take_back(second)
        assert kept(engine) == [("billing", "m-1", 1, "ValueError: no")]


def test_attempts_that_overlap_end_each_by_itself(engine: Engine, failures: Failures) -> None:
    """A copy begins while the message runs; the second one fails, and the first one was none."""
    first, second = begun(failures, receive_count=2), begun(failures, receive_count=3)
    assert failures.fail("m-1", ValueError("second"), attempt=second, receive_count=3).attempts == 2
    failures.take_back(first)
    assert kept(engine) == [("billing", "m-1", 1, "ValueError: second")]
    third = begun(failures, receive_count=4)
    assert told(third.before) == [(3, "ValueError: second")]


def test_the_last_attempts_are_kept_and_all_are_counted(engine: Engine, failures: Failures) -> None:
    for number in range(1, MAX_HISTORY + 6):
        failed = failures.fail("m-1", ValueError(f"{number}" * 1000), receive_count=number)
    assert failed.attempts == MAX_HISTORY + 5
    assert [delivery for delivery, _ in told(failed.history)] == list(range(6, MAX_HISTORY + 6))


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
    assert shipping.fail("m-1", ValueError("no")).attempts == 1
    with engine.begin() as connection:
        shipping.forget(connection, ["m-1"])
    assert failures.attempts("m-1") == 1


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE"])
def test_threads_that_fail_together_lose_no_count_whatever_level_the_host_prefers(
    engine: Engine, isolation: str
) -> None:
    failures = Failures(engine.execution_options(isolation_level=isolation), "billing")
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda _: failures.fail("m-1", ValueError("no")).attempts, range(40)))
    assert sorted(counts) == list(range(1, 41))
    assert failures.attempts("m-1") == 40


def test_whatever_an_error_says_can_be_kept(engine: Engine, failures: Failures) -> None:
    failures.fail("m-1", ValueError("NUL \0, half \ud800, " + "x" * 100_000))
    ((_, _, _, text),) = kept(engine)
    assert text.startswith("ValueError: NUL \N{REPLACEMENT CHARACTER}, half ?, xxx")
    assert len(text) == MAX_ERROR_CHARACTERS


def test_schema_and_prefix_are_kept_to(fresh_engine: Engine) -> None:
    place = {"schema": "Odd schema-%", "prefix": "Odd%_"}
    make_tables(fresh_engine, **place)
    failures = Failures(fresh_engine, "100%", **place)  # type: ignore[arg-type]
    assert failures.fail("m-%s", ValueError("100%s"), attempt=begun(failures, "m-%s")).attempts == 1
    second = begun(failures, "m-%s")
    assert (second.number, second.error_before) == (2, "ValueError: 100%s")
    failures.take_back(second)
    assert failures.attempts("m-%s") == 1
    with fresh_engine.begin() as connection:
        failures.forget(connection, ["m-%s"])
    assert failures.attempts("m-%s") == 0
