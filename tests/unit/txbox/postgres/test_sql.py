"""How SQL is put together."""

from hypothesis import given
from hypothesis import strategies as st

from txbox.postgres.sql import text_array


@given(st.lists(st.text()))
def test_an_array_is_written_so_that_nothing_in_it_can_be_taken_for_syntax(values: list[str]) -> None:
    written = text_array(values)
    if isinstance(written, str):
        assert not any('"' in value or "\\" in value for value in values), "these need an escape"
        assert written == "{" + ",".join(f'"{value}"' for value in values) + "}"
    else:
        assert list(written) == values
