"""DynamoDB's values as Python's."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbox_aws.dynamodb.items import plain, typed

NUMBERS = st.integers(-(10**37), 10**37) | st.decimals(-1000, 1000, places=3)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS, lambda parts: st.lists(parts) | st.dictionaries(st.text(min_size=1), parts), max_leaves=20
)
SETS = st.sets(NUMBERS, min_size=1) | st.sets(st.text(), min_size=1) | st.sets(st.binary(), min_size=1)


@given(VALUES | SETS)
def test_values_go_there_and_back(value: Any) -> None:
    assert plain({"value": typed(value)}) == {"value": value}


@pytest.mark.parametrize(
    ("value", "kind"), [(Decimal(7), int), (7, int), (Decimal("7.5"), Decimal), (b"7", bytes), ("7", str)]
)
def test_whole_numbers_are_int_and_bytes_are_bytes(value: Any, kind: type) -> None:
    assert type(plain({"value": typed(value)})["value"]) is kind


def test_what_dynamodb_cannot_keep_is_refused() -> None:
    with pytest.raises(TypeError, match="Float types are not supported"):
        typed(0.1)
