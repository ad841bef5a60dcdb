"""Text that Postgres can hold."""

from hypothesis import given
from hypothesis import strategies as st

from txbox.text import storable


@given(st.text())
def test_storable_text_is_what_postgres_can_hold(text: str) -> None:
    kept = storable(text)
    kept.encode()
    assert "\0" not in kept
    assert len(kept) == len(text)


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")))
def test_text_that_postgres_can_hold_is_left_alone(text: str) -> None:
    assert storable(text) == text
