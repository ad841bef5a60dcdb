"""Fingerprints: the same id with another body is a mismatch."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from support.postgres.blocking import second_waits_for_first
from support.txbox.inbox import recorded
from txbox import Inbox, Mismatch, Recorded


@pytest.fixture
def careful() -> Inbox:
    return Inbox("billing", fingerprint=True, wait_seconds=60)


def test_the_same_id_with_another_body_is_a_mismatch_and_with_the_same_a_duplicate(
    engine: Engine, careful: Inbox
) -> None:
    with engine.begin() as connection:
        assert careful.record(connection, "m-1", b"Zo\xc3\xab") is True
    with engine.begin() as connection:
        assert careful.record(connection, "m-1", "Zoë") is False, "text counts as its UTF-8"
        with pytest.raises(Mismatch, match="billing has already processed m-1 with another body") as caught:
            careful.record(connection, "m-1", b"other")
        assert caught.value.message_ids == ("m-1",)
        assert careful.record(connection, "m-2", b"") is True, "a mismatch does not end the transaction"
    assert recorded(engine) == [("billing", "m-1"), ("billing", "m-2")]


def test_a_batch_tells_first_duplicate_and_mismatch_apart(engine: Engine, careful: Inbox) -> None:
    with engine.begin() as connection:
        assert careful.record_many(connection, {"same": b"1", "other": "1", "other too": b"1"}) == {
            "same",
            "other",
            "other too",
        }
    batch = {"same": "1", "other": b"2", "other too": "2", "new": b"1"}
    with engine.connect() as connection:
        assert careful.sort_out(connection, batch) == Recorded(frozenset({"new"}), frozenset({"other", "other too"}))
    with engine.connect() as connection, pytest.raises(Mismatch) as caught:
        careful.record_many(connection, batch)
    assert caught.value.message_ids == ("other", "other too")
    assert [message_id for _, message_id in recorded(engine)] == ["other", "other too", "same"]


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
