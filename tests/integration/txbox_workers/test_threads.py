"""Polling threads: several of one worker, and what does not end them."""

import asyncio
from itertools import product
from typing import Any, ClassVar

import pytest
from sqlalchemy import Engine

from support.txbox.events import Kept, Unloggable
from support.waiting import wait_until
from support.workers.business import Business, once
from support.workers.memory_worker import at_work, make, messages
from txbox.instrumentation import Committed, Event, Received, Settled
from txbox_workers.memory_source import MemorySource


@pytest.mark.parametrize(
    ("error", "moment"),
    [
        *product([SystemExit, asyncio.CancelledError], [Received, Committed, Settled]),
        (KeyboardInterrupt, Received),
        (Unloggable, Received),
    ],
)
def test_a_hook_that_raises_anything_does_not_end_the_polling_thread_and_takes_no_message_away(
    engine: Engine, business: Business, error: type[BaseException], moment: type[Event]
) -> None:
    left = [1]

    def hook(event: Event) -> None:
        if isinstance(event, moment) and left:
            left.pop()
            raise error

    source = MemorySource(messages("a"))
    with at_work(make(source, engine, hooks=[hook])):
        wait_until(lambda: not left)
        source.send(messages("b")[0])
        assert source.wait_until_empty(20)
    assert business.applied() == once("ab")


def test_a_source_that_breaks_in_every_call_does_not_end_the_worker(engine: Engine, business: Business) -> None:
    class Breaking(MemorySource):
        left: ClassVar[dict[str, int]] = {}

        def __getattribute__(self, name: str) -> Any:
            left = object.__getattribute__(self, "left")
            if left.get(name):
                left[name] -= 1
                raise LookupError(f"{name} is broken")
            return object.__getattribute__(self, name)

        def requeue(self) -> None:
            """What a broker does when visibility ends."""
            with self._condition:
                self._ready.extend(self._taken.values())
                self._taken.clear()

    source = Breaking(messages("a", "b"))
    kept = Kept()
    worker = make(source, engine, hooks=[kept])
    source.left.update(receive=2, ack=2, hand_back=2)
    with at_work(worker):
        for _ in range(2):
            wait_until(lambda: source._taken and source._taken.keys() <= {e.delivery_id for e in kept.of(Settled)})
            source.requeue()
        assert source.wait_until_empty(20)
    assert business.applied() == once("ab")
