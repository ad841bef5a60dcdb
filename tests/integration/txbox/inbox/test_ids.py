"""Ids: which ones the inbox can keep, and which ones it refuses."""

import random
from typing import Any

import pytest
from sqlalchemy import Engine

from support.txbox.inbox import recorded
from txbox import Inbox, InvalidMessageId


@pytest.mark.parametrize(
    ("message_id", "error"),
    [
        *(pytest.param(bad, InvalidMessageId, id=repr(bad[:3])) for bad in ("", "a\0b", "x" * 1_001, "\ud800")),
        *((no_text, TypeError) for no_text in (None, 7, b"m-1")),
    ],
)
def test_an_id_that_cannot_be_kept_is_refused_and_the_transaction_goes_on(
    engine: Engine, inbox: Inbox, message_id: Any, error: type[Exception]
) -> None:
    with engine.begin() as connection:
        for call in (inbox.record, lambda lent, one: inbox.record_many(lent, ["m-0", one])):
            with pytest.raises(error):
                call(connection, message_id)
        assert inbox.record(connection, "m-1")
    assert recorded(engine) == [("billing", "m-1")]


def test_the_longest_id_of_the_longest_subscriber_fits_into_the_key(engine: Engine) -> None:
    # Random, because Postgres compresses: a thousand times the same letter would prove nothing.
    letters = random.Random(1)
    longest = "".join(chr(letters.randrange(0x21, 0x7F)) for _ in range(1_000))
    subscriber = "".join(chr(letters.randrange(0x21, 0x7F)) for _ in range(200))
    with engine.begin() as connection:
        assert Inbox(subscriber).record(connection, longest) is True
        assert Inbox(subscriber).record(connection, longest) is False


def test_an_id_of_any_text_is_recorded_as_it_is(engine: Engine, inbox: Inbox) -> None:
    for odd in ('"', "\\", "{", "}", ",", "NULL", " ", "a,b", '","', "%s", "%", "é\U0001f600", "\n"):
        ids = {odd, f"{odd}-2", "plain"}
        with engine.connect() as connection:
            assert inbox.record_many(connection, ids) == ids
            assert inbox.record_many(connection, ids) == set()
            assert not inbox.record(connection, odd)
            kept = connection.exec_driver_sql("SELECT message_id FROM processed_message").scalars()
            assert set(kept) == ids
            connection.rollback()
