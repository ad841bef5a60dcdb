"""What a service answers to probes."""

import threading
from collections.abc import Callable, Mapping

import pytest

from txbox import InvalidConfiguration
from txbox.instrumentation import BrokerLost, BrokerRestored, DatabaseLost, DatabaseRestored, Event
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.service import Service
from txbox_cli.health import Health

ERROR = ValueError("postgresql://u:hunter2@h/x")


class Waiting(Service):
    """Waits until it is told to go on; its work ends by itself, as no work of ours does."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        return {"waiting": self.go_on.wait}

    def _stopped(self, finished: bool) -> None: ...


def test_it_follows_a_service_from_its_start_to_its_end() -> None:
    service = Waiting()
    health = Health(service)
    assert health.live()[0] == 200
    assert health.ready()[::2] == (503, b"not ready: it has not started yet\n")
    service.start()
    health.started()
    assert (health.live()[0], health.ready()[0]) == (200, 200)
    assert not service.stop(0)
    assert health.live()[0] == 200
    assert health.ready()[::2] == (503, b"not ready: it is stopping\n")
    service.go_on.set()
    assert service.stop()


def test_a_thread_that_has_ended_is_neither_live_nor_ready() -> None:
    service = Waiting()
    health = Health(service)
    service.go_on.set()
    service.start()
    health.started()
    for thread in service._threads:
        thread.join()
    assert health.live()[0] == 503
    assert health.ready()[::2] == (503, b"not ready: a thread has ended\n")


@pytest.mark.parametrize(
    ("lost", "restored", "why"),
    [
        (DatabaseLost("s", "q", ERROR, 1), DatabaseRestored("s", "q"), b"not ready: the database cannot be used\n"),
        (BrokerLost("s", "q", ERROR, 1), BrokerRestored("s", "q"), b"not ready: the broker cannot be reached\n"),
        (BrokerLost(RELAY_SUBSCRIBER, "q", ERROR, 1), BrokerRestored(RELAY_SUBSCRIBER, "q"), b"ready\n"),
    ],
)
def test_an_outage_is_named_without_secrets(lost: Event, restored: Event, why: bytes) -> None:
    service = Waiting()
    health = Health(service)
    service.start()
    health.started()
    try:
        health(lost)
        assert health.ready()[2] == why
        health(restored)
        assert health.ready()[0] == 200
    finally:
        service.go_on.set()
        service.stop()


def test_hooks_are_refused_after_the_start() -> None:
    service = Waiting()
    service.start()
    with pytest.raises(InvalidConfiguration, match="add hooks before its start"):
        service.add_hook(lambda event: None)
    service.go_on.set()
    service.stop()
