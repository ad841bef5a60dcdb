"""Fingerprints: the same id with another body is a mismatch."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from support.postgres.blocking import second_waits_for_first
from txbox import Inbox, Mismatch, Recorded


@pytest.fixture
def careful() -> Inbox:
    return Inbox("billing", fingerprint=True, wait_seconds=60)


def test_what_was_recorded_without_a_fingerprint_matches_every_body(engine: Engine, careful: Inbox) -> None:
    with engine.begin() as connection:
        Inbox("billing").record(connection, "m-1", b"ignored")
        assert connection.exec_driver_sql("SELECT fingerprint FROM processed_message").scalar_one() is None
    with engine.begin() as connection:
        assert careful.record(connection, "m-1", b"any") is False
        assert careful.sort_out(connection, {"m-1": b"any"}) == Recorded(frozenset(), frozenset())


def test_an_inbox_without_fingerprints_ignores_bodies(engine: Engine, careful: Inbox) -> None:
    with engine.begin() as connection:
        careful.record(connection, "m-1", b"body")
        assert Inbox("billing").record(connection, "m-1", b"other") is False
        assert Inbox("billing").record_many(connection, {"m-1": b"other"}) == set()


def test_fingerprints_are_compared_within_one_subscriber(engine: Engine, careful: Inbox) -> None:
    with engine.begin() as connection:
        careful.record(connection, "m-1", b"body")
        assert Inbox("shipping", fingerprint=True).record(connection, "m-1", b"other") is True


def test_a_mismatch_with_a_transaction_that_was_waited_for_is_found(
    engine: Engine, careful: Inbox, pool: ThreadPoolExecutor
) -> None:
    # The snapshot of the insert is older than the commit it ran into: only a second statement can see the other body.
    calls = [lambda lent, body=body: careful.record(lent, "m-1", body) for body in (b"body", b"other")]
    with second_waits_for_first(engine, pool, *calls) as (first, second, waiting):
        first.commit()
        with pytest.raises(Mismatch):
            waiting.result(30)
        second.rollback()
        assert careful.record(second, "m-1", b"body") is False
