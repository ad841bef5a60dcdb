"""What a worker says of what it receives."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

from support.workers.memory_worker import work_off
from txbox import Message
from txbox.instrumentation import Event, Received
from txbox_workers.memory_source import MemorySource


@pytest.mark.parametrize(
    ("minutes_ago", "told"), [([None], None), ([None, 2, 5], 300.0), ([-5], 0.0)], ids=["unknown", "oldest", "ahead"]
)
def test_the_age_of_the_oldest_message_of_a_batch(
    engine: Engine, minutes_ago: list[int | None], told: float | None
) -> None:
    now = datetime.now(UTC)
    sent = [None if one is None else now - timedelta(minutes=one) for one in minutes_ago]
    received: list[Event] = []
    source = MemorySource([Message(str(number), b"", sent_at=at) for number, at in enumerate(sent)])
    work_off(source, engine, handler=lambda *_: None, hooks=[received.append])
    (event,) = [one for one in received if isinstance(one, Received)]
    assert event.oldest_seconds == (None if told is None else pytest.approx(told, abs=60))
    if told == 0:
        assert event.oldest_seconds == 0
