"""The thread that watches waits: it works while something waits, and sleeps otherwise."""

import time
from typing import Any

import pytest

from support.waiting import wait_until
from txbox.postgres import watchdog


class Driver:
    """Stands for a connection, of which a wait keeps no more than this."""


def test_the_thread_looks_while_something_waits_and_sleeps_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    looks: list[set[Any]] = []
    watching = watchdog._Watchdog()
    monkeypatch.setattr(watching, "_check", lambda: looks.append(set(watching._waits)))
    for _ in range(2):
        wait = watchdog._Wait(Driver())
        watching.begin(wait)
        before = len(looks)
        wait_until(lambda before=before: len(looks) > before + 2)
        assert {wait} in looks
        watching.end(wait)
        # One look may be under way, and one more may have been due.
        wait_until(lambda: looks[-1] == set() or not watching._has_waits.is_set())
        seen = len(looks)
        time.sleep(20 * watchdog.TICK_SECONDS)
        assert len(looks) <= seen + 2
