"""What an inbox, and watermarks, refuse before they talk to a database."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

from txbox import Inbox, InvalidConfiguration
from txbox.watermarks import Watermarks

both = pytest.mark.parametrize("kind", [Inbox, Watermarks])


@pytest.mark.parametrize("subscriber_id", ["", "a\0b", "é" * 101, "\ud800", None, 7])
@both
def test_a_subscriber_that_postgres_cannot_name_is_refused(kind: Any, subscriber_id: object) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"^{kind.__name__}\.subscriber_id must be 1 to 200 bytes of text"):
        kind(subscriber_id)


def test_the_longest_subscriber_is_accepted() -> None:
    assert Inbox("é" * 100).subscriber_id == "é" * 100


@pytest.mark.parametrize("wait_seconds", [0, -1, 0.0001, 3601, float("inf"), float("nan")])
@both
def test_a_wait_without_bounds_is_refused(kind: Any, wait_seconds: float) -> None:
    # Postgres reads a lock_timeout of 0 as "wait for ever", which is what must not happen.
    with pytest.raises(InvalidConfiguration, match=rf"^{kind.__name__}\.wait_seconds must be from 0\.001 to 3600, not"):
        kind("billing", wait_seconds=wait_seconds)


@pytest.mark.parametrize("not_a_connection", [None, "postgresql://", object()])
def test_only_a_connection_or_a_session_will_do(not_a_connection: object) -> None:
    with pytest.raises(
        TypeError, match="a Connection or Session of SQLAlchemy, or a connection of psycopg or of Django, is needed"
    ):
        Inbox("billing").record(not_a_connection, "m-1")  # type: ignore[arg-type]


def test_an_inbox_that_keeps_fingerprints_needs_bodies() -> None:
    inbox = Inbox("billing", fingerprint=True)
    with pytest.raises(TypeError, match="the body of message 'm-1' is needed too"):
        inbox.record(Session(), "m-1")
    with pytest.raises(TypeError, match="the body of message 'm-1' is needed too"):
        inbox.record_many(Session(), ["m-1"])


def test_an_inbox_shows_who_and_where_it_is() -> None:
    assert repr(Inbox("billing")) == "Inbox('billing')"
    assert repr(Inbox("billing", schema="shop")) == "Inbox('billing', schema='shop')"
