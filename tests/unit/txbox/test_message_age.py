"""How old a message is known to be."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from txbox import Message
from txbox.message import earliest, time_from, time_of_id
from txbox.outbox.message_ids import new_message_id

MADE = "019dd9c0-0e3b-7abc-8def-0123456789ab"
MADE_AT = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=0x019DD9C00E3B)
T = datetime(2026, 4, 2, 10, 15, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "written", [MADE, MADE.upper(), MADE.replace("-", ""), f"urn:uuid:{MADE}", f"URN:UUID:{MADE.upper()}"]
)
def test_an_id_of_version_7_has_its_time_however_it_is_written(written: str) -> None:
    assert time_of_id(written) == MADE_AT


def test_an_id_of_our_own_was_made_now() -> None:
    made = time_of_id(new_message_id())
    assert made is not None
    assert abs(made - datetime.now(UTC)) < timedelta(seconds=60)


@pytest.mark.parametrize(
    "other",
    [
        "",
        "a",
        "x" * 36,
        str(uuid.UUID(int=uuid.UUID(MADE).int & ~(0xF << 76) | 4 << 76)),  # version 4
        str(uuid.UUID(int=uuid.UUID(MADE).int & ~(0b11 << 62))),  # another variant
        str(uuid.UUID(int=uuid.UUID(MADE).int & ((1 << 80) - 1))),  # of 1970
        MADE.replace("-", "", 1) + "-",
        MADE[:-1] + "g",
        f"{{{MADE[:-2]}}}",
        f"urn:uuid:{MADE}"[:44] + "\n",
        MADE.replace("0", "\u0660"),  # a digit, but not of ASCII
    ],
)
def test_other_ids_have_no_time(other: str) -> None:
    assert time_of_id(other) is None


@pytest.mark.parametrize(
    ("written", "time"),
    [
        ("1775124930123", T + timedelta(milliseconds=123)),
        (1775124930123, T + timedelta(milliseconds=123)),
        ("2026-04-02T10:15:30Z", T),
        ("2026-04-02t10:15:30.123456789z", T + timedelta(microseconds=123456)),
        ("2026-04-02T12:15:30.5+02:00", T + timedelta(milliseconds=500)),
        ("2026-04-02T10:15:60Z", T + timedelta(seconds=29)),
    ],
)
def test_times_as_they_are_written(written: object, time: datetime) -> None:
    assert time_from(written) == time


@pytest.mark.parametrize(
    "written",
    [
        *(None, "", "soon", 3.5, True, "2026-04-02T10:15:30", "1999-01-01T00:00:00Z", "9" * 60, "9" * 5_000, "-1"),
        *("\u0663" * 13, "2026-13-02T10:15:30Z", "0001-01-01T00:00:00+23:59", "0", {}),
    ],
)
def test_what_is_no_time_is_unknown_and_no_error(written: object) -> None:
    assert time_from(written) is None


def test_the_earliest_of_what_is_known_counts() -> None:
    assert earliest(None, T, None, T - timedelta(1)) == T - timedelta(1)
    assert earliest(None) is None


def test_when_it_was_sent_is_no_part_of_what_a_message_is() -> None:
    assert Message("a", b"", sent_at=T) == Message("a", b"")
