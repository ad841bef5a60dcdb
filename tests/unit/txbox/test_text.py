"""Text that Postgres can hold."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbox.text import log_failure, storable


@given(st.text())
def test_storable_text_is_what_postgres_can_hold(text: str) -> None:
    kept = storable(text)
    kept.encode()
    assert "\0" not in kept
    assert len(kept) == len(text)


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")))
def test_text_that_postgres_can_hold_is_left_alone(text: str) -> None:
    assert storable(text) == text


class Unprintable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ValueError("no text for you")


def test_a_log_that_raises_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise SystemExit(1)

    for name in ("exception", "error"):
        monkeypatch.setattr(logging.getLogger("txbox.threads"), name, broken)
    try:
        raise Unprintable
    except Unprintable:
        log_failure("it failed")
