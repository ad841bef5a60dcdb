"""How SQL is put together."""

from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import Transformer
from psycopg.pq import Format

from txbox.postgres.sql import array_literal

TEXT_ARRAY_OID = 1009


@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_an_array_is_read_back_as_it_was_whatever_its_texts_hold(values: list[str | None]) -> None:
    read = Transformer().get_loader(TEXT_ARRAY_OID, Format.TEXT).load(array_literal(values).encode())
    assert read == values


@given(st.lists(st.none() | st.integers().map(str)))
def test_what_needs_no_quotes_is_written_without(values: list[str | None]) -> None:
    written = array_literal(values, quoted=False)
    assert '"' not in written
    assert Transformer().get_loader(TEXT_ARRAY_OID, Format.TEXT).load(written.encode()) == values
