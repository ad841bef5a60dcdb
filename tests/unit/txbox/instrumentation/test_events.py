"""Events, and the hooks that are told of them."""

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.txbox.events import Unloggable
from txbox import instrumentation
from txbox.instrumentation import BrokerRestored, Event, emit

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


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, Unloggable])
def test_in_a_thread_of_ours_that_is_true_of_everything(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Event] = []

    def broken(event: Event) -> None:
        raise kind

    with ThreadPoolExecutor() as pool:
        assert pool.submit(emit, [broken, told.append], RESTORED).exception() is None
    assert told == [RESTORED]
    assert "failed on BrokerRestored" in caplog.text


def test_a_ctrl_c_that_comes_while_a_hook_runs_in_the_main_thread_goes_on() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        emit([interrupted], RESTORED)


def test_events_cannot_be_changed() -> None:
    for name in instrumentation.__all__:
        kind = getattr(instrumentation, name)
        if isinstance(kind, type) and issubclass(kind, Event):
            assert kind.__dataclass_params__.frozen, name  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        RESTORED.source = "elsewhere"  # type: ignore[misc]
