"""Spans and moments, as people write them."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from txbox_cli.errors import UsageError
from txbox_cli.options import read_moment, read_span


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("12h", timedelta(hours=12)),
        (" 7d ", timedelta(days=7)),
        ("2w", timedelta(weeks=2)),
        ("1.5h", timedelta(minutes=90)),
        ("7D", timedelta(days=7)),
        ("1h30m", timedelta(minutes=90)),
    ],
)
def test_a_span(text: str, span: timedelta) -> None:
    assert read_span("--keep-sent", text) == span
    assert read_moment("--since", text) == span


@pytest.mark.parametrize(
    "text",
    ["", "7", "d", "7 d", "-7d", "0d", "7days", "1M", "1h30", "h1", "1h 30m", "1e3s", "99999999d", "9999999999w"],
)
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(UsageError, match=r"--keep-sent must be a span of time, such as 90s, 30m, 12h, 7d or 2w"):
        read_span("--keep-sent", text)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-03-01T08:00Z", datetime(2026, 3, 1, 8, tzinfo=UTC)),
        ("2026-03-01 08:00:30+01:00", datetime(2026, 3, 1, 8, 0, 30, tzinfo=timezone(timedelta(hours=1)))),
    ],
)
def test_a_moment(text: str, moment: datetime) -> None:
    assert read_moment("--since", text) == moment


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("2026-03-01", "--since needs a zone: 2026-03-01T00:00:00Z is in UTC"),
        ("2026-03-01 08:00", "--since needs a zone"),
        ("yesterday", "--since must be a time with its zone, such as 2026-03-01T08:00Z, or how long ago"),
        ("2026-13-01T08:00Z", "--since must be a time with its zone"),
    ],
)
def test_what_is_no_moment(text: str, fragment: str) -> None:
    with pytest.raises(UsageError, match=fragment):
        read_moment("--since", text)
