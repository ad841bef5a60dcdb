"""Ids that their source gives out in order: what every store can keep and compare."""

from decimal import Decimal
from typing import Any

import pytest

from txbox import InvalidConfiguration
from txbox.entities.event_ids import check_kind, valid_event_id, valid_source


@pytest.mark.parametrize("event_id", [True, 1.5, None, b"1"])
def test_event_ids_of_other_kinds_are_refused(event_id: Any) -> None:
    with pytest.raises(TypeError, match=r"an event id is an int or a str"):
        valid_event_id(event_id)


def test_event_ids_have_as_many_digits_as_every_store_keeps() -> None:
    assert valid_event_id(10**38 - 1) == 10**38 - 1
    assert valid_event_id(1 - 10**38) == 1 - 10**38
    for event_id in (10**38, -(10**38)):
        with pytest.raises(InvalidConfiguration, match="at most 38 digits"):
            valid_event_id(event_id)


@pytest.mark.parametrize("source", ["", "a\0b", "x" * 201, "é" * 101, "\ud800", 7, None])
def test_sources_that_cannot_be_kept_are_refused(source: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r"^source must be 1 to 200 bytes of text"):
        valid_source(source)


def test_a_source_of_the_greatest_length_is_taken() -> None:
    assert valid_source("é" * 100) == "é" * 100


@pytest.mark.parametrize(("event_id", "highest"), [(1, 0), (1, 10**30), (1, Decimal("1.5")), (1, 2.0), ("a", "b")])
def test_ids_of_one_kind_are_compared(event_id: Any, highest: Any) -> None:
    check_kind("shop", event_id, highest)


@pytest.mark.parametrize(
    ("event_id", "highest"), [(1, "1"), ("1", 1), (1, {}), ("1", [1]), (1, True), (1, None), ("", b"")]
)
def test_ids_of_two_kinds_are_not(event_id: Any, highest: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r"the highest of source shop so far"):
        check_kind("shop", event_id, highest)
