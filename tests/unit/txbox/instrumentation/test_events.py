"""Events, and the hooks that are told of them."""

import dataclasses
import logging

import pytest

from txbox.instrumentation import BrokerRestored, Event, emit, events

RESTORED = BrokerRestored("billing", "queue")


def test_every_hook_is_told_in_order() -> None:
    told: list[tuple[str, Event]] = []
    emit([lambda event: told.append(("first", event)), lambda event: told.append(("second", event))], RESTORED)
    assert told == [("first", RESTORED), ("second", RESTORED)]


def test_what_a_hook_raises_is_logged_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("metrics are down")

    with caplog.at_level(logging.ERROR, "txbox"):
        emit([broken, told.append], RESTORED)
    assert told == [RESTORED]
    assert "failed on BrokerRestored" in caplog.text
    assert "metrics are down" in caplog.text


def test_events_cannot_be_changed() -> None:
    for name in events.__all__:
        kind = getattr(events, name)
        if isinstance(kind, type) and issubclass(kind, Event):
            assert kind.__dataclass_params__.frozen, name  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        RESTORED.source = "elsewhere"  # type: ignore[misc]
