"""Values as people read them."""

import math

import pytest

from txbox_dashboard.view import count, query_of, rate, size, span, spark


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "\N{EN DASH}"),
        (math.inf, "\N{EN DASH}"),
        (0, "0 s"),
        (0.25, "250 ms"),
        (59, "59 s"),
        (3600, "1 h"),
        (3725, "1 h 2 min"),
        (90_000, "1 d 1 h"),
        (-61, "-1 min 1 s"),
    ],
)
def test_spans(seconds: float | None, shown: str) -> None:
    assert span(seconds) == shown


def test_figures() -> None:
    assert [count(None), count(1234567), rate(0), rate(0.123), rate(1234.5)] == [
        "\N{EN DASH}",
        "1,234,567",
        "0",
        "0.12",
        "1,234",
    ]
    assert [size(None), size(999), size(1_500_000), size(2 * 10**13)] == ["\N{EN DASH}", "999 B", "1.5 MB", "20 TB"]


def test_a_sparkline_goes_from_edge_to_edge_and_stays_inside() -> None:
    assert spark([0, 5, 10], width=100, height=22) == "0.0,21.0 50.0,11.0 100.0,1.0"
    assert spark([]) == ""
    assert spark([0]) == "0.0,27.0"


def test_a_query_keeps_any_id_as_data() -> None:
    assert query_of({"id": "a&b=<c>\n/ü", "none": None}) == "id=a%26b%3D%3Cc%3E%0A%2F%C3%BC"
