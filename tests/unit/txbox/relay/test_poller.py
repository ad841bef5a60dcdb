"""Reading a snapshot, as Postgres writes it."""

import pytest

from txbox.relay.poller import PollResult, Snapshot


@pytest.mark.parametrize(
    ("text", "snapshot"),
    [
        ("10:20:10,14,15", Snapshot(20, (10, 14, 15))),
        ("10:10:", Snapshot(10, ())),
        ("4294967299:4294967301:4294967300", Snapshot(4294967301, (4294967300,))),
    ],
)
def test_a_snapshot_is_read(text: str, snapshot: Snapshot) -> None:
    assert Snapshot.parse(text) == snapshot


def test_only_what_asks_for_work_counts_as_found() -> None:
    assert not PollResult()
    assert PollResult(fresh={1: 1})
    assert PollResult(due=frozenset([1]))
    assert PollResult(woken=True)
